"""Simulates routing under recorded and made-up traffic.

The engines' loop, scheduler, pool and entries and the gateway's placement are the product's own;
time and the model's computation are simulated. Workloads are made up
(tenants, parting, sessions: workload.py) or Mooncake's conversation trace (kvcache-ai/Mooncake,
FAST25-release/traces). Nothing is marked.

    python -m scripts.simulate tenants
    python -m scripts.simulate conversation --trace conversation_trace.jsonl --engines 8
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from engine.backends.synthetic_renderer import BYTES_PER_TOKEN
from gateway.planner.engine import Capacities, Costs
from gateway.planner.fleet import Outcome, SimulatedGateway, Simulation
from gateway.planner.requests import PlannedRequest, Requests
from gateway.planning.traffic import TRACE_UNIT, Turn, of_trace
from scripts.bench.report import percentile
from scripts.setup.options import new_parser
from scripts.simulate.workload import SHAPES, Pieces, conversations

POLICIES = ("cost", "round_robin")
TALK_UNIT = 16
"""The tokens of a prompt's unit in conversations that are made up here. TRACE_UNIT is that of
published traces."""
IN_FLIGHT = 24
"""How many conversations run at once, each to its end."""


def main() -> int:
    args = _arguments()
    print(f"simulated: {args.workload}, {args.engines} engines of {args.capacity:,} tokens")
    is_talk = args.workload in SHAPES
    unit = TALK_UNIT if is_talk else TRACE_UNIT
    for policy in args.policy:
        began = time.perf_counter()
        requests_of_unit = Requests(unit, with_names=True, with_tails=False)
        talks = [[requests_of_unit.of(turn) for turn in turns] for turns in _turns(args)]
        requests = list(chain.from_iterable(talks))
        gateway = SimulatedGateway(args.engines) if policy == "cost" else None
        capacities = Capacities(device=args.capacity)
        simulation = Simulation(args.engines, capacities, Costs(), unit, gateway)
        outcome = simulation.converse(talks, IN_FLIGHT) if is_talk else simulation.replay(requests)
        took = time.perf_counter() - began
        print(
            f"\n{policy}: {len(requests):,} requests, {outcome.refused} refused,"
            f" {outcome.seconds:,.0f} s simulated in {took:.1f} s"
        )
        for name, figures in _figures(requests, outcome, args.engines).items():
            print(f"  {name:18} {figures}")
    return 0


def _figures(
    requests: Sequence[PlannedRequest], outcome: Outcome, num_engines: int
) -> dict[str, str]:
    seen_units: set[int] = set()
    ideal = 0
    loads = [0] * num_engines
    for request in sorted(requests, key=lambda request: request.at):
        units = request.units
        num_seen = next((n for n, unit in enumerate(units) if unit not in seen_units), len(units))
        seen_units.update(units)
        # An infinite cache would have the known prefix, never the last unit.
        ideal += request.tokens_at(min(num_seen, len(units) - 1))
    for served in outcome.served:
        request = served.request
        loads[served.engine] += request.tokens - served.reused + request.output_tokens
    prompt = sum(request.tokens for request in requests)
    reused = sum(served.reused for served in outcome.served)
    waits = [served.wait for served in outcome.served]
    return {
        "hit rate": f"{reused / prompt:.4f} of the prompt tokens (ideal {ideal / prompt:.4f})",
        "captured": f"{reused / max(ideal, 1):.4f} of the available reuse",
        "prefill": f"{prompt - reused:,} tokens,"
        f" {(prompt - reused) / max(prompt - ideal, 1):.3f} of the ideal",
        "load max/mean": f"{max(loads) * num_engines / (sum(loads) or 1):.3f}",
        "first token": f"p50 {percentile(waits, 0.5):.3f} s, p95 {percentile(waits, 0.95):.3f} s",
    }


def _turns(args: argparse.Namespace) -> Iterable[list[Turn]]:
    """The conversations, or one list of everything that is replayed."""
    if args.workload == "conversation":
        with args.trace.open() as lines:
            yield [msgspec.structs.replace(turn, marks=[]) for turn in of_trace(lines)]
        return
    pieces = Pieces(TALK_UNIT * BYTES_PER_TOKEN)
    for system, questions in conversations(args.workload, args.seed):
        turns = list[Turn]()
        chain = list[int]()
        ends = list[int]()
        for text in (system, *questions):
            pieces.append(chain, text)
            ends.append(len(chain))
            if len(ends) > 1:
                units = [(place + 1) * TALK_UNIT for place in range(len(chain))]
                segments = sorted({end - 1 for end in ends})
                turns.append(
                    Turn(
                        at=0.0,
                        scope=0,
                        ids=list(chain),
                        ends=units,
                        segments=segments,
                        marks=[],
                        output=1,
                    )
                )
        yield turns


def _arguments() -> argparse.Namespace:
    parser = new_parser(
        __doc__,
        trace=Path,
        engines=4,
        capacity=(1_000_000, "tokens of one engine"),
        policy=(["cost"], None, POLICIES),
        seed=1,
    )
    parser.add_argument("workload", choices=(*SHAPES, "conversation"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
