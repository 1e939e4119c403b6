"""The classes of lifetimes that a client may ask for."""

from collections.abc import Collection
from typing import Literal, NamedTuple

Ttl = Literal["5m", "30m", "1h", "12h"]


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
    "12h": TtlClass(43_200, 2.0, "12 hours"),
}
"""The classes of lifetimes, the shortest first.

The multiples of 5m and 1h are Anthropic's, that of 30m is OpenAI's. OpenAI's table of prices does
not name one for 12h; LiteLLM's has 2 for it (§6 of the public prompt-caching contract). Less would
be wrong: a longer lease must not cost less than one of an hour.

A new class also needs its own usage field (`CacheUsage`), column and revision (`gateway/ledger/
schema.py`, `migrations/`), version of the checksum (`gateway/ledger/checksums.py`), journal FORMAT,
colour in charts, and state of before in `tests/upgrades`. `python -m scripts.docs.monitoring` and
`scripts.docs.settings` write the rest.
"""

LONGEST_SECONDS = max(ttl.seconds for ttl in TTLS.values())
"""No entry lives longer than this after its last use, but for one that a breakpoint with `seconds`
holds."""

FIRST_TTLS: tuple[Ttl, ...] = ("5m", "30m", "1h")
"""The classes of an engine whose description names none: it is of before the field."""


def outlives(ttl: Ttl, shorter: Ttl) -> bool:
    return TTLS[ttl].seconds > TTLS[shorter].seconds


def held_as(ttl: Ttl, known: Collection[str]) -> Ttl:
    """The class as which an engine that has these classes holds a breakpoint: the longest of them
    that is no longer than what was asked for. Without any it is the shortest of all."""
    if ttl in known:
        return ttl
    shorter = [name for name in TTLS if name in known and not outlives(name, ttl)]
    return shorter[-1] if shorter else next(iter(TTLS))
