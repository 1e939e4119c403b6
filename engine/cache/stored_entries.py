"""Entries of which the store has what nothing else has: an earlier epoch's, and damaged ones."""

from collections.abc import Sequence

from engine.cache.block import Block, Entry, Recorded
from engine.cache.entries import Entries
from engine.cache.store_files import BlockKey
from engine.cache.store_tier import StoreTier


class StoredEntries:
    def __init__(self, entries: Entries, store: StoreTier) -> None:
        self.entries = entries
        self._store = store
        store.on_displaced = self._displaced
        store.on_held = entries.lease_below

    def restore(self, entry: Entry, keys: Sequence[BlockKey]) -> bool:
        """Take in an entry of an earlier epoch whose files are all there.

        It is leased in the store if `is_leased` says so. False if the store has no room for it, or
        if an equal entry is there.
        """
        there = self.entries.get(entry.key)
        if there is not None or not self._store.restore(entry, keys):
            return False
        entry.blocks, entry.lease_tier = list(entry.stored or ()), "disk"
        entry.recorded = Recorded(entry.stored or [], entry.is_leased)
        self.entries.take_in(entry)
        return True

    def damaged(self, block: Block, now: float) -> None:
        """A file is not what it must be: end what stands on it.

        An entry whose content is still above only loses its copy, and gets another.
        """
        for entry in self._store.holds.of(block):
            if any(mine is block for mine in entry.blocks):
                self.entries.lifetimes.evicted(max(now - entry.ready_at, 0.0), 0.0)
                self.entries.end(entry, "damaged", "damaged")
            else:
                self.entries.lose_copy(entry, "damaged")
                self._store.end(entry)
                self._store.want(entry)
        self._store.forget(block)

    def _displaced(self, entry: Entry) -> None:
        """The store's hold of an entry makes way: one that is partly there alone ends."""
        if any(block.tier == "disk" for block in entry.blocks):
            self.entries.end(entry, "best_effort_evicted", "yielded")
        else:
            self.entries.lose_copy(entry, "yielded")
