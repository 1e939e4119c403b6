"""A whole plan: one pass for the exact curve, and the simulated fleets."""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from statistics import median
from typing import Any, Literal

import msgspec

from gateway.admin.structs.advice import Change, KvFigures, LruPoint, Plan, Point
from gateway.base.errors import InvalidRequest
from gateway.planner.engine import STEP_TOKENS, Capacities, Costs
from gateway.planner.fleet import SimulatedGateway, Simulation, Tell
from gateway.planner.requests import (
    BLOCK_TOKENS,
    PlannedRequest,
    Requests,
    distances,
    exact_unit_for,
    unit_for,
)
from gateway.planner.sizes import GIB, Sizes, sizes_of
from gateway.planning.traffic import MAX_ENGINES, Job, Turn, made_up, of_trace, total_tokens

MAX_PROCESSES = 2
Work = Callable[[int, Callable[[int], None]], Point]


def points_of(num: int, work: Work, tell: Callable[[int], None]) -> list[Point]:
    """`work(number, tell)` of each number, two at a time. `tell` hears of turns that are done.

    The processes are forks, so that the traffic is not copied.
    """
    context = multiprocessing.get_context("fork")
    processes = min(MAX_PROCESSES, os.cpu_count() or 1, num)
    taken = context.Value("i", 0)
    readers = []
    gc.freeze()
    for _ in range(processes):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(num, work, taken, writer), daemon=True)
        process.start()
        writer.close()
        readers.append(reader)
    found = _gather(readers, tell)
    if len(found) < num:
        raise RuntimeError("a process of the simulation has ended early")
    return [found[number] for number in range(num)]


def _gather(readers: Sequence[Connection], tell: Callable[[int], None]) -> dict[int, Point]:
    found, left = {}, list(readers)
    while left:
        for ready in wait(left):
            assert isinstance(ready, Connection)
            try:
                number, told = ready.recv()
            except EOFError:
                left.remove(ready)
                continue
            if number is None:
                tell(told)
            else:
                found[number] = msgspec.msgpack.decode(told, type=Point)
    return found


def _serve(num: int, work: Work, taken: "Synchronized[int]", writer: Connection) -> None:
    # Nothing of a simulation is garbage before its end, but collecting looks at all of it.
    gc.disable()
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= num:
            return
        point = work(number, lambda count: writer.send((None, count)))
        writer.send((number, msgspec.msgpack.encode(point)))
        gc.collect()


KNEE_SHARE = 0.95
SCOPE_LEASE_SHARE = 0.5
TERABYTE_GIB = 1e12 / GIB
HOST_BYTES_PER_SECOND, DISK_BYTES_PER_SECOND = 10e9, 2e9
MAX_STRETCH = 5_000
"""Turns of the busiest stretch, under which the curves' points are simulated."""
_WARMING = 0.2
_LRU_SIZES = 40
_LRU_WORK = 0.15
"""The part of the work that the exact curve is, roughly."""
_INT8_SCALES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
TellShare = Callable[[float], None]
Kind = Literal["engine", "disk", "int8", "memory"]
_WHAT: dict[Kind, str] = {
    "engine": "One more engine",
    "memory": "Twice the memory for keys and values",
    "disk": "One more terabyte of disk on each engine",
    "int8": "Keys and values in int8",
}


