"""The classes of lifetimes that a client may ask for."""

from typing import Literal, NamedTuple

Ttl = Literal["5m", "30m", "1h"]


class TtlClass(NamedTuple):
    """How long an entry of this class lives, and what writing it costs."""

    seconds: int
    # What a token that is written costs, in input tokens, unless a price says otherwise.
    write_multiple: float
    # The TTL in words, for people.
    words: str


TTLS: dict[Ttl, TtlClass] = {
    "5m": TtlClass(300, 1.25, "5 minutes"),
    "30m": TtlClass(1800, 1.25, "30 minutes"),
    "1h": TtlClass(3600, 2.0, "1 hour"),
}
"""The classes of lifetimes, the shortest first."""


def outlives(ttl: Ttl, shorter: Ttl) -> bool:
    return TTLS[ttl].seconds > TTLS[shorter].seconds
