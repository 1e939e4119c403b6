"""Parses a decoder's complaint. Its quotation may be as long as the body."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

_MARK = " - at `$"
_MAX_PATH = 256
"""Longer than any path of a request's own fields."""


def split_complaint(complaint: str) -> tuple[str, str]:
    """The reason and the path, such as `.messages[0].role`; "" is the whole body."""
    what, mark, path = complaint.rpartition(_MARK)
    if mark and path.endswith("`") and len(path) <= _MAX_PATH:
        return what, path[:-1]
    return complaint, ""


class Document:
    """An untyped body. Only the parts that are read are decoded."""

    def __init__(self, body: bytes) -> None:
        self._parts: dict[tuple[str | int, ...], dict[str, Raw] | list[Raw]] = {}
        self._whole = Raw(body)

    def at(self, steps: Sequence[str | int]) -> Any:
        """The text, number, true or false at a path.

        None for any other value, and if there is none.
        """
        raw: Raw | None = self._whole
        for depth, step in enumerate(steps):
            if raw is None:
                return None
            part = self._part(tuple(steps[:depth]), raw)
            if isinstance(part, dict) and isinstance(step, str):
                raw = part.get(step)
            elif isinstance(part, list) and isinstance(step, int) and step < len(part):
                raw = part[step]
            else:
                return None
        return None if raw is None else _decoded(raw, str | int | float | bool | None)

    def _part(self, place: tuple[str | int, ...], raw: Raw) -> dict[str, Raw] | list[Raw]:
        if place not in self._parts:
            self._parts[place] = _decoded(raw, dict[str, Raw] | list[Raw]) or []
        return self._parts[place]


def _decoded(raw: Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
