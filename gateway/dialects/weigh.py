"""Counts the JSON values of a body without decoding it.

A decoder makes an object of each value in one call that nothing can interrupt, so the number is
bounded before. Here a short piece of the body is looked at in each call, so other threads go on.
"""

from gateway.base.errors import TooLarge

_PIECE_BYTES = 1 << 18
_SMALL_BYTES = 1 << 16
"""The densest body of this size is decoded in a millisecond."""
_LEAST_BYTES = 2
"""The least bytes of a value and its separator."""


def check_values(body: bytes, most: int) -> None:
    """Raise TooLarge for more JSON values than `most`, keys not counted; linear in the body.

    Each value but the first comes behind a comma or a bracket that is in no string. Of bytes that
    are no JSON it may count anything up to the number of their commas and brackets.
    """
    if len(body) <= min(_LEAST_BYTES * most, _SMALL_BYTES):
        return
    found, is_inside, rest = 1, 0, b""
    for start in range(0, len(body), _PIECE_BYTES):
        piece = rest + body[start : start + _PIECE_BYTES]
        # A backslash escapes the next character.
        num_open = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        rest = piece[len(piece) - num_open :]
        piece = piece[: len(piece) - num_open]
        strings = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(strings[is_inside::2])
        found += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if found > most:
            raise TooLarge(f"the request body has more than {most} JSON values")
        is_inside = (is_inside + len(strings) - 1) % 2
