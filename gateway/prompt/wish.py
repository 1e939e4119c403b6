"""What one marker, or the header, asks for that is no exact answer."""

from typing import NamedTuple

from msgspec.structs import replace

from engine.protocol import DEFAULT_SCORER, Breakpoint, Document, Scorer


class Keep(NamedTuple):
    """What is kept of a marked prefix, and who chooses it, or that a sibling's entry may be read
    in its place."""

    part: float | None
    scorer: Scorer = DEFAULT_SCORER
    sibling: bool = False

    def asked_at(self, point: Breakpoint) -> Breakpoint:
        # What a client says of a prefix is a mark, also where the gateway added the breakpoint.
        return replace(point, keep=self.part, scorer=self.scorer, sibling=self.sibling, hold=True)


Wish = Keep | Document
"""A document marks its block, and not the prompt up to its end. Its segment is not known yet."""
