"""Makes a plan: an exact LRU curve by one pass, and simulations of the fleet and of changed
fleets."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from gateway.base.errors import InvalidRequest
from gateway.base.words import counted
from gateway.planner.bench import (
    DISK_BYTES_PER_SECOND,
    HOST_BYTES_PER_SECOND,
    MAX_STRETCH,
    Bench,
    Fleet,
    side_by_side,
    stretch_of,
)
from gateway.planner.engine import STEP_TOKENS
from gateway.planner.fleet import Tell
from gateway.planner.requests import Distances, Requests, distances, unit_for
from gateway.planning import traffic
from gateway.structs.plan import Change, LruPoint, Plan, PlannedMemory, Point

KNEE_SHARE = 0.95
MEMORY_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
_LRU_SIZES = 40
# About the share of the work that the exact curve takes.
_LRU_WORK = 0.15
_LEAST_BLOCKS = 64
_ENGINE_FIELDS = (
    "engines",
    "device_tokens",
    "host_tokens",
    "disk_tokens",
    "max_running",
    "min_cache_tokens",
)
"""The facts about the engines that a request may set."""
TellShare = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleets:
    """The fleets that one plan simulates."""

    # The engines as they are, under all turns.
    whole: Fleet
    # The engines as they are, under the busiest stretch. All fleets below are under it, too.
    base: Fleet
    # Fleets with other sizes of memory.
    memory: list[Fleet]
    # Fleets with other numbers of engines.
    engines: list[Fleet]
    # Fleets with other tiers.
    tiers: list[Fleet]
    # The changed fleets by the kind of their `Change`.
    changes: dict[str, Fleet]

    def all(self) -> list[Fleet]:
        changed = list(self.changes.values())
        return [self.whole, self.base, *self.memory, *self.engines, *self.tiers, *changed]


def plan(job: traffic.Job, tell: TellShare) -> Plan:
    """The plan of a job. Calls of `tell` have the share of the work that is done, 0 to 1.

    Raise InvalidRequest, which names the wrong field.
    """
    began = time.monotonic()
    turns = _turns_of(job)
    engine = engine_of(job)
    tell(0.0)

    unit = unit_for(turns)
    planned = Requests(unit, with_names=False)
    requests = [planned.of(turn) for turn in turns]
    exact = distances(requests, sum(len(request.units) for request in requests))
    tell(_LRU_WORK)

    distinct_tokens = exact.num_distinct * unit
    bench = Bench(job, engine, unit_for(turns, may_be_exact=True), distinct_tokens)
    fleets = _fleets(engine, distinct_tokens)
    stretch = stretch_of(turns, MAX_STRETCH)
    points = _points(
        bench, turns, stretch, fleets.all(), lambda share: tell(_LRU_WORK + (1 - _LRU_WORK) * share)
    )

    ceiling = exact.read / max(exact.prompt, 1)
    knee_tokens = exact.size_for(KNEE_SHARE) * unit
    base = points[fleets.base]
    return Plan(
        text=_text(turns, stretch),
        warnings=_warnings(job),
        assumptions=_assumptions(job, engine, unit),
        turns=len(turns),
        prompt_tokens=traffic.total_tokens(turns),
        distinct_tokens=distinct_tokens,
        stretch_turns=len(stretch),
        engine=_memory(job, engine, turns),
        whole=points[fleets.whole],
        memory=[points[fleet] for fleet in fleets.memory],
        engines=[points[fleet] for fleet in fleets.engines],
        tiers=[points[fleet] for fleet in fleets.tiers],
        lru=_lru_curve(exact, unit),
        ceiling=ceiling,
        knee_tokens=knee_tokens,
        knee_text=_knee_text(knee_tokens, ceiling, engine),
        changes=[
            change("engine", "One more engine", base, points[fleets.changes["engine"]]),
            change("memory", "Twice the memory", base, points[fleets.changes["memory"]]),
            change("disk", "A disk that holds all of it", base, points[fleets.changes["disk"]]),
        ],
        seconds=time.monotonic() - began,
    )


def engine_of(job: traffic.Job) -> traffic.EngineFacts:
    """The engines of the plan, as they describe themselves. Values of the request replace theirs.

    Raise InvalidRequest where their memory is unknown or too small.
    """
    request = job.request
    engine = job.engine
    if engine is None:
        if request.device_tokens is None:
            raise InvalidRequest(
                "device_tokens: no engine of the range's model answers, so its memory is not"
                " known: give the tokens that an engine's memory holds"
            )
        engine = traffic.EngineFacts(engines=1, device_tokens=request.device_tokens)
    requested = {name: getattr(request, name) for name in _ENGINE_FIELDS}
    engine = msgspec.structs.replace(
        engine, **{name: value for name, value in requested.items() if value is not None}
    )
    least = _LEAST_BLOCKS * 16
    if engine.device_tokens < least:
        raise InvalidRequest(
            f"device_tokens: {engine.device_tokens:,} is too small a memory: {least:,} at least"
        )
    return engine


def _turns_of(job: traffic.Job) -> Sequence[traffic.Turn]:
    turns: Sequence[traffic.Turn] = job.turns
    if job.request.trace is not None:
        lines = job.request.trace.splitlines()
        turns = traffic.of_trace(lines, job.request.trace_block_tokens)
    if not turns:
        raise InvalidRequest(
            "since_ms: no request of this range had an answer: there is no traffic to plan for"
        )
    return turns


def _fleets(engine: traffic.EngineFacts, distinct_tokens: int) -> Fleets:
    base = Fleet.of(engine, "As it is")
    counts = {max(base.engines - 1, 1), base.engines, base.engines + 1, 2 * base.engines}
    large_disk = replace(base, label="With a disk for all of it", disk_tokens=distinct_tokens)
    tiers = [replace(base, label="Device alone", host_tokens=0, disk_tokens=0)]
    if base.host_tokens:
        tiers.append(replace(base, label="With host memory", disk_tokens=0))
    if base.disk_tokens:
        label = "With host and disk" if base.host_tokens else "With disk"
        tiers.append(replace(base, label=label))
    tiers.append(large_disk)
    one_more = base.engines + 1
    return Fleets(
        whole=replace(base, is_whole=True),
        base=base,
        memory=[
            replace(
                base,
                label=f"{scale:g} times the memory",
                device_tokens=max(int(scale * base.device_tokens), _LEAST_BLOCKS * 16),
            )
            for scale in MEMORY_SCALES
        ],
        engines=[
            replace(base, label=f"{count} engine{'s' * (count > 1)}", engines=count)
            for count in sorted(counts)
            if count <= 2 * traffic.MAX_ENGINES
        ],
        tiers=tiers,
        changes={
            "engine": replace(base, label=f"{one_more} engines", engines=one_more),
            "memory": replace(
                base, label="2 times the memory", device_tokens=2 * base.device_tokens
            ),
            "disk": large_disk,
        },
    )


def _points(
    bench: Bench,
    turns: Sequence[traffic.Turn],
    stretch: Sequence[traffic.Turn],
    fleets: Sequence[Fleet],
    tell: TellShare,
) -> dict[Fleet, Point]:
    """The point of each fleet. Fleets that give the same results are simulated once: memory beyond
    what the traffic fills changes nothing."""
    is_cut = len(stretch) < len(turns)

    def likeness(fleet: Fleet) -> tuple[object, ...]:
        """A key that is equal for fleets that give the same results."""
        costs = bench.costs(fleet)
        return fleet.engines, bench.capacities(fleet), costs, fleet.is_whole and is_cut

    chosen = list({likeness(fleet): fleet for fleet in reversed(fleets)}.values())[::-1]
    whole = bench.requests(turns, is_warmed=False)
    part = bench.requests(stretch, is_warmed=True) if is_cut else whole
    total = sum(len(whole if fleet.is_whole else part) for fleet in chosen)
    num_done = 0

    def tell_done(count: int) -> None:
        nonlocal num_done
        num_done += count
        tell(min(num_done / total, 1.0))

    def simulate(number: int, tell_turns: Tell) -> Point:
        fleet = chosen[number]
        return bench.point(fleet, whole if fleet.is_whole else part, tell_turns)

    simulated = side_by_side(len(chosen), simulate, Point, tell_done)
    by_likeness = {likeness(fleet): point for fleet, point in zip(chosen, simulated, strict=True)}
    return {
        fleet: msgspec.structs.replace(by_likeness[likeness(fleet)], **bench.about(fleet))
        for fleet in fleets
    }


def _memory(
    job: traffic.Job, engine: traffic.EngineFacts, turns: Sequence[traffic.Turn]
) -> PlannedMemory:
    marked = [turn.ends[turn.marks[-1][0]] for turn in turns if turn.marks]
    lease = round(median(marked)) if marked else None
    budget = int(engine.device_tokens * job.request.lease_share)
    return PlannedMemory(
        bytes_per_token=engine.bytes_per_token,
        device_tokens=engine.device_tokens,
        host_tokens=engine.host_tokens,
        disk_tokens=engine.disk_tokens,
        lease_tokens=lease,
        leases_that_fit=budget // lease if lease else None,
    )


def _lru_curve(exact: Distances, unit: int) -> list[LruPoint]:
    top = max(max(exact.tokens, default=0) + 1, 8)
    sizes = sorted({max(round(top * (n / _LRU_SIZES) ** 2), 1) for n in range(1, _LRU_SIZES + 1)})
    return [
        LruPoint(tokens=size * unit, reuse_rate=share)
        for size, share in zip(sizes, exact.curve(sizes), strict=True)
    ]


def _text(turns: Sequence[traffic.Turn], stretch: Sequence[traffic.Turn]) -> str:
    hours = (turns[-1].at - turns[0].at) / 3600
    lasted = f"{hours:,.1f} hours" if hours >= 2 else f"{hours * 60:,.1f} minutes"
    tokens = traffic.total_tokens(turns)
    text = f"Simulated: {len(turns):,} requests with {tokens:,} prompt tokens over {lasted}."
    if len(stretch) < len(turns):
        text += (
            f" The curves compare the busiest {len(stretch):,} requests in a row. The first fifth"
            " of them only fills the memory."
        )
    return text


def _knee_text(knee_tokens: int, ceiling: float, engine: traffic.EngineFacts) -> str:
    here = engine.device_tokens * engine.engines
    verdict = "More memory pays." if knee_tokens > here else "More memory adds little."
    return (
        f"Memory for {knee_tokens:,} tokens gives 95 % of what unlimited memory would"
        f" ({ceiling:.1%} of the prompt tokens). There is memory for {here:,} tokens. {verdict}"
    )


def _assumptions(job: traffic.Job, engine: traffic.EngineFacts, unit: int) -> list[str]:
    times = job.times
    if times is None:
        measured = (
            "No turn of the range was timed, so there are no first-token times. Requests are"
            " scheduled as if a token of a prompt took 50 µs and a decode step 20 ms."
        )
    else:
        measured = (
            f"A computed token of a prompt takes {times.prefill_us:,.1f} µs and a decode step"
            f" {times.decode_ms:,.3g} ms, as the quickest quarter of {times.timed_turns:,} turns"
            " of the range took it."
        )
    lines = [
        measured,
        f"Scheduler, pool, leases and placement are the product's own, with {unit} tokens a block."
        " The model's computation is simulated.",
        f"An engine computes at most {STEP_TOKENS:,} tokens of prompts in a step.",
    ]
    if engine.bytes_per_token:
        lines.append(
            "Each engine has its own host memory and disk. Copies are scheduled at"
            f" {HOST_BYTES_PER_SECOND / 1e9:.0f} GB/s from the host and"
            f" {DISK_BYTES_PER_SECOND / 1e9:.0f} GB/s from disk, which nobody measured: a fleet"
            " with such a tier has no first-token times here."
        )
    return lines


def _warnings(job: traffic.Job) -> list[str]:
    warnings = []
    if job.is_cut:
        turns = counted(len(job.turns), "request")
        warnings.append(f"The newest {turns} of the range are planned. Older ones are left out.")
    if job.num_unknown:
        turns = counted(job.num_unknown, "request")
        warnings.append(f"{turns} of an earlier version can't be planned, and are left out.")
    if len(job.models) > 1:
        names = ", ".join(job.models)
        warnings.append(
            f"The range has requests of {len(job.models)} models ({names}). They are planned as if"
            " the same engines served all of them. Choose one model for a plan of its engines."
        )
    return warnings


def change(kind: str, name: str, before: Point, after: Point) -> Change:
    """The change called `name`, with a sentence that compares its two points."""
    parts = [
        _difference("hit rate", _percent(before.hit_rate), _percent(after.hit_rate)),
        _difference("promise kept", _percent(before.promise_kept), _percent(after.promise_kept)),
        _difference("best effort", _percent(before.best_effort), _percent(after.best_effort)),
    ]
    if before.first_token_p95 is not None and after.first_token_p95 is not None:
        earlier = _wait(before.first_token_p95)
        later = _wait(after.first_token_p95)
        parts.append(_difference("first token p95", earlier, later))
    is_same = before.hit_rate == after.hit_rate and before.promise_kept == after.promise_kept
    lead = "changes nothing: " if is_same else ""
    text = f"{name}: {lead}{', '.join(parts)}."
    return msgspec.convert({"kind": kind, "text": text, "before": before, "after": after}, Change)


def _difference(name: str, before: str, after: str) -> str:
    return f"{name} {before}" if before == after else f"{name} {before} → {after}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _wait(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 1 else f"{seconds:,.2f} s"
