"""Replay a trace through the gateway's own routing code and the engine's own pool and leases.

Simulated: time, and the model's computation. Real: placement, the residency index, block pool,
entries and leases. Deterministic by seed. Traces are not shipped: Mooncake's conversation trace
(kvcache-ai/Mooncake, FAST25-release/traces) and coding-agent sessions (callanjfox/kv-cache-tester).

    python -m scripts.simulate tenants --engines 4 --capacity 1000000
    python -m scripts.simulate sessions --engines 4 --capacity 90000 --marked
    python -m scripts.simulate conversation --trace conversation_trace.jsonl --engines 8
    python -m scripts.simulate agentic --trace FOLDER --copies 30 --hours 4
    python -m scripts.simulate mix --trace conversation_trace.jsonl --sessions FOLDER --engines 1
"""

import argparse
import sys
import time
from pathlib import Path

from gateway.planner.engine import SimulatedEngine
from gateway.planner.fleet import POLICIES, Clockwork, Result, SimulatedGateway, Simulation
from gateway.planner.simulated import Capacities, SimulatedRequest
from scripts.bench.report import percentile
from scripts.bench.routing_load import SHAPES, Workload
from scripts.setup.options import new_parser
from scripts.simulate.traces import (
    TENANT_UNIT,
    TRACE_UNIT,
    Units,
    agentic,
    conversation,
    talks,
)


def main() -> int:
    args = _arguments()
    print(
        f"simulated: {args.workload}, {args.engines} engines of {args.capacity:,} tokens, "
        f"lease share {args.lease_share}, seed {args.seed}"
    )
    for policy in args.policy:
        began = time.perf_counter()
        result = simulate(args, policy)
        _report(policy, result, args.engines, time.perf_counter() - began)
    return 0


def simulate(args: argparse.Namespace, policy: str) -> Result:
    clockwork = Clockwork()
    unit = TENANT_UNIT if args.workload in SHAPES else TRACE_UNIT
    capacities = Capacities(device=args.capacity, lease_share=args.lease_share)
    engines = [SimulatedEngine(capacities, unit, clockwork.at) for _ in range(args.engines)]
    gateway = SimulatedGateway(args.engines, args.capacity if policy == "learned" else None)
    in_flight = args.in_flight if args.workload in SHAPES else None
    simulation = Simulation(engines, clockwork, policy, gateway, in_flight)
    return simulation.run(_requests(args))


def _requests(args: argparse.Namespace) -> list[SimulatedRequest]:
    if args.workload in SHAPES:
        return talks(Workload(seed=args.seed, shape=args.workload), marked=args.marked)
    requests = _replayed(args)
    for request in requests:
        request.ttl = args.ttl
        request.is_marked = bool(request.marks)
        if args.plain_lru:
            request.marks = []
    return requests[: args.limit] if args.limit else requests


def _replayed(args: argparse.Namespace) -> list[SimulatedRequest]:
    units, requests = Units(), list[SimulatedRequest]()
    if args.workload in ("conversation", "mix"):
        marked = args.marked and args.workload == "conversation"
        requests += conversation(args.trace, limit=args.limit, marked=marked, units=units)
    if args.workload in ("agentic", "mix"):
        folder = args.sessions if args.workload == "mix" else args.trace
        marked = args.marked or args.workload == "mix"
        sessions = agentic(
            folder, copies=args.copies, hours=args.hours, seed=args.seed, marked=marked, units=units
        )
        requests += [r for r in sessions if r.at <= args.hours * 3600 or args.workload != "mix"]
    return requests


def _report(policy: str, result: Result, num_engines: int, seconds: float) -> None:
    total = result.total()
    loads = [result.loads[number] for number in range(num_engines)]
    computed, least = total.prompt - total.reused, total.prompt - total.ideal
    p50, p95 = (percentile(result.waits, share) for share in (0.5, 0.95))
    lines = {
        "hit rate": f"{_share(total.reused, total.prompt)} of the prompt tokens "
        f"(ideal {_share(total.ideal, total.prompt)})",
        "captured": f"{_share(total.reused, total.ideal)} of the available reuse",
        "prefill": f"{computed:,} tokens, {computed / max(least, 1):.3f} of the ideal",
        "load max/mean": f"{max(loads) * num_engines / (sum(loads) or 1):.3f}",
        "first token": f"p50 {p50:.3f} s, p95 {p95:.3f} s",
    }
    for kind, counts in sorted(result.counts.items()):
        kept = f", 5-minute promise {_share(counts.honoured, counts.promised)}"
        lines[kind] = (
            f"{counts.requests:,} requests, hit rate {_share(counts.reused, counts.prompt)}"
            f"{kept if counts.promised else ''}"
        )
    print(
        f"\n{policy}: {total.requests:,} requests, {result.refused} refused, "
        f"{result.seconds:,.0f} s simulated in {seconds:.1f} s"
    )
    for name, told in lines.items():
        print(f"  {name:18} {told}")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "-"


def _arguments() -> argparse.Namespace:
    parser = new_parser(
        __doc__,
        trace=Path,
        sessions=Path,
        engines=4,
        capacity=(1_000_000, "tokens of one engine"),
        policy=(["cost"], None, POLICIES),
        marked=(False, "requests carry cache_control"),
        plain_lru=(False, "leave the markers out"),
        ttl=("5m", None, ("5m", "1h")),
        lease_share=0.5,
        in_flight=(24, "of the workloads of scripts.bench.routing"),
        copies=(1, "of each agentic session"),
        hours=(1.0, "in which sessions start"),
        limit=int,
        seed=1,
    )
    parser.add_argument("workload", choices=(*SHAPES, "conversation", "agentic", "mix"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
