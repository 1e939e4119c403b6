"""A whole plan: one pass for the exact curve, and the simulated fleets."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.admin.structs.advice import Change, KvFigures, LruPoint, Plan, Point
from gateway.base.errors import InvalidRequest
from gateway.planner import words
from gateway.planner.distances import Distances, distances
from gateway.planner.parallel import points_of
from gateway.planner.points import (
    Bench,
    Fleet,
    asked_fleet,
    engine_fleets,
    int8_fleet,
    memory_fleets,
    stretch_of,
    tier_fleets,
    timing_of,
    typical_lease,
)
from gateway.planner.requests import PlannedRequest, Requests, exact_unit_for, unit_for
from gateway.planner.sizes import GIB, Sizes, sizes_of
from gateway.planning.traffic import Job, Turn, made_up, of_trace, total_tokens

KNEE_SHARE = 0.95
_LRU_SIZES = 40
_LRU_WORK = 0.15
"""The part of the work that the exact curve is, roughly."""
Tell = Callable[[float], None]


def turns_of(job: Job) -> list[Turn]:
    """Raise InvalidRequest for traffic without turns."""
    asked = job.asked
    if asked.trace is not None:
        return of_trace(asked.trace.splitlines())
    if asked.made is not None:
        return made_up(asked.made)
    if not job.turns:
        raise InvalidRequest(
            "since_ms: no request of this range had an answer: there is no traffic to plan for"
        )
    return job.turns


def plan(job: Job, tell: Tell) -> Plan:
    """Raise InvalidRequest with the field that is wrong. `tell` hears the share that is done."""
    began = time.monotonic()
    asked, sizes = job.asked, sizes_of(job.asked)
    turns = turns_of(job)
    tell(0.0)
    unit = unit_for(turns)
    exact = _exact(turns, unit)
    tell(_LRU_WORK)
    distinct = exact.num_distinct * unit
    timing = timing_of(job)
    bench = Bench(asked, sizes, exact_unit_for(turns), timing, distinct)
    base = asked_fleet(asked)
    stretch = stretch_of(turns)
    points = _points(bench, turns, stretch, _fleets(base), tell)
    kv = _kv(bench, sizes, base, typical_lease(turns))
    at = {fleet.key: point for fleet, point in points}

    def of(fleets: Sequence[Fleet]) -> list[Point]:
        return [_named(at[fleet.key], fleet, bench, sizes) for fleet in fleets]

    knee_units = exact.size_for(KNEE_SHARE)
    knee_gib = knee_units * unit * sizes.bytes_per_token / GIB
    tiers, same = of(tier_fleets(base)), at[base.key]
    return Plan(
        text=words.about(turns, stretch, unit),
        assumptions=words.assumptions(job, sizes, timing, unit),
        turns=len(turns),
        prompt_tokens=total_tokens(turns),
        distinct_tokens=distinct,
        stretch_turns=len(stretch),
        kv=kv,
        whole=at[replace(base, is_whole=True).key],
        memory=of(memory_fleets(base)),
        engines=of(engine_fleets(base)),
        tiers=tiers,
        lru=_curve(exact, unit, sizes),
        ceiling=exact.read / max(exact.prompt, 1),
        knee_gib=knee_gib,
        knee_text=words.knee(knee_gib, kv.kv_gib * asked.engines, exact.read / exact.prompt),
        buys=_buys(base, same, of),
        seconds=time.monotonic() - began,
    )


def _exact(turns: Sequence[Turn], unit: int) -> Distances:
    made = Requests(unit, with_names=False)
    requests: list[PlannedRequest] = [made.of(turn) for turn in turns]
    return distances(requests, sum(len(request.units) for request in requests))


def _fleets(base: Fleet) -> list[Fleet]:
    """All that are simulated, each once; the longest work first."""
    int8 = int8_fleet(base)
    found = [replace(base, is_whole=True), base, *memory_fleets(base), *engine_fleets(base)]
    found += [*tier_fleets(base), *([int8] if int8 is not None else [])]
    return list({fleet.key: fleet for fleet in found}.values())


def _points(
    bench: Bench,
    turns: Sequence[Turn],
    stretch: Sequence[Turn],
    fleets: Sequence[Fleet],
    tell: Tell,
) -> list[tuple[Fleet, Point]]:
    """What is equal by its capacities, since more than enough is the same, is simulated once."""
    is_cut = len(stretch) < len(turns)
    about = {
        fleet.key: (fleet.engines, bench.capacities(fleet), bench.costs(fleet))
        + ((fleet.is_whole,) if is_cut else ())
        for fleet in fleets
    }
    work = {key: fleet for fleet in reversed(fleets) for key in (about[fleet.key],)}
    chosen = list(reversed(work.items()))
    whole = bench.requests(turns, is_warmed=False)
    part = bench.requests(stretch, is_warmed=True) if is_cut else whole
    total = sum(len(whole if fleet.is_whole else part) for _, fleet in chosen)
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        tell(_LRU_WORK + (1 - _LRU_WORK) * min(done / total, 1.0))

    def point(number: int, tell_turns: Callable[[int], None]) -> Point:
        fleet = chosen[number][1]
        return bench.point(fleet, whole if fleet.is_whole else part, tell_turns)

    found = points_of(len(chosen), point, told)
    by = {key: point for (key, _), point in zip(chosen, found, strict=True)}
    return [(fleet, by[about[fleet.key]]) for fleet in fleets]


def _named(point: Point, fleet: Fleet, bench: Bench, sizes: Sizes) -> Point:
    """A point as the fleet that it stands for: others may have been equal to it."""
    device = sizes.kv_bytes / GIB * fleet.kv_scale
    return Point(
        **{name: getattr(point, name) for name in Point.__struct_fields__}
        | {
            "label": fleet.label,
            "device_gib": round(device, 3),
            "host_gib": fleet.host_gib,
            "disk_gib": round(fleet.disk_gib, 3),
            "kv_dtype": fleet.kv_dtype,
            "device_tokens": bench.tokens_of(device, fleet),
        }
    )


def _kv(bench: Bench, sizes: Sizes, base: Fleet, lease: int | None) -> KvFigures:
    capacities = bench.capacities(base)
    device = sizes.kv_bytes / GIB
    tokens = bench.tokens_of(device, base)
    fit = None if not lease else int(tokens * capacities.lease_share) // lease
    return KvFigures(
        bytes_per_token=sizes.bytes_per_token,
        kv_gib=round(device, 3),
        weights_gib=round(sizes.weights_gib, 3),
        device_tokens=tokens,
        host_tokens=bench.tokens_of(base.host_gib, base),
        disk_tokens=bench.tokens_of(base.disk_gib, base),
        lease_tokens=lease,
        leases_that_fit=fit,
    )


def _curve(exact: Distances, unit: int, sizes: Sizes) -> list[LruPoint]:
    top = max(max(exact.tokens, default=0) + 1, 8)
    counts = sorted({max(round(top * (n / _LRU_SIZES) ** 2), 1) for n in range(1, _LRU_SIZES + 1)})
    return [
        LruPoint(gib=count * unit * sizes.bytes_per_token / GIB, reuse_rate=share)
        for count, share in zip(counts, exact.curve(counts), strict=True)
    ]


def _buys(base: Fleet, same: Point, of: Callable[[Sequence[Fleet]], list[Point]]) -> list[Change]:
    engine = next(each for each in engine_fleets(base) if each.engines == base.engines + 1)
    double = next(each for each in memory_fleets(base) if each.kv_scale == 2)
    wanted: list[tuple[words.Kind, Fleet]] = [
        ("engine", engine),
        ("memory", double),
        ("disk", tier_fleets(base)[-1]),
    ]
    if (int8 := int8_fleet(base)) is not None:
        wanted.append(("int8", int8))
    points = of([fleet for _, fleet in wanted])
    kinds = [kind for kind, _ in wanted]
    return [words.change(kind, same, after) for kind, after in zip(kinds, points, strict=True)]