def plan(job: Job, tell: TellShare) -> Plan:
    """Raise InvalidRequest with the field that is wrong. `tell` hears the share that is done."""
    began = time.monotonic()
    asked, sizes, turns = job.asked, sizes_of(job.asked), job.turns
    if asked.trace is not None:
        turns = of_trace(asked.trace.splitlines())
    elif asked.made is not None:
        turns = made_up(asked.made)
    if not turns:
        raise InvalidRequest(
            "since_ms: no request of this range had an answer: there is no traffic to plan for"
        )
    tell(0.0)
    unit = unit_for(turns)
    made = Requests(unit, with_names=False)
    requests = [made.of(turn) for turn in turns]
    exact = distances(requests, sum(len(request.units) for request in requests))
    tell(_LRU_WORK)
    bytes_per_unit, ceiling = unit * sizes.bytes_per_token, exact.read / max(exact.prompt, 1)
    bench = Bench(job, sizes, exact_unit_for(turns), exact.num_distinct * unit)
    base = Fleet(
        label="As asked",
        engines=asked.engines,
        host_gib=asked.host_gib,
        disk_gib=asked.disk_gib,
        kv_dtype=asked.kv_dtype,
    )
    whole = replace(base, is_whole=True)
    memory = [
        replace(base, label=f"{scale:g} times the memory", kv_scale=scale)
        for scale in (0.25, 0.5, 1.0, 2.0, 4.0)
    ]
    counts = sorted({max(base.engines - 1, 1), base.engines, base.engines + 1, 2 * base.engines})
    engines = [
        replace(base, label=f"{count} engine{'s' * (count > 1)}", engines=count)
        for count in counts
        if count <= 2 * MAX_ENGINES
    ]
    tiers, buys, stretch = _by_tiers(base), _buys(base), stretch_of(turns)
    at = _points(
        bench, turns, stretch, [whole, base, *memory, *engines, *tiers, *buys.values()], tell
    )
    marked = [turn.ends[turn.marks[-1][0]] for turn in turns if turn.marks]
    lease = round(median(marked)) if marked else None
    device_tokens = bench.tokens_of(bench.device_gib(base), base)
    kv = KvFigures(
        bytes_per_token=sizes.bytes_per_token,
        kv_gib=round(bench.device_gib(base), 3),
        weights_gib=round(sizes.weights_gib, 3),
        device_tokens=device_tokens,
        host_tokens=bench.tokens_of(base.host_gib, base),
        disk_tokens=bench.tokens_of(base.disk_gib, base),
        lease_tokens=lease,
        leases_that_fit=int(device_tokens * asked.lease_share) // lease if lease else None,
    )
    knee_gib, here = exact.size_for(KNEE_SHARE) * bytes_per_unit / GIB, kv.kv_gib * asked.engines
    top = max(max(exact.tokens, default=0) + 1, 8)
    units = sorted({max(round(top * (n / _LRU_SIZES) ** 2), 1) for n in range(1, _LRU_SIZES + 1)})
    hours = (turns[-1].at - turns[0].at) / 3600
    text = (
        f"Simulated: {len(turns):,} requests with {total_tokens(turns):,} prompt tokens over"
        f" {hours:,.1f} hours."
    )
    if len(stretch) < len(turns):
        text += (
            f" The curves compare the busiest {len(stretch):,} requests in a row, of which the"
            " first fifth only fills the memory."
        )
    return Plan(
        text=text,
        assumptions=_assumptions(job, sizes, unit),
        turns=len(turns),
        prompt_tokens=total_tokens(turns),
        distinct_tokens=exact.num_distinct * unit,
        stretch_turns=len(stretch),
        kv=kv,
        whole=at[whole],
        memory=[at[fleet] for fleet in memory],
        engines=[at[fleet] for fleet in engines],
        tiers=[at[fleet] for fleet in tiers],
        lru=[
            LruPoint(gib=count * bytes_per_unit / GIB, reuse_rate=share)
            for count, share in zip(units, exact.curve(units), strict=True)
        ],
        ceiling=ceiling,
        knee_gib=knee_gib,
        knee_text=f"{knee_gib:,.2f} GiB for keys and values give 95 % of what unlimited memory"
        f" would ({ceiling:.1%} of the prompt tokens); there are {here:,.2f} GiB. More memory"
        + (" pays." if knee_gib > here else " adds little."),
        buys=[_change(kind, at[base], at[fleet]) for kind, fleet in buys.items()],
        seconds=time.monotonic() - began,
    )


def _assumptions(job: Job, sizes: Sizes, unit: int) -> list[str]:
    asked = job.asked
    if asked.prefill_us is not None:
        told = "as given"
    elif job.prefill_us is not None:
        told = f"as the quickest quarter of {job.timed_turns:,} requests of the ledger took it"
    else:
        told = "assumed: give prefill_us"
    found = [
        f"To compute a token of a prompt takes {job.computed_us:,.1f} µs ({told}), a decode"
        f" step {job.step_ms:,.3g} ms.",
        f"Keys and values take {sizes.bytes_per_token:,} bytes a token in {asked.kv_dtype}, on a"
        f" memory of {sizes.kv_bytes / 2**30:,.1f} GiB an engine.",
        f"Scheduler, pool, leases and placement are the product's own, with {unit} tokens a block;"
        " model and time are simulated.",
        "Each engine has its own host memory and disk. Copies take 10 GB/s from the host and 2 GB/s"
        " from disk.",
        f"An engine computes at most {STEP_TOKENS:,} tokens of prompts in a step.",
    ]
    if not sizes.is_weights_given:
        found.append(
            f"Weights take {sizes.weights_gib:,.1f} GiB in 16 bits, and buffers"
            f" {sizes.spared_gib:,.1f} GiB; weights_gib overrides both."
        )
    return found


