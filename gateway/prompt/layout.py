"""What every dialect makes of a request's content: a prompt, and a slot for each segment of it."""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.protocol import Prompt, Ttl
from gateway.base.errors import InvalidRequest

MAX_DEPTH = 64
INT_LIMIT = 2**63


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One segment's place in the request, and the marker on it.

    `is_absent`: the block is kept out of the prompt and makes no segment.
    """

    path: str
    marker: Ttl | None = None
    num_markers: int = 0
    can_carry: bool = True
    is_absent: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    prompt: Prompt
    slots: list[Slot]


def check_json(value: dict[str, Any], path: str) -> None:
    """Refuse what cannot cross to the engine: nesting beyond MAX_DEPTH, integers beyond 64 bits."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            for child in children:
                if isinstance(child, dict | list):
                    below.append(child)
                elif isinstance(child, int) and not -INT_LIMIT <= child < INT_LIMIT:
                    raise InvalidRequest(f"{path}: integers must fit in 64 bits")
        if not below:
            return
        level = below
    raise InvalidRequest(f"{path}: nested more than {MAX_DEPTH} levels deep")
