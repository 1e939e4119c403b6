"""Segments and the positions that a breakpoint looks back over."""

from typing import Literal

SegmentKind = Literal["tool", "text", "thinking", "tool_use", "tool_result"]
_RUNS: frozenset[SegmentKind] = frozenset({"tool_use", "tool_result"})


def is_one_position(kind: SegmentKind, following: SegmentKind, *, is_same_turn: bool) -> bool:
    """Whether two neighbouring segments are one position.

    A run of `tool_use` or of `tool_result` segments within one turn is one position. Every other
    segment is a position by itself.
    """
    return is_same_turn and kind == following and kind in _RUNS
