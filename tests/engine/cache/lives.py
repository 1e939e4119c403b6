"""What the world knows of sequences and entries, apart from what the cache believes."""

from dataclasses import dataclass, field

from engine.cache.prefix_cache import CacheQuery, Found
from engine.cache.table import BlockTable
from engine.protocol import Ttl

Prefix = tuple[str, tuple[int, ...]]
"""A scope and the tokens from the start: what an entry is about."""


@dataclass(eq=False)
class Life:
    """One sequence as the scheduler would see it."""

    query: CacheQuery
    table: BlockTable
    tokens: list[int]
    found: Found | None
    is_running: bool = False
    is_started: bool = False
    computed: set[int] = field(default_factory=set)
    """The positions whose KV was computed before the response began."""

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.table.num_tokens


@dataclass
class Expected:
    """What is known of an entry from the outside."""

    ttl: Ttl
    expires_at: float
    ready_at: float
    is_promised: bool
    used_at: float = 0.0
