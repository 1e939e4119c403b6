"""What is wrong with an engine and its store, as the engine told last. Pure."""

from collections.abc import Iterator

from engine.protocol.reports import Stats, StoreStats
from gateway.base.words import counted
from gateway.conditions.kinds import LULL_SECONDS, Finding
from gateway.routing.engine import Engine
from gateway.structs.conditions import ConditionKind

FULL_SHARE = 0.95
NEARLY_FULL_SHARE = 0.9
UNLEASED_SHARE = 0.1
KEPT_COUNTS = 5000
# Entries may hold nine tenths of a store, so it is nearly full a little below.
STORE_FULL_SHARE = 0.85
_OUT_OF_MEMORY = ("OutOfMemory", "MemoryError", "out of memory")
_REFUSED_STORES = {
    "in_use": "another engine uses its directory",
    "strangers": "its directory has files that are no store's",
    "newer": "it is of a newer version",
    "older": "it is of an older version",
    "unusable": "its directory can't be opened or written",
    "too_small": "it has too little room",
    "server_flags": "the server behind the engine does not keep slot files",
}


class Increases:
    """Which counters have gone up within LULL_SECONDS. A new process counts from 0."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[str, int]] = {}
        self._grown_at: dict[tuple[str, str], float] = {}

    def has_grown(self, engine: str, counter: str, epoch: str, count: int, now: float) -> bool:
        """Take in a count, and return whether the counter has gone up within LULL_SECONDS. What
        happened before the first look does not count: it may be long ago."""
        key = engine, counter
        counts = self._counts.get(key)
        self._counts[key] = epoch, count
        if counts is not None:
            before = counts[1] if counts[0] == epoch else 0
            if count > before:
                self._grown_at[key] = now
        return now - self._grown_at.get(key, now - LULL_SECONDS) < LULL_SECONDS

    def keep(self, engines: set[str]) -> None:
        """Forget all other engines."""
        self._counts = {key: value for key, value in self._counts.items() if key[0] in engines}
        self._grown_at = {key: value for key, value in self._grown_at.items() if key[0] in engines}


def of_engine(engine: Engine, increases: Increases, now: float) -> Iterator[Finding]:
    """All that is wrong with one engine at `now` (monotonic seconds)."""
    name = engine.name
    reason = str(engine.readiness.get("error") or "")
    match engine.status:
        case "unsure" | "down":
            cause = reason or "no answer"
            if engine.failure:
                yield _failed(engine, cause)
            else:
                yield Finding("engine_not_answering", name, cause, name, engine.heard_at)
        case "refused":
            yield Finding(
                "another_model",
                name,
                reason,
                name,
                cause_for_all="its model is another one than the one of its name",
            )
        case "starting":
            yield _starting(engine)
        case "ready":
            if engine.notes:
                yield Finding("another_adapter", name, "; ".join(engine.notes), name)
            lack = engine.why_not_isolated
            if lack is not None:
                yield Finding(
                    "engine_not_isolated",
                    name,
                    lack,
                    name,
                    cause_for_all="a request may be answered from what another workspace sent",
                )
            stats = engine.last_stats
            if stats is not None and stats.epoch == engine.answers_in:
                yield from of_stats(name, stats, increases, now)
    if engine.is_draining:
        running = counted(engine.load.num_running, "turn")
        cause = f"it gets no new turns, and {running} of this gateway run there"
        yield Finding("engine_draining", name, cause, name)
    if engine.status == "ready" and engine.breaker.state(now) != "closed":
        # An engine that does not answer has a condition of its own.
        cause = "three failures in a row opened its circuit breaker, and it is tried now and then"
        yield Finding("engine_breaker_open", name, cause, name)


def _starting(engine: Engine) -> Finding:
    """The finding on an engine that answers and is not ready."""
    name = engine.name
    readiness = engine.readiness
    stage = str(readiness.get("stage", "starting"))
    failing = readiness.get("failing")
    if stage == "failed":
        return _failed(engine, f"it ended by an error, {engine.failure}")
    if isinstance(failing, list) and failing:
        loops = ", ".join(f"`{loop}`" for loop in failing)
        return Finding("engine_failing", name, f"its loops {loops} end again and again", name)
    progress = readiness.get("progress")
    share = f", {progress:.0%}" if isinstance(progress, int | float) else ""
    return Finding("engine_starting", name, f"its stage is `{stage[:128]}`{share}", name)


def _failed(engine: Engine, cause: str) -> Finding:
    """The finding on an engine that said why it ended. Only operators see its error."""
    is_memory = any(words in engine.failure for words in _OUT_OF_MEMORY)
    kind: ConditionKind = "engine_out_of_memory" if is_memory else "engine_failing"
    return Finding(kind, engine.name, cause, engine.name, cause_for_all="it ended by an error")


def of_stats(name: str, stats: Stats, increases: Increases, now: float) -> Iterator[Finding]:
    blocks = stats.blocks
    counters = stats.counters
    used = blocks.active + blocks.leased
    share = used / blocks.total if blocks.total else 0.0
    if share > NEARLY_FULL_SHARE:
        cause = f"{used:,} of {counted(blocks.total, 'block')} are in use or leased"
        yield Finding("engine_memory_nearly_full", name, cause, name)
        if share > FULL_SHARE:
            yield Finding("engine_memory_full", name, cause, name)
    # Automatic entries are left out, since nobody asked for leases on them.
    asked_for = stats.num_entries - stats.num_automatic
    unleased = asked_for - stats.num_leases
    if asked_for > 0 and unleased / asked_for > UNLEASED_SHARE:
        entries = counted(asked_for, "entry", "entries")
        cause = f"{unleased:,} of {entries} that were asked for have no lease"
        yield Finding("leases_full", name, cause, name)
    if stats.unacknowledged > KEPT_COUNTS:
        yield Finding("engine_counts_kept", name, f"it keeps {stats.unacknowledged:,}", name)

    def has_grown(counter: str, count: int) -> bool:
        return increases.has_grown(name, counter, stats.epoch, count, now)

    if has_grown("preempted", counters.preempted_requests):
        cause = f"{counters.preempted_requests:,} since it started, for want of blocks"
        yield Finding("engine_preempting", name, cause, name)
    if stats.slots_away:
        cause = f"{counted(stats.slots_away, 'slot')} of its server get no requests"
        yield Finding("slots_in_use", name, cause, name)
    if stats.store is not None:
        yield from _of_store(name, stats.store)


def _of_store(name: str, store: StoreStats) -> Iterator[Finding]:
    about = f"the store of {name}"
    if store.refused is not None:
        cause = _REFUSED_STORES[store.refused]
        if store.problem is not None:
            cause = f"{cause}: {store.problem}"
        yield Finding("store_off", about, cause, name)
    elif not store.is_up:
        # The number of failed writes is left out. It grows, and every place must tell the same.
        cause = "writes failed" if store.problem is None else f"{store.problem}: writes failed"
        yield Finding("store_not_written", about, cause, name)
    elif store.blocks and store.held_blocks >= STORE_FULL_SHARE * store.blocks:
        cause = f"{store.held_blocks:,} of {counted(store.blocks, 'block')} are held"
        yield Finding("store_full", about, cause, name)
