"""What a marker, or the header, may ask for besides an exact answer."""

from typing import NamedTuple

from msgspec.structs import replace

from engine.protocol import DEFAULT_SCORER, Breakpoint, Document, Scorer


class ApproximateMark(NamedTuple):
    """A mark on a prefix whose reads need not be exact.

    Either a part of the prefix is kept, or a sibling's entry may be read in its place.
    """

    # The part of the prefix's tokens that is kept, and who chooses it.
    part: float | None
    scorer: Scorer = DEFAULT_SCORER
    # Whether a sibling model's entry may be read.
    sibling: bool = False

    def on(self, point: Breakpoint) -> Breakpoint:
        """The breakpoint with this mark. It is held: the client asked for it, even where the
        gateway added the breakpoint."""
        return replace(point, keep=self.part, scorer=self.scorer, sibling=self.sibling, hold=True)


Wish = ApproximateMark | Document
"""A document marks its own block alone, not the prefix up to its end. Its segment is set later."""
