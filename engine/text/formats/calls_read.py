"""Deltas put together again: what a reader makes of them."""

import json
from collections.abc import Iterable
from typing import Any

from engine.protocol import Delta, ToolInputDelta, ToolUseStart


def calls_of(deltas: Iterable[Delta]) -> list[tuple[str, Any]]:
    """Names and inputs of all calls; an input that is not whole is None."""
    written: list[tuple[str, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, ToolUseStart):
            written.append((delta.name, []))
        elif isinstance(delta, ToolInputDelta):
            written[-1][1].append(delta.partial_json)
    return [(name, _json("".join(pieces))) for name, pieces in written]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
