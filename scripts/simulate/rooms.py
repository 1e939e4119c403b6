"""Hit rates by room, seed and mode of routing, for the workloads of scripts.bench.routing.

    python -m scripts.simulate.rooms
    python -m scripts.simulate.rooms --workload sessions --room 0.25 --seeds 1 2 3 4 5 6 7 8

Simulated are time and the model's computation; placement, the residency index, the pool and leases
are the product's (`scripts.simulate`). A run is the same at each call, on a busy machine too.
*Of available* is the reuse over that of one infinite cache; *p95* is to the first token, in
simulated seconds. Medians over the seeds, and the worst.
"""

import statistics
import sys

from gateway.planner.engine import SimulatedEngine
from gateway.planner.fleet import Clockwork, SimulatedGateway, Simulation
from gateway.planner.simulated import Capacities, SimulatedRequest
from scripts.bench.report import percentile, table
from scripts.bench.routing_load import SHAPES, Shape, Workload
from scripts.setup.options import parse
from scripts.simulate.traces import TENANT_UNIT, talks

MODES = ("events", "events, marked", "learned", "learned, marked")
NUM_ENGINES, IN_FLIGHT, MAX_RUNNING = 4, 24, 32
HEADINGS = ("workload", "room", "mode", "hit", "of available", "load", "p95")


def main() -> int:
    args = parse(
        __doc__,
        workload=(list(SHAPES), None, list(SHAPES)),
        room=([1.25, 0.25], "the fleet's memory over the data there is"),
        mode=(list(MODES), None, list(MODES)),
        seeds=[1, 2, 3, 4],
    )
    rows = [
        _row(shape, room, mode, args.seeds)
        for shape in args.workload
        for room in args.room
        for mode in args.mode
    ]
    print(table(HEADINGS, rows))
    return 0


def _row(shape: Shape, room: float, mode: str, seeds: list[int]) -> list[str]:
    runs = [simulate(shape, room, mode, seed) for seed in seeds]
    hits, shares, loads, waits = (list(figures) for figures in zip(*runs, strict=True))
    return [
        shape,
        f"{room:g}",
        mode,
        f"{statistics.median(hits):.4f} ({min(hits):.4f})",
        f"{statistics.median(shares):.2%} ({min(shares):.2%})",
        f"{statistics.median(loads):.3f} ({max(loads):.3f})",
        f"{statistics.median(waits):.2f} ({max(waits):.2f})",
    ]


def simulate(shape: Shape, room: float, mode: str, seed: int) -> tuple[float, float, float, float]:
    """The hit rate, its share of an infinite cache's, load max/mean, and p95 in seconds."""
    requests = talks(Workload(seed=seed, shape=shape), marked="marked" in mode)
    capacity = int(room * _num_units(requests) * TENANT_UNIT / NUM_ENGINES)
    clockwork = Clockwork()
    capacities = Capacities(device=capacity, max_running=MAX_RUNNING)
    engines = [SimulatedEngine(capacities, TENANT_UNIT, clockwork.at) for _ in range(NUM_ENGINES)]
    is_learned = mode.startswith("learned")
    gateway = SimulatedGateway(NUM_ENGINES, capacity if is_learned else None)
    policy = "learned" if is_learned else "cost"
    result = Simulation(engines, clockwork, policy, gateway, IN_FLIGHT).run(requests)
    total, loads = result.total(), [result.loads[number] for number in range(NUM_ENGINES)]
    return (
        total.reused / total.prompt,
        total.reused / total.ideal,
        max(loads) / statistics.fmean(loads),
        percentile(result.waits, 0.95),
    )


def _num_units(requests: list[SimulatedRequest]) -> int:
    """Different units in all turns of these conversations."""
    units: set[int] = set()
    for first in requests:
        turn: SimulatedRequest | None = first
        while turn is not None:
            units.update(turn.units)
            turn = turn.next
    return len(units)


if __name__ == "__main__":
    sys.exit(main())
