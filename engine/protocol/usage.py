"""The counts of a prompt's tokens: read, written, and plain input."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec

from engine.protocol.ttls import TTLS, Ttl, held_as

WRITE_FIELDS: dict[Ttl, str] = {ttl: f"cache_write_{ttl}_tokens" for ttl in TTLS}
"""The field of each TTL class's writes, wherever such tokens are counted."""
_writes_of = attrgetter(*WRITE_FIELDS.values())


class CacheUsage(msgspec.Struct, kw_only=True):
    """The tokens read from entries, and the tokens written to entries of each TTL class."""

    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_30m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    cache_write_12h_tokens: int = 0

    @property
    def writes(self) -> dict[Ttl, int]:
        return {ttl: getattr(self, name) for ttl, name in WRITE_FIELDS.items()}

    def writes_as(self, known: Sequence[Ttl]) -> dict[Ttl, int]:
        """All writes by the classes that an API knows, the shortest first.

        A write counts for the longest known class up to its own. A write of a shorter class than
        all of them counts for `known[0]`.
        """
        writes = dict.fromkeys(known, 0)
        for ttl, tokens in self.writes.items():
            held = held_as(ttl, known)
            writes[held if held in writes else known[0]] += tokens
        return writes

    @property
    def written_tokens(self) -> int:
        return sum(_writes_of(self))

    @property
    def write_premium(self) -> float:
        """The extra cost of writing over plain input, in input tokens."""
        return sum(tokens * (TTLS[ttl].write_multiple - 1) for ttl, tokens in self.writes.items())


class InputUsage(CacheUsage, kw_only=True):
    """The prompt's tokens by class. Input, read and written tokens add up to the prompt."""

    input_tokens: int = 0
    # Reused, but not billed as read. They are a part of the writes or of `input_tokens`.
    automatic_tokens: int = 0
    # The tokens that went through the model.
    computed_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.input_tokens + self.cache_read_tokens + self.written_tokens


def split_writes(marks: Iterable[tuple[int, Ttl]], read: int) -> dict[Ttl, int]:
    """The tokens that breakpoints write behind the first `read` tokens, by TTL class.

    `marks` are the breakpoints' ends, in tokens, with their TTLs. The longest TTL takes its tokens
    first ("Mixed TTL" of the public prompt-caching contract).
    """
    ends = list(marks)
    writes: dict[Ttl, int] = {}
    position = read
    for ttl in reversed(TTLS):
        end = max((end for end, end_ttl in ends if end_ttl == ttl), default=position)
        writes[ttl] = max(end - position, 0)
        position = max(end, position)
    return writes
