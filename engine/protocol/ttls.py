"""The classes of lifetimes that a client may ask for."""

from collections.abc import Collection
from typing import Literal, NamedTuple

Ttl = Literal["5m", "30m", "1h", "12h"]


class TtlClass(NamedTuple):
    """How long an entry of this class lives, and what writing it costs."""

    seconds: int
    # The cost of a written token, in input tokens, if no price sets another one.
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
not name one for 12h; LiteLLM's has 2 for it (§6 of the public prompt-caching contract). A longer
class must not cost less than a shorter one.

A new class also needs:

- its own usage field (`CacheUsage`)
- who may ask for it: `AnthropicTtl` or `CacheTtl` (`gateway/dialects/anthropic/request.py`), and
  `AutoCacheTtl` (`gateway/structs/fleet.py`)
- its place in that API's answers: `CacheCreation` (`gateway/dialects/anthropic/response.py`) or
  `WriteDetails` (`gateway/dialects/openai/response.py`)
- a column and the next REVISION (`gateway/ledger/schema.py`), and that revision (`migrations/`).
  Its downgrade gives the class's tokens and names to the next shorter class, as `class_of` does,
  also in `auto_cache_ttl` of workspaces and keys if these may have the class. It forgets checksums
  from the new version of the checksum on (as 0011 does)
- that version of the checksum (`gateway/ledger/checksums.py`), and the next journal FORMAT
  (`gateway/journal/versions.py`)
- a colour in charts (`dashboard/ui/charts.py`) and in the playground (`dashboard/views/
  playground.py`), which offers the class where `dashboard/prompt.py` lists it
- its prices where they differ (`price_sheets.toml`)
- a state of before in `tests/upgrades` (`make.py`), and its place in the tests that list classes:
  `grep -rn 12h tests`
- the words of README, CHANGELOG, `engine/PROTOCOL.md`, `gateway/README.md` and
  `gateway/base/settings.py`

`python -m scripts.docs.monitoring` and `scripts.docs.settings` write the generated pages.
"""

LONGEST_SECONDS = max(ttl.seconds for ttl in TTLS.values())
"""The longest life of an entry after its last use. A breakpoint's `seconds` may set a longer
one."""

FIRST_TTLS: tuple[Ttl, ...] = ("5m", "30m", "1h")
"""The classes of an engine whose description is older than the field `ttls`."""


def outlives(ttl: Ttl, shorter: Ttl) -> bool:
    """Whether entries of the first class live longer than those of the second."""
    return TTLS[ttl].seconds > TTLS[shorter].seconds


_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 86_400}


def class_of(name: str) -> Ttl:
    """The class for a recorded name, such as that of a row in the ledger.

    A later version may have recorded a class that this one lacks. Such a name stands for the
    longest known class up to its length, as after that version's downgrade. A name that is no
    length, such as `7x`, stands for the shortest class.
    """
    number = name[:-1]
    unit_seconds = _UNIT_SECONDS.get(name[-1:], 0)
    seconds = int(number) * unit_seconds if number.isdecimal() else 0
    shorter = [ttl for ttl, kind in TTLS.items() if kind.seconds <= seconds]
    return shorter[-1] if shorter else next(iter(TTLS))


def held_as(ttl: Ttl, known: Collection[str]) -> Ttl:
    """The class by which an engine that has the `known` classes holds a breakpoint.

    It is the longest of them up to the wanted class. Without one it is the shortest of all classes.
    """
    if ttl in known:
        return ttl
    shorter = [name for name in TTLS if name in known and not outlives(name, ttl)]
    return shorter[-1] if shorter else next(iter(TTLS))
