"""Where a request's segments stand, and the markers on them."""

import msgspec

from engine.protocol import Ttl
from gateway.base.errors import InvalidRequest
from gateway.prompt.wish import Wish


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One segment's place in the request, and the marker on it."""

    path: str
    marker: Ttl | None = None
    num_markers: int = 0
    can_carry: bool = True
    # The block is kept out of the prompt and makes no segment.
    is_absent: bool = False
    # What else than an exact answer the marker asks for.
    approximate: Wish | None = None


class MarkersBroken(InvalidRequest):
    """There are too many markers, or they stand in a wrong order."""
