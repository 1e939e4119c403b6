"""Simulates fleets of one model: what each is made of, and what it gives; two at a time."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from typing import Any, TypeVar

import msgspec

from gateway.planner.engine import Capacities, Costs
from gateway.planner.fleet import Patience, SimulatedGateway, Simulation, Tell
from gateway.planner.requests import BLOCK_TOKENS, PlannedRequest, Requests
from gateway.planner.sizes import GIB, Sizes
from gateway.planning.traffic import Job, PlanRequest, Turn
from gateway.structs.advice import Point

HOST_BYTES_PER_SECOND, DISK_BYTES_PER_SECOND = 10e9, 2e9
MAX_STRETCH = 5_000
"""Turns of the busiest stretch, under which the curves' points are simulated."""
_WARMING = 0.2
MAX_PROCESSES = 2
T = TypeVar("T", bound=msgspec.Struct)
Work = Callable[[int, Callable[[int], None]], T]


def side_by_side(num: int, work: Work[T], kind: type[T], tell: Callable[[int], None]) -> list[T]:
    """`work(number, tell)` of each number, two at a time. `tell` hears of turns that are done. The
    processes are forks, so that the traffic is not copied."""
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
    found = dict[int, T]()
    while readers:
        for ready in wait(readers):
            assert isinstance(ready, Connection)
            try:
                number, told = ready.recv()
            except EOFError:
                readers.remove(ready)
                continue
            if number is None:
                tell(told)
            else:
                found[number] = msgspec.msgpack.decode(told, type=kind)
    if len(found) < num:
        raise RuntimeError("a process of the simulation has ended early")
    return [found[number] for number in range(num)]


def _serve(num: int, work: Work[T], taken: "Synchronized[int]", writer: Connection) -> None:
    # Nothing of a simulation is garbage before its end, but collecting looks at all of it.
    gc.disable()
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= num:
            return
        found = work(number, lambda count: writer.send((None, count)))
        writer.send((number, msgspec.msgpack.encode(found)))
        gc.collect()


def stretch_of(turns: Sequence[Turn], most: int = MAX_STRETCH) -> Sequence[Turn]:
    """The `most` turns in a row with the most tokens a second; all where they are fewer."""
    if len(turns) <= most:
        return turns
    tokens = sum(turn.ends[-1] for turn in turns[:most])
    best, chosen = -1.0, 0
    for start in range(len(turns) - most + 1):
        seconds = turns[start + most - 1].at - turns[start].at
        if tokens / max(seconds, 1e-3) > best:
            best, chosen = tokens / max(seconds, 1e-3), start
        if start + most < len(turns):
            tokens += turns[start + most].ends[-1] - turns[start].ends[-1]
    return turns[chosen : chosen + most]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`kv_scale` is the memory for keys and values on the device, as a share of what is asked.
    `token_scale` is how many more tokens a byte holds. One that `is_whole` gets all of the traffic,
    the others the busiest stretch."""

    label: str
    engines: int
    host_gib: float
    disk_gib: float
    kv_scale: float = 1.0
    kv_dtype: str
    is_whole: bool = False
    token_scale: float = 1.0

    @classmethod
    def of(cls, asked: PlanRequest, label: str, engines: int) -> "Fleet":
        tiers = {name: getattr(asked, name) for name in ("host_gib", "disk_gib", "kv_dtype")}
        return cls(label=label, engines=engines, **tiers)


def _rank_of_p95(num: int) -> int:
    return min(int(0.95 * num), num - 1)


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

    def point(
        self,
        fleet: Fleet,
        requests: Sequence[PlannedRequest],
        tell: Tell,
        most_p95: float | None = None,
    ) -> Point:
        """Raise Hopeless as soon as the first token's p95 is above `most_p95`."""
        gateway = SimulatedGateway(fleet.engines) if fleet.engines > 1 else None
        costs, patience = self.costs(fleet), None
        if most_p95 is not None:
            num = sum(request.is_counted for request in requests)
            patience = Patience(most_p95 - costs.overhead, num - 1 - _rank_of_p95(num))
        capacities = self.capacities(fleet)
        fleets = Simulation(fleet.engines, capacities, costs, self._unit, gateway, tell, patience)
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
            first_token_p95=waits[_rank_of_p95(len(waits))],
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
