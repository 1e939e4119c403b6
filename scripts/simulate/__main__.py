"""Simulates routing under recorded and made-up traffic.

The engines' loop, scheduler, pool and entries and the gateway's placement are the product's own;
time and the model's computation are simulated. Workloads are those of `scripts.bench.routing`
(tenants, parting, sessions), Mooncake's conversation trace (kvcache-ai/Mooncake,
FAST25-release/traces) and coding-agent sessions (callanjfox/kv-cache-tester). Nothing is marked.

    python -m scripts.simulate tenants
    python -m scripts.simulate conversation --trace conversation_trace.jsonl --engines 8
    python -m scripts.simulate agentic --trace FOLDER --copies 30 --hours 4
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import msgspec

from engine.backends.synthetic_renderer import BYTES_PER_TOKEN
from gateway.planner.engine import Capacities, Costs
from gateway.planner.fleet import Outcome, SimulatedGateway, Simulation
from gateway.planner.requests import PlannedRequest, Requests
from gateway.planning.traffic import TRACE_UNIT, Turn, of_trace
from scripts.bench.report import percentile
from scripts.bench.routing_load import SHAPES, Workload
from scripts.setup.options import new_parser

POLICIES = ("cost", "round_robin")
TALK_UNIT = 16
"""Tokens of a unit of a prompt in conversations made up here; TRACE_UNIT in published traces."""
IN_FLIGHT = 24
"""Of the workloads of scripts.bench.routing."""
SHARED_SHARE = 0.75
"""Of tools and system prompt, the same in all sessions: the agentic trace's own model."""


def main() -> int:
    args = _arguments()
    print(f"simulated: {args.workload}, {args.engines} engines of {args.capacity:,} tokens")
    is_talk = args.workload in SHAPES
    unit = TALK_UNIT if is_talk else TRACE_UNIT
    for policy in args.policy:
        began = time.perf_counter()
        made = Requests(unit, with_names=True, with_tails=False)
        talks = [[made.of(turn) for turn in turns] for turns in _turns(args)]
        requests = [request for talk in talks for request in talk]
        gateway = SimulatedGateway(args.engines) if policy == "cost" else None
        capacities = Capacities(device=args.capacity)
        simulation = Simulation(args.engines, capacities, Costs(), unit, gateway)
        outcome = simulation.talk(talks, IN_FLIGHT) if is_talk else simulation.replay(requests)
        took = time.perf_counter() - began
        print(
            f"\n{policy}: {len(requests):,} requests, {outcome.refused} refused,"
            f" {outcome.seconds:,.0f} s simulated in {took:.1f} s"
        )
        for name, told in _figures(requests, outcome, args.engines).items():
            print(f"  {name:18} {told}")
    return 0


def _figures(
    requests: Sequence[PlannedRequest], outcome: Outcome, num_engines: int
) -> dict[str, str]:
    seen: set[int] = set()
    ideal, loads = 0, [0] * num_engines
    for request in sorted(requests, key=lambda request: request.at):
        units = request.units
        known = next((n for n, unit in enumerate(units) if unit not in seen), len(units))
        seen.update(units)
        # An infinite cache would have the known prefix, never the last unit.
        ideal += request.tokens_at(min(known, len(units) - 1))
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


class _Units:
    """Ids of prompt pieces by history: the same piece behind the same pieces has the same id."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}

    def turn(
        self,
        at: float,
        pieces: Iterable[object],
        ends: Iterable[int],
        unit: int,
        output: int,
        tokens: int = 0,
    ) -> Turn:
        """`ends` of segments are in units, `tokens` those of the whole prompt, 0 for full units."""
        parent, chain = 0, list[int]()
        for piece in pieces:
            parent = self._ids.setdefault((parent, piece), len(self._ids) + 1)
            chain.append(parent)
        most = tokens or len(chain) * unit
        return Turn(
            at=at,
            scope=0,
            ids=chain,
            ends=[min((place + 1) * unit, most) for place in range(len(chain))],
            segments=sorted({end - 1 for end in ends if end}),
            marks=[],
            output=output,
        )


def _turns(args: argparse.Namespace) -> Iterable[list[Turn]]:
    """Conversations, or one list of all that is replayed."""
    if args.workload == "agentic":
        yield _agentic(args.trace, args.copies, args.hours, Random(args.seed))
    elif args.workload == "conversation":
        with args.trace.open() as lines:
            yield [msgspec.structs.replace(turn, marks=[]) for turn in of_trace(lines)]
    else:
        units, size = _Units(), TALK_UNIT * BYTES_PER_TOKEN
        for system, questions in Workload(seed=args.seed, shape=args.workload).scripts():
            turns, pieces, ends = list[Turn](), list[object](), list[int]()
            for text in (system, *questions):
                pieces += [text[start : start + size] for start in range(0, len(text), size)]
                ends.append(len(pieces))
                if len(ends) > 1:
                    turns.append(units.turn(0.0, pieces, ends, TALK_UNIT, output=1))
            yield turns


def _agentic(folder: Path, copies: int, hours: float, random: Random) -> list[Turn]:
    """Coding-agent sessions (`trace_*.json`), each `copies` times, starting at random in `hours`.

    Ids are local to a session; the first SHARED_SHARE of tools and system prompt is everybody's.
    """
    units, turns = _Units(), list[Turn]()
    for path in sorted(folder.glob("trace_*.json")):
        session = json.loads(path.read_text())
        group = TRACE_UNIT // session["block_size"]
        system = session["tool_tokens"] + session["system_tokens"]
        num_shared, system = int(SHARED_SHARE * system) // TRACE_UNIT, system // TRACE_UNIT
        for copy in range(copies):
            start, before = random.uniform(0, hours * 3600), list[int]()
            for row in session["requests"]:
                if not (ids := row.get("hash_ids")):
                    continue
                pieces = [
                    ("shared", place)
                    if place < num_shared
                    else (path, copy, tuple(ids[at : at + group]))
                    for place, at in enumerate(range(0, len(ids), group))
                ]
                at, size = start + row["t"], row["in"]
                turn = units.turn(at, pieces, (), TRACE_UNIT, row["out"], size)
                pairs = enumerate(zip(turn.ids, before, strict=False))
                shortest = min(len(before), len(turn.ids))
                common = next((place for place, (a, b) in pairs if a != b), 0) or shortest
                ends = {min(system, len(turn.ids)), common, len(turn.ids)} - {0}
                turn.segments = sorted(end - 1 for end in ends)
                before = turn.ids
                turns.append(turn)
    return sorted(turns, key=lambda turn: turn.at)


def _arguments() -> argparse.Namespace:
    parser = new_parser(
        __doc__,
        trace=Path,
        engines=4,
        capacity=(1_000_000, "tokens of one engine"),
        policy=(["cost"], None, POLICIES),
        copies=(1, "of each agentic session"),
        hours=(1.0, "in which sessions start"),
        seed=1,
    )
    parser.add_argument("workload", choices=(*SHAPES, "conversation", "agentic"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
