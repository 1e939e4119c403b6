"""How many blocks were newly asked for lately. Pure: time is handed in as a number."""

import math


class Demand:
    """A count of blocks in which older requests fade.

    A steady rate settles at the blocks that are asked for within `seconds`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._blocks = 0.0
        self._at = -math.inf

    def at(self, now: float) -> float:
        """The count. A `now` before the last one counts as the last one."""
        return self._blocks * math.exp(-max(now - self._at, 0.0) / self._seconds)

    def add(self, num_blocks: int, now: float) -> None:
        self._blocks = self.at(now) + num_blocks
        self._at = max(self._at, now)
