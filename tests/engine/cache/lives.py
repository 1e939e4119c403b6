"""What the world knows of sequences and entries, apart from what the cache believes.

Whose lease may end for whose is counted from the entries alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.cache.digests import ChainKind
from engine.cache.prefix_cache import CacheQuery, Lookup
from engine.cache.table import BlockTable
from engine.cache.worth import AnswerEnd
from engine.protocol import Ttl

if TYPE_CHECKING:
    from tests.engine.cache.world import World

Prefix = tuple[str, tuple[int, ...]]
"""A scope and what is kept from the start: what an entry is about."""


def kept_of(tokens: Sequence[int], adapter: ChainKind | None) -> list[int]:
    """What memory keeps of tokens: each alone, or with the adapter that acts on it."""
    if adapter is None:
        return list(tokens)
    number = 10_000 * int(adapter.digest, 16)
    return [token + number * (place >= adapter.start) for place, token in enumerate(tokens)]


@dataclass(eq=False)
class Life:
    """One sequence as the scheduler would see it."""

    query: CacheQuery
    table: BlockTable
    tokens: list[int]
    found: Lookup | None
    is_running: bool = False
    is_started: bool = False
    # How its answer ends.
    end: AnswerEnd = "end_turn"
    computed: set[int] = field(default_factory=set)
    """The positions whose KV was computed before the response began."""

    @property
    def kept(self) -> list[int]:
        return kept_of(self.tokens, self.query.digests.kind)

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


def leased_blocks(world: "World") -> dict[str, int]:
    """What each scope's leases hold, counted from the entries. Forgets leases that ended."""
    world.entries.leases.take_ended()
    blocks_by_scope: dict[str, set[int]] = {}
    for entry in world.entries.live():
        if entry.is_leased and entry.lease_tier == "device":
            blocks_by_scope.setdefault(entry.scope, set()).update(b.block_id for b in entry.blocks)
    return {scope: len(blocks) for scope, blocks in blocks_by_scope.items()}


def note_yielded(world: "World", scope: str, before: dict[str, int]) -> None:
    """Only scopes above their share yield, only for another's lease, soonest expiry first."""
    budget = int(world.num_blocks * world.lease_share)
    shares = {name: int(budget * share) for name, share in world.used_shares.items()}
    ended = [end.entry for end in world.entries.leases.take_ended() if end.reason == "yielded"]
    leased_entries = [e for e in world.entries.live() if e.is_leased and e.lease_tier == "device"]
    for entry in ended:
        assert entry.stored is None, "it could have moved down"
        assert entry.scope != scope and before[entry.scope] > shares[entry.scope]
        assert all(
            e.expires_at >= entry.expires_at for e in leased_entries if e.scope == entry.scope
        )
        world.expected[world.meaning[entry.key]].is_promised = False
    assert not ended or any(entry.scope == scope for entry in leased_entries), "yielded in vain"


def note_new_leases(world: "World") -> None:
    for entry in world.entries.live():
        if entry.is_leased:
            world.expected[world.meaning[entry.key]].is_promised = True
