"""What the sample month's engines hold: entries with TTLs, restarts, and full memory.

A model of an engine's cache at the level of entries, by the rules of the contract. It says for each
turn what it reads, what it writes and why it missed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate, pairwise

import msgspec

from engine.protocol import (
    TTLS,
    WRITE_FIELDS,
    InputUsage,
    Message,
    MissReason,
    Prompt,
    Role,
    TextPart,
    Tool,
    Ttl,
)
from gateway.base.record import TurnRecord
from gateway.journal.charge import charge
from gateway.prices.book import PriceBook
from gateway.prices.sheets import PriceSheets
from gateway.prompt.fingerprint import Fingerprint, digest_parameters, kinds_at, pack, points_of
from gateway.prompt.names import NAMES_RULE, Prefix, find_prefixes
from gateway.prompt.sketch import kinds_of, sketch_of
from scripts.sample.cast import (
    ENGINE_MODEL,
    MACHINES,
    PRICED_AS,
    Arrival,
    Machine,
    arrivals,
    day_of,
    start_of,
    weight,
)

LOOKBACK_POSITIONS = 20
# The number of entries in an engine's lease budget. A further entry is best-effort.
_LEASED_ENTRIES = 260
_BEST_EFFORT_SECONDS = (40.0, 400.0)


@dataclass(slots=True)
class SampleEntry:
    """An entry, readable from `ready_ms` until the earlier of `until_ms` and `evicted_ms`."""

    tokens: int
    ttl: Ttl
    ready_ms: int
    until_ms: int
    evicted_ms: int | None

    def why_gone(self, ms: int) -> MissReason | None:
        if self.evicted_ms is not None and self.evicted_ms <= min(ms, self.until_ms):
            return "best_effort_evicted"
        return "ttl_expired" if self.until_ms <= ms else None


@dataclass(slots=True)
class SampleCache:
    """One engine over the month. `downs` are its downtimes, as ranges in ms."""

    machine: Machine
    first_ms: int
    downs: list[tuple[int, int]]
    epochs: list[str]
    entries: dict[str, SampleEntry] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    _epoch: int = 0

    def is_up(self, ms: int) -> bool:
        return ms >= self.first_ms and not any(start <= ms < end for start, end in self.downs)

    def goes_down_within(self, ms: int, duration_ms: int) -> bool:
        return any(ms < start <= ms + duration_ms for start, _ in self.downs)

    def epoch_at(self, ms: int) -> str:
        """The engine's epoch at this moment. A new epoch begins with nothing held."""
        number = sum(end <= ms for _, end in self.downs)
        if number != self._epoch:
            self._epoch = number
            self.lost = {key for key, held in self.entries.items() if held.until_ms > ms}
            self.entries.clear()
        return self.epochs[number]

    def read(self, keys: list[str], ms: int) -> tuple[int, str | None]:
        """Refresh the longest live entry at most 20 positions back; return its tokens and key."""
        for key in reversed(keys[-LOOKBACK_POSITIONS - 1 :]):
            held = self.entries.get(key)
            if held is not None and held.ready_ms <= ms and held.why_gone(ms) is None:
                held.until_ms = max(held.until_ms, ms + TTLS[held.ttl].seconds * 1000)
                return held.tokens, key
        return 0, None

    def holds(self, keys: list[str], ms: int) -> int:
        """Tokens of the deepest of these keys that is held at this moment."""
        live = [self.entries[key] for key in keys if key in self.entries]
        return max((held.tokens for held in live if held.why_gone(ms) is None), default=0)

    def why_missing(self, keys: list[str], ms: int) -> MissReason | None:
        """Why the deepest of these keys that was ever held is gone."""
        for key in reversed(keys):
            held = self.entries.get(key)
            if held is not None:
                if held.ready_ms > ms:
                    return "in_progress_race"
                return held.why_gone(ms)
        return None

    def write(
        self, key: str, tokens: int, ttl: Ttl, ms: int, ready_ms: int, chance: random.Random
    ) -> None:
        known = self.entries.get(key)
        if known is not None and known.why_gone(ms) is None:
            known.until_ms = max(known.until_ms, ms + TTLS[known.ttl].seconds * 1000)
            return
        self._forget(ms)
        evicted = None
        if self._num_leased(ms) > _LEASED_ENTRIES:
            evicted = ms + int(chance.uniform(*_BEST_EFFORT_SECONDS) * 1000)
        until = ms + TTLS[ttl].seconds * 1000
        self.entries[key] = SampleEntry(tokens, ttl, ready_ms, until, evicted)

    def _num_leased(self, ms: int) -> int:
        if len(self.entries) <= _LEASED_ENTRIES:
            return len(self.entries)
        return sum(held.evicted_ms is None and held.until_ms > ms for held in self.entries.values())

    def _forget(self, ms: int) -> None:
        """Forget what ended over two hours ago."""
        if len(self.entries) > 4 * _LEASED_ENTRIES:
            old = [key for key, held in self.entries.items() if held.until_ms < ms - 7_200_000]
            for key in old:
                del self.entries[key]