def _change(kind: Kind, before: Point, after: Point) -> Change:
    sides = [
        (
            f"{each.hit_rate:.1%}",
            f"{wait * 1000:,.0f} ms" if wait < 1 else f"{wait:,.2f} s",
            "–" if each.promise_kept is None else f"{each.promise_kept:.1%}",
        )
        for each in (before, after)
        for wait in (each.first_token_p95,)
    ]
    rate, wait, kept = (f"{one} → {other}" for one, other in zip(*sides, strict=True))
    text = f"{_WHAT[kind]}: hit rate {rate}, first token p95 {wait}, promise kept {kept}."
    return Change(kind=kind, text=text, before=before, after=after)


def stretch_of(turns: Sequence[Turn]) -> Sequence[Turn]:
    """The MAX_STRETCH turns in a row with the most tokens a second; all where they are fewer."""
    if len(turns) <= MAX_STRETCH:
        return turns
    tokens = sum(turn.ends[-1] for turn in turns[:MAX_STRETCH])
    best, chosen = -1.0, 0
    for start in range(len(turns) - MAX_STRETCH + 1):
        seconds = turns[start + MAX_STRETCH - 1].at - turns[start].at
        if tokens / max(seconds, 1e-3) > best:
            best, chosen = tokens / max(seconds, 1e-3), start
        if start + MAX_STRETCH < len(turns):
            tokens += turns[start + MAX_STRETCH].ends[-1] - turns[start].ends[-1]
    return turns[chosen : chosen + MAX_STRETCH]


