"""Workloads of the simulator: public traces, and conversations made up by a rule."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from engine.backends.synthetic_renderer import BYTES_PER_TOKEN
from gateway.planning.traffic import TRACE_UNIT, Turn
from scripts.bench.routing_load import Workload

TALK_UNIT = 16
"""Tokens of a unit of a prompt in conversations made up here; TRACE_UNIT in published traces."""
AGENTIC_SCOPE = 1
SHARED_SHARE = 0.75
"""Of tools and system prompt, the same in all sessions: the agentic trace's own model."""


class Units:
    """Ids of prompt pieces by history: the same piece behind the same pieces has the same id."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}

    def chain(self, pieces: Iterable[object]) -> list[int]:
        parent, chain = 0, []
        for piece in pieces:
            parent = self._ids.setdefault((parent, piece), len(self._ids) + 1)
            chain.append(parent)
        return chain


def agentic(folder: Path, *, copies: int, hours: float, seed: int) -> Iterator[Turn]:
    """Coding-agent sessions (`trace_*.json`), each `copies` times, starting at random in `hours`.

    Ids are local to a session; the first SHARED_SHARE of tools and system prompt is everybody's.
    """
    random, units = Random(seed), Units()
    for path in sorted(folder.glob("trace_*.json")):
        session = json.loads(path.read_text())
        for copy in range(copies):
            name, start = f"{session['id']}#{copy}", random.uniform(0, hours * 3600)
            yield from _session(session, name, start, units)


def _session(session: dict[str, Any], name: str, start: float, units: Units) -> Iterator[Turn]:
    group = TRACE_UNIT // session["block_size"]
    system = session["tool_tokens"] + session["system_tokens"]
    num_shared, system = int(SHARED_SHARE * system) // TRACE_UNIT, system // TRACE_UNIT
    before: list[int] = []
    for row in session["requests"]:
        if not (ids := row.get("hash_ids")):
            continue
        pieces = [tuple(ids[i : i + group]) for i in range(0, len(ids), group)]
        chain = units.chain(
            ("shared", i) if i < num_shared else (name, piece) for i, piece in enumerate(pieces)
        )
        common = next((i for i, (a, b) in enumerate(zip(chain, before, strict=False)) if a != b), 0)
        common = common or min(len(before), len(chain))
        head, before = min(system, len(chain)), chain
        yield _turn(
            start + row["t"],
            chain,
            {head, common, len(chain)},
            {head, len(chain)},
            TRACE_UNIT,
            output=row["out"],
            scope=AGENTIC_SCOPE,
            tokens=row["in"],
        )


def talks(workload: Workload) -> list[list[Turn]]:
    """The conversations of `scripts.bench.routing`; each turn follows the answer before it."""
    units = Units()
    found = []
    for system, questions in workload.scripts():
        turns = []
        for number in range(1, len(questions) + 1):
            pieces, ends = list[object](), list[int]()
            for text in (system, *questions[:number]):
                pieces += _cut(text)
                ends.append(len(pieces))
            chain = units.chain(pieces)
            turns.append(_turn(0.0, chain, ends, {ends[0], ends[-1]}, TALK_UNIT, output=1))
        found.append(turns)
    return found


def _turn(
    at: float,
    chain: list[int],
    ends: Iterable[int],
    marked: Iterable[int],
    unit: int,
    *,
    output: int,
    scope: int = 0,
    tokens: int | None = None,
) -> Turn:
    """`ends` of segments and `marked` ones are in units."""
    most = len(chain) * unit if tokens is None else tokens
    return Turn(
        at=at,
        scope=scope,
        ids=chain,
        ends=[min((place + 1) * unit, most) for place in range(len(chain))],
        segments=sorted({end - 1 for end in ends if end}),
        marks=[(end - 1, "5m") for end in sorted(marked) if end],
        output=output,
    )


def _cut(text: str) -> Sequence[str]:
    """A text in units; its last one counts as a whole one."""
    size = TALK_UNIT * BYTES_PER_TOKEN
    return [text[start : start + size] for start in range(0, len(text), size)]
