"""Counts the JSON values of a body, and the keys of its objects, without decoding it.

A decoder makes an object of each value in one call that nothing can interrupt, so the number is
bounded before. An object of very many keys is slow to make and to read, so the number of its keys
is bounded too. Here a short piece of the body is looked at in each call, so other threads go on.
"""

import re
from collections.abc import Iterator
from typing import NoReturn

from gateway.base.errors import TooLarge

_PIECE_BYTES = 1 << 16
_SMALL_BYTES = 1 << 16
"""The densest body of this size is decoded in a millisecond."""
_LEAST_BYTES = 2
"""The least bytes of a value and its separator."""
_LEAST_KEY_BYTES = 5
"""The least bytes of a key and its value."""
_OPENED, _COLON = b"{:"
_MAX_PASSES, _FEW_KEYS = 4, 4
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'{}[:,"')
_CLOSED = re.compile(rb"\{:*+\}")
"""An object without objects in it, as its marks alone."""


def check_values(body: bytes, most: int, most_keys: int) -> None:
    """Raise TooLarge for more JSON values than `most`, keys not counted; linear in the body.

    The same for an object of more keys than `most_keys`. Each value but the first comes behind a
    comma or a bracket that is in no string. Of bytes that are no JSON it may count anything up to
    the number of their commas, colons and brackets.
    """
    if len(body) <= min(_LEAST_BYTES * most, _LEAST_KEY_BYTES * most_keys, _SMALL_BYTES):
        return
    pieces: list[bytes] = []
    found = 1
    for marks in _marks(body):
        found += sum(map(marks.count, (b",", b"[", b"{")))
        if found > most:
            raise TooLarge(f"the request body has more than {most} JSON values")
        pieces.append(marks)
    if sum(piece.count(b":") for piece in pieces) > most_keys:
        keys = _Keys(most_keys)
        for piece in pieces:
            keys.take(piece.translate(None, b",["))


def check_keys(body: bytes, most_keys: int) -> None:
    """`check_values` of the keys alone, for JSON that stands in a string of the body."""
    check_values(body, len(body) + 1, most_keys)


class _Keys:
    """Counts the keys of the objects that are open."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._too_many = b":" * (most + 1)
        self._small = [b"{" + b":" * keys + b"}" for keys in range(min(most, _FEW_KEYS) + 1)]
        self._open = [0]

    def take(self, marks: bytes) -> None:
        """`marks` are the next colons and braces of the body that are in no string.

        Most objects begin and end in one piece with few in them: they are taken out together. The
        marks that are left are counted one by one.
        """
        for _ in range(_MAX_PASSES):
            before = len(marks)
            for closed in self._small:
                marks = marks.replace(closed, b"")
            if self._too_many in marks:
                self._refuse()
            marks = _CLOSED.sub(b"", marks)
            if len(marks) == before:
                break
        counts = self._open
        for mark in marks:
            if mark == _COLON:
                counts[-1] += 1
                if counts[-1] > self._most:
                    self._refuse()
            elif mark == _OPENED:
                counts.append(0)
            elif len(counts) > 1:
                counts.pop()

    def _refuse(self) -> NoReturn:
        raise TooLarge(f"an object of the request body has more than {self._most} keys")


def _marks(body: bytes) -> Iterator[bytes]:
    """The commas, colons, braces and opening brackets that are in no string, a piece at a time."""
    is_inside, rest = 0, b""
    for start in range(0, len(body), _PIECE_BYTES):
        piece = rest + body[start : start + _PIECE_BYTES]
        # A backslash escapes the next character.
        num_open = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        rest = piece[len(piece) - num_open :]
        piece = piece[: len(piece) - num_open]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Two quotes side by side change nothing for what stands around them.
        strings = piece.translate(None, _NO_MARKS).replace(b'""', b"").split(b'"')
        yield b"".join(strings[is_inside::2])
        is_inside = (is_inside + len(strings) - 1) % 2
