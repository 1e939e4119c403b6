"""The books of a server that evicts when it wants and tells nobody.

An entry is never leased: it says what a scope has sent, and the server's own count of reused tokens
decides what was read.
"""

from engine.backends.external import MirrorCache, MirrorPool
from engine.cache.block import Entry
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, Lookup
from engine.cache.table import BlockTable


class UnheldEntries(Entries):
    """Entries without a lease: `no_hold`."""

    def lose(self, entry: Entry) -> None:
        """The entry's content is not whole in the server's memory any more."""
        if self.get(entry.key) is entry:
            self.end(entry, entry.why_broken)
            entry.is_broken = True

    def _try_lease(self, entry: Entry) -> bool:
        entry.why_unleased = "no_hold"
        return False


class UpstreamCache(MirrorCache):
    """The cache over such a server.

    `is_isolated` says that no scope's prompt reuses what another scope sent. If that is not sure,
    reuse beyond a scope's own entries is not told, because it would tell of other scopes.
    """

    entries: UnheldEntries

    def __init__(
        self, pool: MirrorPool, entries: UnheldEntries, hasher: ChainHasher, *, is_isolated: bool
    ) -> None:
        super().__init__(pool, entries, hasher)
        self._is_isolated = is_isolated

    def admit(
        self, query: CacheQuery, lookup: Lookup, table: BlockTable, reused: int | None
    ) -> None:
        """The prompt is computed: `reused` of its tokens came from memory; None: not told."""
        is_whole = self._settle(query, lookup, reused or 0)
        hit = lookup.hit
        if not self._is_isolated:
            lookup.raced = min(lookup.raced, lookup.read)
            lookup.reused = lookup.read
        if hit is not None and reused is None:
            lookup.hit = None
            lookup.miss_reason = "not_told"
            lookup.missed |= {mark.segment: "not_told" for mark in lookup.marks}
        elif hit is not None and not is_whole:
            self.entries.lose(hit)
            lookup.miss_reason = "best_effort_evicted"
            self._lost(lookup)
            if not lookup.read:
                lookup.hit = None
        self._unwritten = set()
        try:
            self._mirror(query, table)
        except NoFreeBlocks:
            # Waiting requests have all blocks of the books: this prompt is not written down.
            self._unwritten = {mark.segment for mark in lookup.marks}
            lookup.marks = []
