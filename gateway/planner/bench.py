"""Fleets of engines of one model, and their simulations. Two simulations run at a time."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from typing import Any, TypeVar

import msgspec

from gateway.planner.engine import Capacities, Costs
from gateway.planner.fleet import SimulatedGateway, Simulation, Tell
from gateway.planner.requests import BLOCK_TOKENS, PlannedRequest, Requests
from gateway.planning.traffic import EngineFacts, Job, Turn
from gateway.structs.plan import Point

# The assumed speeds of copies back to the device. No figure of a plan depends on them alone.
HOST_BYTES_PER_SECOND = 10e9
DISK_BYTES_PER_SECOND = 2e9
DEFAULT_MAX_RUNNING = 32
MAX_STRETCH = 5_000
"""The most turns of the busiest stretch. The points of the curves are simulated with it."""
_WARMING = 0.2
"""The part of a stretch that only fills the memory and is not counted."""
MAX_PROCESSES = 2
T = TypeVar("T", bound=msgspec.Struct)
Work = Callable[[int, Callable[[int], None]], T]


def side_by_side(num: int, work: Work[T], kind: type[T], tell: Callable[[int], None]) -> list[T]:
    """The results of `work(number, tell)` for the numbers below `num`, in order.

    Two of them run at a time. Each call of `tell` has the number of turns that were simulated since
    the call before. The processes are forks that share the traffic with this process, so nothing is
    copied. Raise RuntimeError if one of them ends early.
    """
    context = multiprocessing.get_context("fork")
    processes = min(MAX_PROCESSES, os.cpu_count() or 1, num)
    next_number = context.Value("i", 0)
    readers = []
    gc.freeze()
    for _ in range(processes):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(num, work, next_number, writer), daemon=True)
        process.start()
        writer.close()
        readers.append(reader)
    results = dict[int, T]()
    while readers:
        for ready in wait(readers):
            assert isinstance(ready, Connection)
            try:
                number, message = ready.recv()
            except EOFError:
                readers.remove(ready)
                continue
            if number is None:
                tell(message)
            else:
                results[number] = msgspec.msgpack.decode(message, type=kind)
    if len(results) < num:
        raise RuntimeError("a process of the simulation has ended early")
    return [results[number] for number in range(num)]


def _serve(num: int, work: Work[T], next_number: "Synchronized[int]", writer: Connection) -> None:
    # A simulation makes no garbage before its end, and a collection would look at all of it.
    gc.disable()
    while True:
        with next_number.get_lock():
            number = next_number.value
            next_number.value += 1
        if number >= num:
            return
        result = work(number, lambda count: writer.send((None, count)))
        writer.send((number, msgspec.msgpack.encode(result)))
        gc.collect()


def stretch_of(turns: Sequence[Turn], max_turns: int = MAX_STRETCH) -> Sequence[Turn]:
    """The `max_turns` consecutive turns with the most tokens a second. If there are fewer turns,
    all of them."""
    if len(turns) <= max_turns:
        return turns
    tokens = sum(turn.ends[-1] for turn in turns[:max_turns])
    highest = -1.0
    chosen = 0
    for start in range(len(turns) - max_turns + 1):
        seconds = turns[start + max_turns - 1].at - turns[start].at
        rate = tokens / max(seconds, 1e-3)
        if rate > highest:
            highest = rate
            chosen = start
        if start + max_turns < len(turns):
            tokens += turns[start + max_turns].ends[-1] - turns[start].ends[-1]
    return turns[chosen : chosen + max_turns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal engines of one model, with the tokens that each tier of one of them holds."""

    label: str
    engines: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    # Whether all turns are simulated. Otherwise only the busiest stretch is.
    is_whole: bool = False

    @classmethod
    def of(cls, engine: EngineFacts, label: str) -> "Fleet":
        return cls(
            label=label,
            engines=engine.engines,
            device_tokens=engine.device_tokens,
            host_tokens=engine.host_tokens,
            disk_tokens=engine.disk_tokens,
        )

    @property
    def has_lower_tier(self) -> bool:
        return self.host_tokens + self.disk_tokens > 0


