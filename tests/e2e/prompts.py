"""Prompts of a given length that no other test has sent."""

import struct
import zlib
from itertools import count

MODEL = "holdfast-demo"
_numbers = count()


def handbook(num_rules: int) -> str:
    """About 21 tokens a rule; different on every call, in each of its sentences."""
    edition = next(_numbers)
    forms = ((i * 7 + edition * 131) % 1000 for i in range(num_rules))
    rules = (
        f"Rule {i}: the staff must file form {form} before noon." for i, form in enumerate(forms)
    )
    return f"Handbook, edition {edition}. " + " ".join(rules)


def png(width: int = 112, height: int = 84, *, first: int = 0, shade: int = 90) -> bytes:
    """One shade of grey, but for the first pixel."""
    line = bytes([0]) + bytes([shade]) * 3 * width
    rows = bytearray(line * height)
    rows[1] = first

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(rows)))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")
