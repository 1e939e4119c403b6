"""How many JSON values a body has, found without decoding it.

A decoder makes an object of each value in one call that nothing can interrupt, so the number is
bounded before. Every step here is over a short piece of the body, so that other threads go on.
"""

import re
from collections.abc import Iterator

from gateway.base.errors import TooLarge

_PIECE_BYTES = 1 << 18
_LEAST_BYTES = 2
"""Of a value and what parts it from the next one."""
_STRUCTURE = (b",", b"[", b"{")
# Quotes inside a string are escaped, so these bytes are a key and its text, or a text of one colon.
_CERTAIN = b'":"'
# What a string may go on with, a piece of it at a time.
_INSIDE = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,64}+', re.DOTALL)


def check_values(body: bytes, most: int) -> None:
    """Raise TooLarge for more JSON values than `most`, keys not counted; linear in the body.

    Of bytes that are no JSON it may count anything up to the number of their commas and brackets.
    """
    if len(body) <= _LEAST_BYTES * most:
        return
    # Each value but the first comes behind a comma or a bracket, some of which are in strings.
    if _sum(body, _STRUCTURE) + 1 <= most:
        return
    if _sum(body, (_CERTAIN,)) > most or _has_more(body, most):
        raise TooLarge(f"the request body has more than {most} JSON values")


def _sum(body: bytes, wanted: tuple[bytes, ...]) -> int:
    return sum(
        body.count(one, start, start + _PIECE_BYTES)
        for start in range(0, len(body), _PIECE_BYTES)
        for one in wanted
    )


def _has_more(body: bytes, most: int) -> bool:
    found = 1
    for start, end in _outside_strings(body):
        found += sum(body.count(one, start, end) for one in _STRUCTURE)
        if found > most:
            return True
    return False


def _outside_strings(body: bytes) -> Iterator[tuple[int, int]]:
    """The pieces of the body that are outside its strings."""
    at = 0
    while at < len(body):
        end = min(at + _PIECE_BYTES, len(body))
        quote = body.find(b'"', at, end)
        yield at, end if quote < 0 else quote
        at = end if quote < 0 else _behind_string(body, quote + 1)


def _behind_string(body: bytes, at: int) -> int:
    while at < len(body) and body[at] != ord('"'):
        match = _INSIDE.match(body, at)
        assert match is not None
        # A backslash that ends the body goes on with nothing.
        at = max(match.end(), at + 1)
    return at + 1
