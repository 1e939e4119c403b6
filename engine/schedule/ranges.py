"""The computed positions of a prompt, each counted once."""


class Ranges:
    """Disjoint ranges of positions. They are added almost in order, so there are few at a time."""

    __slots__ = ("_ranges", "total")

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.total = 0

    def add(self, start: int, end: int) -> None:
        """Positions start, start + 1, … end - 1 were computed, for the first time or again."""
        kept: list[tuple[int, int]] = []
        for other_start, other_end in self._ranges:
            if other_end < start or other_start > end:
                kept.append((other_start, other_end))
            else:
                start, end = min(start, other_start), max(end, other_end)
        self._ranges = [*kept, (start, end)]
        self.total = sum(end - start for start, end in self._ranges)
