"""Entries over memory that nobody holds: kept and found as everywhere, and never leased.

A server that is not ours evicts when it wants and tells nobody. So an entry here says what a scope
has sent, and the server's own count of reused tokens decides what was read. An entry of which less
was reused than it has is over: its content was evicted, and the request writes it anew.
"""

from engine.backends.external import MirrorCache, MirrorPool
from engine.cache.block import Entry
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, Found
from engine.cache.table import BlockTable


class UnheldEntries(Entries):
    """Entries without a lease: `no_hold`."""

    def __init__(self, pool: MirrorPool, *, ttl_scale: float, grace_seconds: float) -> None:
        super().__init__(
            pool,
            lease_share=0.0,
            scope_lease_share=0.0,
            idle_lease_share=0.0,
            ttl_scale=ttl_scale,
            grace_seconds=grace_seconds,
        )

    def lose(self, entry: Entry) -> None:
        """Its content, or a part of it, is not in the server's memory any more."""
        if self.get(entry.key) is entry:
            self.end(entry, entry.why_broken)
            entry.is_broken = True

    def _try_lease(self, entry: Entry) -> bool:
        entry.why_unleased = "no_hold"
        return False


class UpstreamCache(MirrorCache):
    """`is_isolated`: no scope's prompt reuses what another scope sent.

    Where it is not, reuse beyond a scope's own entries is not told: it would tell of others.
    """

    entries: UnheldEntries

    def __init__(
        self, pool: MirrorPool, entries: UnheldEntries, hasher: ChainHasher, *, is_isolated: bool
    ) -> None:
        super().__init__(pool, entries, hasher)
        self._is_isolated = is_isolated

    def admit(self, query: CacheQuery, found: Found, table: BlockTable, reused: int | None) -> None:
        """The prompt is computed: `reused` of its tokens came from memory; None: not told."""
        self._check_hit(query, found, reused)
        found.reused = found.read if reused is None or not self._is_isolated else reused
        found.raced = min(found.raced, found.reused)
        self._unwritten = set()
        try:
            table.blocks = self.pool.mirror(query.digests)
        except NoFreeBlocks:
            # Waiting requests hold all of the books: this prompt is not written down.
            self._unwritten = {mark.segment for mark in found.marks}
            found.marks = []
            return
        table.num_tokens = len(query.tokens)

    def _check_hit(self, query: CacheQuery, found: Found, reused: int | None) -> None:
        hit, found.read = found.hit, 0
        if hit is None:
            return
        size = self.pool.block_size
        usable = (len(query.tokens) - 1) // size * size
        found.read = min(hit.tokens, reused or 0)
        if reused is None:
            found.hit, found.miss_reason = None, "not_told"
        elif found.read < min(hit.tokens, usable):
            self.entries.lose(hit)
            found.miss_reason = "best_effort_evicted"
            if not found.read:
                found.hit = None

    def _was_overtaken(self, query: CacheQuery, found: Found, now: float) -> bool:
        return found.miss_reason != "not_told" and super()._was_overtaken(query, found, now)
