"""Counts the JSON values of a body, and the keys of its objects, without decoding it.

A decoder makes an object of each value in one call that nothing can interrupt, so the number is
bounded before. An object of very many keys is slow to make and to read, so the number of its keys
is bounded too. Here a short piece of the body is looked at in each call, so other threads go on.
"""

import re
from collections.abc import Iterator

from gateway.base.errors import TooLarge

_PIECE_BYTES = 1 << 18
_COUNTED_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16
"""The densest body of this size is decoded in a millisecond."""
_LEAST_BYTES = 2
"""The least bytes of a value and its separator."""
_LEAST_KEY_BYTES = 5
"""The least bytes of a key and its value."""
_MARKS = re.compile(rb"[{}:]")


def check_values(body: bytes, most: int, most_keys: int) -> None:
    """Raise TooLarge for more JSON values than `most`, keys not counted; linear in the body.

    The same for an object of more keys than `most_keys`. Each value but the first comes behind a
    comma or a bracket that is in no string. Of bytes that are no JSON it may count anything up to
    the number of their commas, colons and brackets.
    """
    if len(body) <= min(_LEAST_BYTES * most, _LEAST_KEY_BYTES * most_keys, _SMALL_BYTES):
        return
    if 1 + _count(body, b",[{") <= most and _count(body, b":") <= most_keys:
        return
    found, keys = 1, _Keys(most_keys)
    for outside in _outside_strings(body):
        found += _count(outside, b",[{")
        if found > most:
            raise TooLarge(f"the request body has more than {most} JSON values")
        keys.take(outside)


def check_keys(body: bytes, most_keys: int) -> None:
    """`check_values` of the keys alone, for JSON that stands in a string of the body."""
    check_values(body, len(body) + 1, most_keys)


class _Keys:
    """Counts the keys of the objects that are open."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = [0]

    def take(self, outside: bytes) -> None:
        """`outside` are the next bytes of the body that are in no string."""
        counts = self._open
        for mark in _MARKS.findall(outside):
            if mark == b":":
                counts[-1] += 1
                if counts[-1] > self._most:
                    raise TooLarge(f"an object of the request body has more than {self._most} keys")
            elif mark == b"{":
                counts.append(0)
            elif len(counts) > 1:
                counts.pop()


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The body without its strings, a piece at a time."""
    is_inside, rest = 0, b""
    for start in range(0, len(body), _PIECE_BYTES):
        piece = rest + body[start : start + _PIECE_BYTES]
        # A backslash escapes the next character.
        num_open = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        rest = piece[len(piece) - num_open :]
        piece = piece[: len(piece) - num_open]
        strings = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(strings[is_inside::2])
        is_inside = (is_inside + len(strings) - 1) % 2


def _count(body: bytes, marks: bytes) -> int:
    """How often these bytes are there, in strings or not; a piece at a time."""
    return sum(
        body.count(mark, start, start + _COUNTED_BYTES)
        for start in range(0, len(body), _COUNTED_BYTES)
        for mark in marks
    )