_BYTES_PER_TOKEN = 4
_TOOLS_PART = 0.45
_SUMMARY_TOKENS = 900
# The lines that stand for a system prompt.
_RULES = 10
# The tokens that a template writes behind the last message.
SCAFFOLD_TOKENS = 6


@dataclass(frozen=True, slots=True)
class MarkedPrefix:
    """A marked prefix: its name, its length in tokens, and the TTL that it was marked with."""

    key: str
    tokens: int
    ttl: Ttl


@dataclass(slots=True)
class Talk:
    """What was said so far: role, stand-in text and tokens."""

    said: list[tuple[Role, str, int]] = field(default_factory=list)
    compactions: int = 0

    def ask(self, arrival: Arrival, tokens: int) -> bool:
        """Add a question. Return whether a summary replaced the history before it."""
        is_compacted = arrival.compactions != self.compactions
        if is_compacted:
            self.compactions = arrival.compactions
            self.said = [("user", f"summary {arrival.talk}.{arrival.turn}", _SUMMARY_TOKENS)]
            self.said.append(("assistant", "understood", 4))
        self.said.append(("user", f"question {arrival.talk}.{arrival.turn}", tokens))
        return is_compacted

    def answer(self, arrival: Arrival, tokens: int) -> None:
        self.said.append(("assistant", f"answer {arrival.talk}.{arrival.turn}", tokens))


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt as the gateway sees it.

    `keys` are the names at its segment ends, `marks` those at its breakpoints.
    """

    prompt: Prompt
    prefixes: list[Prefix]
    lengths: list[int]
    marks: list[MarkedPrefix]

    @property
    def tokens(self) -> int:
        return self.lengths[-1] + SCAFFOLD_TOKENS

    @property
    def keys(self) -> list[str]:
        return [prefix.name.digest for prefix in self.prefixes]

    def fingerprint(self, arrival: Arrival, scope: str) -> bytes:
        points = points_of(
            [
                prefix._replace(num_bytes=tokens * _BYTES_PER_TOKEN)
                for prefix, tokens in zip(self.prefixes, self.lengths, strict=True)
            ]
        )
        segments = {prefix.name.digest: prefix.name.segment for prefix in self.prefixes}
        sketch = sketch_of(self.prompt, scope)
        sizes = [after - before for before, after in pairwise([0, *self.lengths])]
        sketched = [size * _BYTES_PER_TOKEN for size in sizes[: len(sketch.sizes)]]
        return pack(
            Fingerprint(
                model=arrival.app.model,
                parameters=digest_parameters(b"", scope),
                num_tools=len(self.prompt.tools),
                num_system=len(self.prompt.system),
                points=points,
                num_tokens=self.tokens,
                is_shared=arrival.app.compares,
                tokens=self.lengths,
                kinds=kinds_at(points, kinds_of(self.prompt)),
                marks=[(segments[mark.key], mark.ttl) for mark in self.marks],
                sketch=msgspec.structs.replace(sketch, sizes=sketched),
                rule=NAMES_RULE,
            )
        )


def write(arrival: Arrival, talk: Talk, version: int, scope: str) -> SamplePrompt:
    """`version` counts the deployments that changed the system prompt."""
    app = arrival.app
    rules = "\n".join(f"{app.name} {arrival.prompt}.{version} rule {n}" for n in range(_RULES))
    stamp = f"now {arrival.ms}\n" if app.stamps else ""
    tools = [Tool(f"{app.name}_{number}", {}) for number in range(app.num_tools)]
    tool_tokens = int(app.system_tokens * _TOOLS_PART / app.num_tools) if tools else 0
    system = app.system_tokens * (1 + arrival.prompt % 5) // 3 - tool_tokens * app.num_tools
    prompt = Prompt(
        messages=[Message(role, [TextPart(text)]) for role, text, _ in talk.said],
        tools=tools,
        system=[TextPart(f"{stamp}{rules}")],
    )
    sizes = [tool_tokens] * len(tools) + [max(system, 400)] + [each[2] for each in talk.said]
    lengths, prefixes = list(accumulate(sizes)), find_prefixes(prompt, scope)
    marks = []
    if app.system_ttl:
        end = app.num_tools
        marks.append(MarkedPrefix(prefixes[end].name.digest, lengths[end], app.system_ttl))
    if app.turn_ttl is not None:
        marks.append(MarkedPrefix(prefixes[-1].name.digest, lengths[-1], app.turn_ttl))
    return SamplePrompt(prompt, prefixes, lengths, marks)


MIN_CACHE_TOKENS = 1024
# The time that gateway and network add to the engine's own.
_OVERHEAD_SECONDS = 0.004
_QUEUE_SECONDS = 0.09
_TIMEOUT, _GONE, _LENGTH, _TOOL_USE = 0.0012, 0.008, 0.02, 0.6


def serve(
    record: TurnRecord,
    arrival: Arrival,
    written: SamplePrompt,
    place: SampleCache,
    chance: random.Random,
) -> str | None:
    """Fill in the counts that the engine would have sent.

    Return why the turn missed, None if it hit.
    """
    ms, epoch = arrival.ms, place.epoch_at(arrival.ms)
    record.engine, record.epoch = place.machine.name, epoch
    if chance.random() < _TIMEOUT:
        record.outcome, record.duration_seconds = "timeout_error", 16.0 + chance.random()
        return None
    marks = [mark for mark in written.marks if mark.tokens >= MIN_CACHE_TOKENS]
    read, key, keys = 0, None, written.keys
    for mark in reversed(marks):  # at its position, or up to 20 positions back
        read, key = place.read(keys[: keys.index(mark.key) + 1], ms)
        if key is not None:
            break
    reason = _why(arrival, written, marks, place, key)
    # Unmarked reuse: of content that another turn computes, or that happens to be in memory.
    is_there = reason == "in_progress_race"
    is_there |= reason == "no_breakpoint" and chance.random() < 0.7
    automatic = max(written.lengths[arrival.app.num_tools] - read, 0) if is_there else 0
    writes, position = dict.fromkeys(TTLS, 0), read
    for mark in marks:
        if mark.tokens > position:
            writes[mark.ttl] += mark.tokens - position
            position = mark.tokens
    usage = InputUsage(
        input_tokens=written.tokens - position,
        cache_read_tokens=read,
        automatic_tokens=automatic,
        computed_tokens=written.tokens - read - automatic,
        **{WRITE_FIELDS[ttl]: tokens for ttl, tokens in writes.items()},
    )
    record.take_usage(usage)
    record.miss_reason = reason
    # The queue goes by the hour's traffic, the prefill by the computed tokens.
    busy = weight("office", datetime.fromtimestamp(ms / 1000, UTC))
    record.queue_seconds = chance.expovariate(1 / (0.001 + _QUEUE_SECONDS * busy**2))
    rate = place.machine.prefill_tokens_per_second
    record.prefill_seconds = 0.008 + usage.computed_tokens / rate * chance.uniform(0.92, 1.2)
    overhead = _OVERHEAD_SECONDS + chance.expovariate(1 / 0.002)
    first = record.queue_seconds + record.prefill_seconds + overhead
    record.first_token_seconds = first
    _end(record, arrival, place, chance)
    for mark in marks:
        place.write(mark.key, mark.tokens, mark.ttl, ms, ms + int(first * 1000), chance)
    return reason


def _why(
    arrival: Arrival,
    written: SamplePrompt,
    marks: list[MarkedPrefix],
    place: SampleCache,
    key: str | None,
) -> str | None:
    """Why the last marker was not read, as far as the engine knows.

    `cold` is the answer otherwise.
    """
    if not written.marks:
        return "no_breakpoint"
    if not marks:
        return "below_minimum"
    if key == marks[-1].key:
        return None
    keys = written.keys
    behind = keys[keys.index(key) + 1 :] if key is not None else keys
    reason = place.why_missing(behind, arrival.ms)
    if reason is not None:
        return reason
    if key is not None:
        return None
    return "engine_restart" if place.lost.intersection(keys) else "cold"


def _end(record: TurnRecord, arrival: Arrival, place: SampleCache, chance: random.Random) -> None:
    """Set the outcome and the duration. Turns fail when their engine goes down."""
    output = chance.randint(*arrival.app.answer)
    fate = chance.random()
    if fate < _GONE:
        record.outcome, output = "client_disconnect", int(output * chance.random())
        record.stop_reason = "cancelled"
    elif fate < _GONE + _LENGTH:
        record.outcome = record.stop_reason = "length"
    else:
        calls = arrival.app.num_tools > 0 and chance.random() < _TOOL_USE
        record.outcome = record.stop_reason = "tool_use" if calls else "stop"
    record.output_tokens = output
    record.decode_seconds = output * place.machine.decode_seconds * chance.uniform(0.9, 1.5)
    record.duration_seconds = (record.first_token_seconds or 0.0) + record.decode_seconds
    if place.goes_down_within(arrival.ms, int(record.duration_seconds * 1000)):
        record.outcome, record.stop_reason, record.output_tokens = "api_error", None, 0


# Days on which the system prompts changed, so that everything is written anew.
_DEPLOYMENTS = (4, 11, 18, 25)
_ELSEWHERE = 0.02
_INSTANCE = "5a3b1e00"

Engines = dict[str, SampleCache]


def scope_of(workspace: str) -> str:
    """A scope that no installation's secret gives: it is for sample data only."""
    return f"{random.Random(workspace).getrandbits(128):032x}"


