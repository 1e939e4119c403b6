"""What one marker, or the header, asks for that is no exact answer."""

from typing import NamedTuple

from msgspec.structs import replace

from engine.protocol import DEFAULT_SCORER, Breakpoint, Document, Scorer


class ApproximateMark(NamedTuple):
    """A mark on a prefix whose reads need not be exact: a part of it is kept, or a sibling's entry
    is read in its place."""

    # The part of the prefix's tokens that is kept, and who chooses it.
    part: float | None
    scorer: Scorer = DEFAULT_SCORER
    # Whether a sibling model's entry may be read.
    sibling: bool = False

    def asked_at(self, point: Breakpoint) -> Breakpoint:
        # What a client says of a prefix is a mark, also where the gateway added the breakpoint.
        return replace(point, keep=self.part, scorer=self.scorer, sibling=self.sibling, hold=True)


Wish = ApproximateMark | Document
"""A document marks its block, and not the prompt up to its end. Its segment is not known yet."""
