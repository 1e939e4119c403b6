"""Which fleets a plan simulates, and what each of them answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gateway.admin.structs.advice import Point
from gateway.planner.requests import BLOCK_TOKENS, PlannedRequest, Requests
from gateway.planner.run import Run, Tell
from gateway.planner.simulated import Capacities, Costs
from gateway.planner.sizes import GIB, Sizes
from gateway.planning.asked import MAX_ENGINES, PlanRequest
from gateway.planning.traffic import Job, Turn, total_tokens

STEP_TOKENS = 2048
"""The most tokens of a step, as engines have it on a GPU."""
HOST_BYTES_PER_SECOND, DISK_BYTES_PER_SECOND = 10e9, 2e9
ASSUMED_PREFILL_US, ASSUMED_DECODE_MS = 50.0, 20.0
SCOPE_LEASE_SHARE = 0.5
TERABYTE_GIB = 1e12 / GIB
MAX_STRETCH = 8_000
"""Turns of the busiest stretch, under which the curves' points are simulated."""
_WARMING = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`kv_scale` is the memory for keys and values on the device, as a share of what is asked."""

    label: str
    engines: int
    host_gib: float
    disk_gib: float
    kv_scale: float = 1.0
    kv_dtype: str
    is_whole: bool = False
    token_scale: float = 1.0

    @property
    def key(self) -> tuple[object, ...]:
        scales = self.kv_scale * self.token_scale, self.host_gib * self.token_scale
        return self.engines, *scales, self.disk_gib * self.token_scale, self.is_whole


def asked_fleet(asked: PlanRequest) -> Fleet:
    return Fleet(
        label="As asked",
        engines=asked.engines,
        host_gib=asked.host_gib,
        disk_gib=asked.disk_gib,
        kv_dtype=asked.kv_dtype,
    )


def memory_fleets(base: Fleet) -> list[Fleet]:
    return [
        replace(base, label=f"{scale:g} times the memory", kv_scale=scale)
        for scale in (0.25, 0.5, 1.0, 2.0, 4.0)
    ]


def engine_fleets(base: Fleet) -> list[Fleet]:
    counts = sorted({max(base.engines - 1, 1), base.engines, base.engines + 1, 2 * base.engines})
    return [
        replace(base, label=f"{count} engine{'s' * (count > 1)}", engines=count)
        for count in counts
        if count <= 2 * MAX_ENGINES
    ]


def tier_fleets(base: Fleet) -> list[Fleet]:
    """Each with what the tiers above it have."""
    found = [replace(base, label="Device alone", host_gib=0.0, disk_gib=0.0)]
    if base.host_gib:
        found.append(replace(base, label="With host memory", disk_gib=0.0))
    if base.disk_gib:
        found.append(replace(base, label="With host and disk" if base.host_gib else "With disk"))
    more = base.disk_gib + TERABYTE_GIB
    found.append(replace(base, label="With one terabyte more of disk", disk_gib=more))
    return found


def int8_fleet(base: Fleet) -> Fleet | None:
    scale = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}.get(base.kv_dtype)
    if scale is None:
        return None
    return replace(base, label="Keys and values in int8", token_scale=scale, kv_dtype="int8")


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


def typical_lease(turns: Sequence[Turn]) -> int | None:
    marked = [turn.ends[turn.marks[-1][0]] for turn in turns if turn.marks]
    return round(median(marked)) if marked else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What is known of an engine's speed, and what it caches at all.

    `overhead` seconds of a first token are not the engine's work. Steps have `step_tokens`.
    """

    prefill_us: float
    decode_ms: float
    overhead: float = 0.0
    step_tokens: int = STEP_TOKENS
    min_cache_tokens: int = 1


