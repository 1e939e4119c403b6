"""Bytes that were a request body, before something happened to them."""

import random


def mutant(seed: random.Random, valid: bytes) -> bytes:
    """One to four random edits: flip, drop, repeat, insert or cut."""
    damaged = bytearray(valid)
    for _ in range(seed.randint(1, 4)):
        at = seed.randrange(len(damaged)) if damaged else 0
        match seed.randrange(6):
            case 0 if damaged:
                damaged[at] = seed.randrange(256)
            case 1:
                del damaged[at : at + seed.randint(1, 20)]
            case 2:
                damaged[at:at] = damaged[at : at + seed.randint(1, 40)]
            case 3:
                damaged[at:at] = seed.choice([b"\xff", b"\\ud800", b"\x00", b"1e999", b"[" * 200])
            case 4:
                damaged = damaged[:at]
            case _:
                damaged[at:at] = bytes(seed.randrange(256) for _ in range(4))
    return bytes(damaged)
