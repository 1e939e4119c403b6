"""Simulates routing and leases under recorded and made-up traffic.

The engines' loop, scheduler, pool and leases and the gateway's placement are the product's own;
time and the model's computation are simulated. Workloads are those of `scripts.bench.routing`
(tenants, parting, sessions), Mooncake's conversation trace (kvcache-ai/Mooncake,
FAST25-release/traces) and coding-agent sessions (callanjfox/kv-cache-tester).

    python -m scripts.simulate tenants --engines 4 --capacity 1000000
    python -m scripts.simulate sessions --engines 4 --capacity 90000 --marked
    python -m scripts.simulate conversation --trace conversation_trace.jsonl --engines 8
    python -m scripts.simulate agentic --trace FOLDER --copies 30 --hours 4
    python -m scripts.simulate mix --trace conversation_trace.jsonl --sessions FOLDER --engines 1
"""

import argparse
import math
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path

from gateway.planner.engine import Capacities, Costs
from gateway.planner.fleet import Outcome, SimulatedGateway, Simulation
from gateway.planner.requests import PlannedRequest, Requests
from gateway.planning.traffic import TRACE_UNIT, Turn, of_trace
from scripts.bench.report import percentile
from scripts.bench.routing_load import SHAPES, Workload
from scripts.setup.options import new_parser
from scripts.simulate.traces import AGENTIC_SCOPE, TALK_UNIT, agentic, talks

POLICIES = ("cost", "learned", "round_robin")
HONOURED_SECONDS = 300.0
_KINDS = {"workspace-0": "chat", f"workspace-{AGENTIC_SCOPE}": "agentic"}


@dataclass
class Counts:
    """Tokens of requests. `honoured` of `promised` were reused within 5 minutes."""

    requests: int = 0
    prompt: int = 0
    ideal: int = 0
    reused: int = 0
    promised: int = 0
    honoured: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def main() -> int:
    args = _arguments()
    print(
        f"simulated: {args.workload}, {args.engines} engines of {args.capacity:,} tokens, "
        f"lease share {args.lease_share}, seed {args.seed}"
    )
    for policy in args.policy:
        began = time.perf_counter()
        talks_of_run, unit = _talks(args)
        learned = args.capacity if policy == "learned" else None
        gateway = None if policy == "round_robin" else SimulatedGateway(args.engines, learned)
        capacities = Capacities(device=args.capacity, lease_share=args.lease_share)
        simulation = Simulation(args.engines, capacities, Costs(), unit, gateway)
        requests = [request for talk in talks_of_run for request in talk]
        marked = {id(request) for request in requests if request.breakpoints}
        for request in requests if args.plain_lru else ():
            request.breakpoints = []
        if args.workload in SHAPES:
            outcome = simulation.talk(talks_of_run, args.in_flight)
        else:
            outcome = simulation.replay(requests)
        counts = counts_of(requests, outcome, marked)
        _report(policy, counts, outcome, args.engines, time.perf_counter() - began)
    return 0


def _talks(args: argparse.Namespace) -> tuple[list[list[PlannedRequest]], int]:
    """Conversations, or one list of all that is replayed; and the tokens of a unit."""
    if args.workload in SHAPES:
        found = talks(Workload(seed=args.seed, shape=args.workload))
        unit, marked = TALK_UNIT, {0} if args.marked else set()
    else:
        found, unit = [_replayed(args)], TRACE_UNIT
        marked = {AGENTIC_SCOPE} if args.workload == "mix" else set()
        marked |= {0, AGENTIC_SCOPE} if args.marked and args.workload != "mix" else set()
    made = Requests(unit, with_names=True, with_tails=False)
    for turns in found:
        for turn in turns:
            places = turn.marks if turn.scope in marked else ()
            turn.marks = [(place, args.ttl) for place, _ in places]
    return [[made.of(turn) for turn in turns] for turns in found], unit


def _replayed(args: argparse.Namespace) -> list[Turn]:
    turns: list[Turn] = []
    if args.workload in ("conversation", "mix"):
        with args.trace.open() as lines:
            turns += of_trace(islice(lines, args.limit))
    if args.workload in ("agentic", "mix"):
        is_mixed = args.workload == "mix"
        folder = args.sessions if is_mixed else args.trace
        sessions = agentic(folder, copies=args.copies, hours=args.hours, seed=args.seed)
        turns += [turn for turn in sessions if not is_mixed or turn.at <= args.hours * 3600]
    return sorted(turns, key=lambda turn: turn.at)[: args.limit]


def counts_of(
    requests: Sequence[PlannedRequest], outcome: Outcome, marked: Collection[int]
) -> dict[str, Counts]:
    """By scope. `marked` requests are promised their reuse, whether they carry their marks."""
    found: dict[str, Counts] = {}
    seen: set[int] = set()
    for request in sorted(requests, key=lambda request: request.at):
        counts = found.setdefault(request.scope, Counts())
        units = request.units
        known = next((n for n, unit in enumerate(units) if unit not in seen), len(units))
        seen.update(units)
        counts.requests += 1
        counts.prompt += request.tokens
        # An infinite cache would have the known prefix, never the last unit.
        counts.ideal += request.tokens_at(min(known, len(units) - 1))
    used_at: dict[int, float] = {}
    for served in outcome.served:
        request = served.request
        counts = found[request.scope]
        counts.reused += served.reused
        if id(request) not in marked:
            continue
        for place, unit in enumerate(request.units[:-1]):
            if request.at - used_at.get(unit, -math.inf) <= HONOURED_SECONDS:
                end = request.tokens_at(place + 1)
                counts.promised += end - request.tokens_at(place)
                counts.honoured += (end - request.tokens_at(place)) * (end <= served.reused)
        used_at.update(dict.fromkeys(request.units, request.at))
    return found


def loads_of(outcome: Outcome, num_engines: int) -> list[int]:
    """Tokens that each engine computed."""
    loads = [0] * num_engines
    for served in outcome.served:
        request = served.request
        loads[served.engine] += request.tokens - served.reused + request.output_tokens
    return loads


def _report(
    policy: str, counts: dict[str, Counts], outcome: Outcome, num_engines: int, seconds: float
) -> None:
    total, loads = sum(counts.values(), Counts()), loads_of(outcome, num_engines)
    waits = [served.wait for served in outcome.served]
    computed, least = total.prompt - total.reused, total.prompt - total.ideal
    p50, p95 = (percentile(waits, share) for share in (0.5, 0.95))
    lines = {
        "hit rate": f"{_share(total.reused, total.prompt)} of the prompt tokens "
        f"(ideal {_share(total.ideal, total.prompt)})",
        "captured": f"{_share(total.reused, total.ideal)} of the available reuse",
        "prefill": f"{computed:,} tokens, {computed / max(least, 1):.3f} of the ideal",
        "load max/mean": f"{max(loads) * num_engines / (sum(loads) or 1):.3f}",
        "first token": f"p50 {p50:.3f} s, p95 {p95:.3f} s",
    }
    for scope, each in sorted(counts.items()):
        kept = f", 5-minute promise {_share(each.honoured, each.promised)}"
        lines[_KINDS[scope]] = (
            f"{each.requests:,} requests, hit rate {_share(each.reused, each.prompt)}"
            f"{kept if each.promised else ''}"
        )
    print(
        f"\n{policy}: {total.requests:,} requests, {outcome.refused} refused, "
        f"{outcome.seconds:,.0f} s simulated in {seconds:.1f} s"
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
