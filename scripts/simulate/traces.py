"""Workloads of the simulator: public traces, and conversations made up by a rule."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from engine.backends.synthetic_renderer import BYTES_PER_TOKEN
from gateway.planner.simulated import SimulatedRequest
from scripts.bench.routing_load import Workload

TRACE_UNIT, TENANT_UNIT = 512, 16
"""Tokens of a unit of a prompt: in the published traces, and in conversations made up here."""
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


def conversation(
    path: Path, *, limit: int | None, marked: bool, units: Units
) -> Iterator[SimulatedRequest]:
    """Mooncake's format: `timestamp` ms, `input_length`, `output_length`, 512-token `hash_ids`."""
    seen: set[int] = set()
    with path.open() as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                return
            row = json.loads(line)
            chain = units.chain(("conversation", piece) for piece in row["hash_ids"])
            known = next((i for i, unit in enumerate(chain) if unit not in seen), len(chain))
            seen.update(chain)
            ends = sorted({known, len(chain)} - {0})
            yield SimulatedRequest(
                at=row["timestamp"] / 1e3,
                kind="chat",
                units=chain,
                unit_tokens=TRACE_UNIT,
                tokens=row["input_length"],
                output_tokens=row["output_length"],
                ends=ends,
                marks=[len(ends) - 1] if marked else [],
            )


def agentic(
    folder: Path, *, copies: int, hours: float, seed: int, marked: bool, units: Units
) -> Iterator[SimulatedRequest]:
    """Coding-agent sessions (`trace_*.json`), each `copies` times, starting at random in `hours`.

    Ids are local to a session; the first SHARED_SHARE of tools and system prompt is everybody's.
    """
    random = Random(seed)
    for path in sorted(folder.glob("trace_*.json")):
        session = json.loads(path.read_text())
        for copy in range(copies):
            name, start = f"{session['id']}#{copy}", random.uniform(0, hours * 3600)
            yield from _session(session, name, start, marked, units)


def _session(
    session: dict[str, Any], name: str, start: float, marked: bool, units: Units
) -> list[SimulatedRequest]:
    group = TRACE_UNIT // session["block_size"]
    num_shared = int(SHARED_SHARE * (session["tool_tokens"] + session["system_tokens"]))
    num_shared //= TRACE_UNIT
    system = (session["tool_tokens"] + session["system_tokens"]) // TRACE_UNIT
    requests: list[SimulatedRequest] = []
    before: list[int] = []
    for row in session["requests"]:
        ids = row.get("hash_ids")
        if not ids:
            continue
        pieces = [tuple(ids[i : i + group]) for i in range(0, len(ids), group)]
        chain = units.chain(
            ("shared", i) if i < num_shared else (name, piece) for i, piece in enumerate(pieces)
        )
        common = next((i for i, (a, b) in enumerate(zip(chain, before, strict=False)) if a != b), 0)
        common = common or min(len(before), len(chain))
        ends = sorted({min(system, len(chain)), common, len(chain)} - {0})
        marks = sorted({ends.index(min(system, len(chain))), len(ends) - 1})
        before = chain
        requests.append(
            SimulatedRequest(
                at=start + row["t"],
                kind="agentic",
                units=chain,
                unit_tokens=TRACE_UNIT,
                tokens=min(row["in"], len(chain) * TRACE_UNIT),
                output_tokens=row["out"],
                ends=ends,
                marks=marks if marked else [],
            )
        )
    return requests


def talks(workload: Workload, *, marked: bool) -> list[SimulatedRequest]:
    """The conversations of `scripts.bench.routing`; each turn follows the answer before it.

    Returns the first turns, in their order; the others hang on them as `next`.
    """
    units = Units()
    firsts: list[SimulatedRequest] = []
    for system, questions in workload.scripts():
        following: SimulatedRequest | None = None
        for turn in range(len(questions), 0, -1):
            pieces, ends = list[object](), list[int]()
            for text in (system, *questions[:turn]):
                pieces += _cut(text)
                ends.append(len(pieces))
            following = SimulatedRequest(
                at=0.0,
                kind="sessions" if len(questions) > 1 else "singles",
                units=units.chain(pieces),
                unit_tokens=TENANT_UNIT,
                tokens=len(pieces) * TENANT_UNIT,
                output_tokens=1,
                ends=ends,
                marks=[0, len(ends) - 1] if marked else [],
                next=following,
            )
        assert following is not None
        firsts.append(following)
    return firsts


def _cut(text: str) -> list[str]:
    """A text in units; its last one counts as a whole one."""
    size = TENANT_UNIT * BYTES_PER_TOKEN
    return [text[start : start + size] for start in range(0, len(text), size)]