# Fleets.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`kv_scale` is the memory for keys and values on the device, as a share of what is asked.

    `token_scale` is how many more tokens a byte holds. One that `is_whole` gets all of the traffic,
    the others the busiest stretch.
    """

    label: str
    engines: int
    host_gib: float
    disk_gib: float
    kv_scale: float = 1.0
    kv_dtype: str
    is_whole: bool = False
    token_scale: float = 1.0


def _by_tiers(base: Fleet) -> list[Fleet]:
    """Each with what the tiers above it have."""
    found = [replace(base, label="Device alone", host_gib=0.0, disk_gib=0.0)]
    if base.host_gib:
        found.append(replace(base, label="With host memory", disk_gib=0.0))
    if base.disk_gib:
        found.append(replace(base, label="With host and disk" if base.host_gib else "With disk"))
    more = base.disk_gib + TERABYTE_GIB
    found.append(replace(base, label="With one terabyte more of disk", disk_gib=more))
    return found


def _buys(base: Fleet) -> dict[Kind, Fleet]:
    """What may be bought next."""
    one_more = base.engines + 1
    found: dict[Kind, Fleet] = {
        "engine": replace(base, label=f"{one_more} engines", engines=one_more),
        "memory": replace(base, label="2 times the memory", kv_scale=2.0),
        "disk": _by_tiers(base)[-1],
    }
    if scale := _INT8_SCALES.get(base.kv_dtype):
        label = "Keys and values in int8"
        found["int8"] = replace(base, label=label, token_scale=scale, kv_dtype="int8")
    return found


class Bench:
    """Simulates fleets of one model. A `unit` of one token is exact."""

    def __init__(self, job: Job, sizes: Sizes, unit: int, distinct_tokens: int) -> None:
        self._job = job
        self._sizes = sizes
        self._unit = unit
        # A pool whose leases have room for everything that there is: more is the same.
        share = max(job.asked.lease_share, 0.05)
        self._enough = int(distinct_tokens / share * 1.1) + 64 * max(unit, BLOCK_TOKENS)

    def tokens_of(self, gib: float, fleet: Fleet) -> int:
        return int(gib * GIB / self._sizes.bytes_per_token * fleet.token_scale)

    def device_gib(self, fleet: Fleet) -> float:
        return self._sizes.kv_bytes / GIB * fleet.kv_scale

    def capacities(self, fleet: Fleet) -> Capacities:
        device, host, disk = (
            min(self.tokens_of(gib, fleet), self._enough)
            for gib in (self.device_gib(fleet), fleet.host_gib, fleet.disk_gib)
        )
        return Capacities(
            device=device,
            host=host,
            disk=disk,
            lease_share=self._job.asked.lease_share,
            scope_lease_share=SCOPE_LEASE_SHARE,
            max_running=self._job.asked.max_running,
            block_units=max(BLOCK_TOKENS // self._unit, 1),
            min_cache_tokens=self._job.asked.min_cache_tokens or self._job.min_cache_tokens,
        )

    def costs(self, fleet: Fleet) -> Costs:
        per_token = self._sizes.bytes_per_token / fleet.token_scale
        return Costs(
            prefill=self._job.computed_us / 1e6,
            decode=self._job.step_ms / 1e3,
            host=per_token / HOST_BYTES_PER_SECOND,
            disk=per_token / DISK_BYTES_PER_SECOND,
            overhead=self._job.overhead_seconds,
        )

    def requests(self, turns: Sequence[Turn], *, is_warmed: bool) -> list[PlannedRequest]:
        """`is_warmed`: the first ones only fill the memory."""
        made = Requests(self._unit, with_names=True)
        requests = [made.of(turn) for turn in turns]
        for request in requests[: int(_WARMING * len(requests)) if is_warmed else 0]:
            request.is_counted = False
        return requests

    def point(self, fleet: Fleet, requests: Sequence[PlannedRequest], tell: Tell) -> Point:
        gateway = SimulatedGateway(fleet.engines) if fleet.engines > 1 else None
        costs = self.costs(fleet)
        fleets = Simulation(fleet.engines, self.capacities(fleet), costs, self._unit, gateway, tell)
        found = fleets.replay(requests)
        served = [each for each in found.served if each.request.is_counted]
        prompt = max(sum(each.request.tokens for each in served), 1)
        reused = sum(each.reused for each in served)
        breakpoints = sum(each.breakpoints for each in served)
        leased, ended = sum(each.leased for each in served), found.leases.total()
        waits = sorted(each.wait for each in served) or [0.0]
        return Point(
            **self.about(fleet),
            engines=fleet.engines,
            hit_rate=sum(each.read for each in served) / prompt,
            reuse_rate=reused / prompt,
            promise_kept=found.leases["expired"] / ended if ended else None,
            leases_ended=ended,
            best_effort=1 - leased / breakpoints if breakpoints else None,
            first_token_p50=waits[len(waits) // 2],
            first_token_p95=waits[min(int(0.95 * len(waits)), len(waits) - 1)],
            prefill_saved_seconds=reused * costs.prefill,
            refused=found.refused,
            turns=len(served),
        )

    def about(self, fleet: Fleet) -> dict[str, Any]:
        """What a point says of the fleet that it stands for: another may be equal to it."""
        device = self.device_gib(fleet)
        return {
            "label": fleet.label,
            "device_gib": round(device, 3),
            "host_gib": fleet.host_gib,
            "disk_gib": round(fleet.disk_gib, 3),
            "kv_dtype": fleet.kv_dtype,
            "device_tokens": self.tokens_of(device, fleet),
        }


def _points(
    bench: Bench,
    turns: Sequence[Turn],
    stretch: Sequence[Turn],
    fleets: Sequence[Fleet],
    tell: TellShare,
) -> dict[Fleet, Point]:
    """What is equal by its capacities, since more than enough is the same, is simulated once."""
    is_cut = len(stretch) < len(turns)

    def like(fleet: Fleet) -> tuple[object, ...]:
        costs = bench.costs(fleet)
        return fleet.engines, bench.capacities(fleet), costs, fleet.is_whole and is_cut

    chosen = list({like(fleet): fleet for fleet in reversed(fleets)}.values())[::-1]
    whole = bench.requests(turns, is_warmed=False)
    part = bench.requests(stretch, is_warmed=True) if is_cut else whole
    total = sum(len(whole if fleet.is_whole else part) for fleet in chosen)
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        tell(_LRU_WORK + (1 - _LRU_WORK) * min(done / total, 1.0))

    def point(number: int, tell_turns: Tell) -> Point:
        fleet = chosen[number]
        return bench.point(fleet, whole if fleet.is_whole else part, tell_turns)

    found = points_of(len(chosen), point, told)
    by = {like(fleet): point for fleet, point in zip(chosen, found, strict=True)}
    return {
        fleet: msgspec.structs.replace(by[like(fleet)], **bench.about(fleet)) for fleet in fleets
    }