def timing_of(job: Job) -> Timing:
    """What is asked for, else what the ledger's turns took, else what is assumed."""
    asked = job.asked
    decode = asked.decode_ms if asked.decode_ms is not None else job.decode_ms
    return Timing(
        prefill_us=asked.prefill_us or job.prefill_us or ASSUMED_PREFILL_US,
        decode_ms=ASSUMED_DECODE_MS if decode is None else decode,
        overhead=job.overhead_seconds,
        min_cache_tokens=asked.min_cache_tokens or job.min_cache_tokens,
    )


class Bench:
    """Simulates fleets of one model under one traffic. A unit of one token is exact."""

    def __init__(
        self, asked: PlanRequest, sizes: Sizes, unit: int, timing: Timing, distinct_tokens: int
    ) -> None:
        self._asked = asked
        self._sizes = sizes
        self._unit = unit
        self._timing = timing
        # A pool whose leases have room for everything that there is: more is the same.
        share = max(min(asked.lease_share, 1.0), 0.05)
        self._enough = int(distinct_tokens / share * 1.1) + 64 * max(unit, BLOCK_TOKENS)

    def tokens_of(self, gib: float, fleet: Fleet) -> int:
        return int(gib * GIB / self._sizes.bytes_per_token * fleet.token_scale)

    def capacities(self, fleet: Fleet) -> Capacities:
        device = self._sizes.kv_bytes / GIB * fleet.kv_scale
        found = [
            min(self.tokens_of(gib, fleet), self._enough)
            for gib in (device, fleet.host_gib, fleet.disk_gib)
        ]
        return Capacities(
            device=found[0],
            host=found[1],
            disk=found[2],
            lease_share=self._asked.lease_share,
            scope_lease_share=SCOPE_LEASE_SHARE,
            max_running=self._asked.max_running,
            block_units=max(BLOCK_TOKENS // self._unit, 1),
            min_cache_tokens=self._timing.min_cache_tokens,
        )

    def costs(self, fleet: Fleet) -> Costs:
        per_token = self._sizes.bytes_per_token / fleet.token_scale
        return Costs(
            prefill=self._timing.prefill_us / 1e6,
            decode=self._timing.decode_ms / 1e3,
            host=per_token / HOST_BYTES_PER_SECOND,
            disk=per_token / DISK_BYTES_PER_SECOND,
            step_tokens=self._timing.step_tokens,
            overhead=self._timing.overhead,
        )

    def requests(self, turns: Sequence[Turn], *, is_warmed: bool) -> list[PlannedRequest]:
        """`is_warmed`: the first ones only fill the memory."""
        made = Requests(self._unit, with_names=True)
        requests = [made.of(turn) for turn in turns]
        for request in requests[: int(_WARMING * len(requests)) if is_warmed else 0]:
            request.is_counted = False
        return requests

    def point(self, fleet: Fleet, requests: Sequence[PlannedRequest], tell: Tell) -> Point:
        run = Run(fleet.engines, self.capacities(fleet), self.costs(fleet), self._unit, tell)
        found = run.run(requests)
        device = self._sizes.kv_bytes / GIB * fleet.kv_scale
        waits = sorted(found.waits) or [0.0]
        prompt = max(found.prompt, 1)
        return Point(
            label=fleet.label,
            engines=fleet.engines,
            device_gib=round(device, 3),
            host_gib=fleet.host_gib,
            disk_gib=round(fleet.disk_gib, 3),
            kv_dtype=fleet.kv_dtype,
            device_tokens=self.tokens_of(device, fleet),
            hit_rate=found.read / prompt,
            reuse_rate=found.reused / prompt,
            promise_kept=found.promise_kept,
            leases_ended=sum(found.leases.values()),
            best_effort=1 - found.leased / found.breakpoints if found.breakpoints else None,
            first_token_p50=_at_share(waits, 0.5),
            first_token_p95=_at_share(waits, 0.95),
            prefill_saved_seconds=found.reused * self._timing.prefill_us / 1e6,
            refused=found.refused,
            turns=len(found.waits),
        )


def _at_share(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def mean_tokens(turns: Sequence[Turn]) -> float:
    return total_tokens(turns) / max(len(turns), 1)
