"""Where a stream is cut in two by the tests: everywhere, or at each commit at fewer places."""

import os

EVERY = int(os.environ.get("CUT_EVERY", "6"))
"""1 for every byte (`scripts/long_tests cuts`)."""
_NEAR = 2


def places(raw: bytes) -> list[int]:
    """Each end of a line, each character of several bytes, and every EVERY-th byte between them."""
    special = {
        at + offset
        for at, byte in enumerate(raw)
        if byte == 0x0A or byte >= 0x80
        for offset in range(_NEAR + 1)
    }
    return [at for at in range(1, len(raw)) if at in special or at % EVERY == 0]