def key_id_of(workspace: str, name: str) -> str:
    return f"key_{random.Random(f'{workspace}/{name}').getrandbits(64):016x}"


@dataclass(slots=True)
class Month:
    """About `num_turns` turns of the 30 days before `until` (aware UTC). Iterate once."""

    until: datetime
    num_turns: int
    seed: int
    prices: PriceSheets | PriceBook
    _talks: dict[tuple[str, int], Talk] = field(default_factory=dict)

    def records(self) -> Iterator[TurnRecord]:
        """In order of time."""
        chance, until = random.Random(self.seed), self.until
        engines: Engines = {}
        for machine in MACHINES:
            downs = [
                (start, start + int(minutes * 60_000))
                for day, hour, minutes in machine.restarts
                for start in [start_of(until, day, hour)]
            ]
            epochs = [f"{chance.getrandbits(128):032x}" for _ in range(len(downs) + 1)]
            first = start_of(until, machine.first_day, 0)
            engines[machine.name] = SampleCache(machine, first, downs, epochs)
        for arrival in arrivals(until, self.num_turns, chance):
            yield self._record(arrival, engines, chance)

    def _record(self, arrival: Arrival, engines: Engines, chance: random.Random) -> TurnRecord:
        app = arrival.app
        talk = self._talks.setdefault((app.name, arrival.talk), Talk())
        is_compacted = talk.ask(arrival, chance.randint(*app.question))
        version = sum(day_of(arrival.ms, self.until) >= day for day in _DEPLOYMENTS)
        written = write(arrival, talk, version, scope_of(app.workspace))
        record = _opened(arrival, written, f"{chance.getrandbits(80):020x}")
        place = self._route(arrival, written, engines, chance)
        if place is None:
            record.outcome, record.duration_seconds = "overloaded_error", 0.002
        else:
            held = {
                name: engine.holds(written.keys, arrival.ms)
                for name, engine in engines.items()
                if engine.is_up(arrival.ms) and engine.epoch_at(arrival.ms)
            }
            serve(record, arrival, written, place, chance)
            own = held.pop(place.machine.name)
            # As the gateway does: only where the engine knows no better reason.
            if record.miss_reason == "cold" and max(held.values(), default=0) > own:
                record.miss_reason = "routed_elsewhere"
            elif record.miss_reason == "cold" and is_compacted:
                record.miss_reason = "messages_changed"
            if record.first_token_seconds is not None:
                record.available_tokens = max([own, *held.values()])
                record.captured_tokens = own
            talk.answer(arrival, record.output_tokens)
        priced_as = PRICED_AS[app.model]
        if priced_as is not None:
            charge(record, self.prices.find(priced_as, record.opened_at.date()))
        return record

    def _route(
        self, arrival: Arrival, written: SamplePrompt, engines: Engines, chance: random.Random
    ) -> SampleCache | None:
        """Mostly the engine that holds most of the prompt; None while no engine is up."""
        app, ms = arrival.app, arrival.ms
        up = [
            e
            for e in engines.values()
            if e.machine.serves == ENGINE_MODEL[app.model] and e.is_up(ms)
        ]
        if not up:
            return None
        holder = max(up, key=lambda engine: engine.holds(written.keys, ms))
        if arrival.turn == 0 or not holder.holds(written.keys, ms):
            # Talks are spread over the engines; so are the prompts of applications without talks.
            holder = up[(arrival.talk if app.talk_turns > 1 else arrival.prompt) % len(up)]
        return holder if chance.random() > _ELSEWHERE else chance.choice(up)


def _opened(arrival: Arrival, written: SamplePrompt, suffix: str) -> TurnRecord:
    app = arrival.app
    return TurnRecord(
        id=f"msg_{_INSTANCE}{suffix}",
        instance=_INSTANCE,
        workspace=app.workspace,
        key_id=key_id_of(app.workspace, arrival.key),
        model=app.model,
        stream=app.rhythm != "night",
        opened_at=datetime.fromtimestamp(arrival.ms / 1000, UTC),
        engine_model=ENGINE_MODEL[app.model],
        dialect=app.dialect,
        prefix=written.marks[-1].key if written.marks else None,
        prefix_ttl=written.marks[-1].ttl if written.marks else None,
        fingerprint=written.fingerprint(arrival, scope_of(app.workspace)),
    )