class Bench:
    """Simulates fleets of one model, in units of `unit` tokens. With units of one token it is
    exact."""

    def __init__(self, job: Job, engine: EngineFacts, unit: int, distinct_tokens: int) -> None:
        self._request = job.request
        self._times = job.times
        self._engine = engine
        self._unit = unit
        # The tokens of a pool with room for leases on all of the traffic. Larger pools give the
        # same results.
        share = max(job.request.lease_share, 0.05)
        self._enough = int(distinct_tokens / share * 1.1) + 64 * max(unit, BLOCK_TOKENS)

    def capacities(self, fleet: Fleet) -> Capacities:
        return Capacities(
            device=min(fleet.device_tokens, self._enough),
            host=min(fleet.host_tokens, self._enough),
            disk=min(fleet.disk_tokens, self._enough),
            lease_share=self._request.lease_share,
            max_running=self._engine.max_running or DEFAULT_MAX_RUNNING,
            block_units=max(BLOCK_TOKENS // self._unit, 1),
            min_cache_tokens=self._engine.min_cache_tokens,
        )

    def costs(self, fleet: Fleet) -> Costs:
        per_token = self._engine.bytes_per_token
        costs = Costs(
            host=per_token / HOST_BYTES_PER_SECOND, disk=per_token / DISK_BYTES_PER_SECOND
        )
        times = self._times
        if times is None:
            return costs
        return replace(
            costs,
            prefill=times.prefill_us / 1e6,
            decode=times.decode_ms / 1e3,
            overhead=times.overhead_seconds,
        )

    def requests(self, turns: Sequence[Turn], *, is_warmed: bool) -> list[PlannedRequest]:
        """The turns as requests. With `is_warmed` the first fifth only fills the memory and is not
        counted."""
        model = Requests(self._unit, with_names=True)
        requests = [model.of(turn) for turn in turns]
        if is_warmed:
            for request in requests[: int(_WARMING * len(requests))]:
                request.is_counted = False
        return requests

    def point(self, fleet: Fleet, requests: Sequence[PlannedRequest], tell: Tell) -> Point:
        gateway = SimulatedGateway(fleet.engines) if fleet.engines > 1 else None
        costs = self.costs(fleet)
        capacities = self.capacities(fleet)
        simulation = Simulation(fleet.engines, capacities, costs, self._unit, gateway, tell)
        outcome = simulation.replay(requests)
        served = [row for row in outcome.served if row.request.is_counted]
        prompt = max(sum(row.request.tokens for row in served), 1)
        reused = sum(row.reused for row in served)
        num_breakpoints = sum(row.breakpoints for row in served)
        num_leased = sum(row.leased for row in served)
        num_ended = outcome.leases.total()
        waits = sorted(row.wait for row in served) or [0.0]
        is_timed = self._times is not None and not fleet.has_lower_tier
        return Point(
            **self.about(fleet),
            engines=fleet.engines,
            hit_rate=sum(row.read for row in served) / prompt,
            reuse_rate=reused / prompt,
            promise_kept=outcome.leases["expired"] / num_ended if num_ended else None,
            leases_ended=num_ended,
            best_effort=1 - num_leased / num_breakpoints if num_breakpoints else None,
            first_token_p50=waits[len(waits) // 2] if is_timed else None,
            first_token_p95=waits[_rank_of_p95(len(waits))] if is_timed else None,
            prefill_saved_seconds=reused * costs.prefill if self._times else None,
            refused=outcome.refused,
            turns=len(served),
        )

    def about(self, fleet: Fleet) -> dict[str, Any]:
        """What a point says of its fleet. Fleets that give the same results share a simulation, and
        each has a point of its own."""
        return {
            "label": fleet.label,
            "device_tokens": fleet.device_tokens,
            "host_tokens": fleet.host_tokens,
            "disk_tokens": fleet.disk_tokens,
        }


def _rank_of_p95(num: int) -> int:
    return min(int(0.95 * num), num - 1)
