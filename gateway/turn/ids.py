"""Random ids, from the kernel's entropy taken a page at a time.

Each call of the kernel gives up the interpreter's lock. Getting the lock back from another thread
takes longer than the rest of making an id.
"""

import os

_PAGE_BYTES = 4096


class Ids:
    """Makes ids.

    Not for keys or other secrets, because the next random bytes are kept in memory.
    """

    def __init__(self) -> None:
        self._page = b""
        self._at = 0

    def hex(self, num_bytes: int) -> str:
        """That many random bytes, at most a page of them, as hex digits."""
        end = self._at + num_bytes
        if end > len(self._page):
            self._page, self._at, end = os.urandom(_PAGE_BYTES), 0, num_bytes
        found = self._page[self._at : end]
        self._at = end
        return found.hex()
