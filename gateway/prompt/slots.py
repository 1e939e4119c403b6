"""Where a request's content blocks stand, and the markers on them."""

import msgspec

from engine.protocol import Ttl
from gateway.base.errors import InvalidRequest
from gateway.prompt.wish import Wish


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One content block's place in the request, and the marker on it."""

    path: str
    # The TTL of the marker; None where the block has none.
    marker: Ttl | None = None
    num_markers: int = 0
    # Whether a marker may stand here.
    can_carry: bool = True
    # Whether the block is left out of the prompt and makes no segment.
    is_absent: bool = False
    # The approximation that the marker asks for.
    approximate: Wish | None = None


class MarkersBroken(InvalidRequest):
    """There are too many markers, or they stand in the wrong order."""
