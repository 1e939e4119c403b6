"""What other engines' members of a shared store have: entries that this engine may read from there.

A fourth pool of blocks. A block here is another member's file, which that member alone writes and
deletes. Nothing here is leased, since nothing here holds it: an entry is best-effort until a read
has brought it to the device. A file that is gone is a miss, as everywhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.cache.block import Block, Entry
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.cache.store_files import BlockKey
from engine.cache.store_tier import StoreTier
from engine.protocol import HeldName

KnownAbove = Callable[[BlockKey], bool]


class PeerTier(StoreTier):
    """Finds and reads other members' files. It writes and deletes none.

    When a pool above reuses a block, this tier takes over the block's names if it has the content.
    """

    def take_over_keys(self, keys: Iterable[BlockKey]) -> list[Block] | None:
        """Blocks for these files, each with a reference. None where there is no room."""
        blocks: list[Block] = []
        for key in keys:
            block = self.files.block_of(key.name)
            if block is not None:
                self.pool.acquire(block)
            else:
                try:
                    block = self._new_block(key)
                except NoFreeBlocks:
                    self.pool.release_chain(blocks)
                    return None
            blocks.append(block)
        return blocks

    def has_room(self, keys: Sequence[BlockKey]) -> bool:
        """Whether these files fit without another file making way here."""
        return sum(self.files.block_of(key.name) is None for key in keys) <= self.pool.num_empty

    def tell(self, names: Mapping[str, int]) -> None:
        """These names can be read from here now."""
        self.pool.changes.moved("disk", names)

    def _take_over(self, block: Block) -> bool:
        """Keep the names of what a pool above reuses. False where something of it is lost."""
        found = self.pool.find(block.digest, bytes(block.tokens)) if block.digest else None
        if found is not None and block.names:
            found.names.update(block.names)
            self.tell(block.names)
            block.names.clear()
        return not block.dependents and not block.names


class PeerEntries:
    """The entries that other members have, as far as this engine has them nowhere above."""

    def __init__(self, entries: Entries, tier: PeerTier, above: Sequence[BlockPool]) -> None:
        self._entries = entries
        self._tier = tier
        self._above = above

    def take_in(
        self, entry: Entry, keys: Sequence[BlockKey], names: Mapping[int, Sequence[HeldName]]
    ) -> bool:
        """Take in another member's entry, or a later expiry of it.

        False if this engine has an equal one of its own, or there is no room.
        """
        there = self._entries.get(entry.key)
        if there is not None:
            if not self._is_idle_here(there) or there.expires_at >= entry.expires_at:
                return False
            self._entries.end(there, "ttl_expired")
        blocks = self._tier.take_over_keys(keys)
        if blocks is None:
            return False
        entry.blocks = blocks
        self._entries.take_in(entry)
        for index, found in names.items():
            if 0 <= index < len(keys) and not self._is_above(keys[index]):
                blocks[index].names.update({one.digest: one.tokens for one in found})
                self._tier.tell(blocks[index].names)
        self._tier.pool.release_chain(blocks)
        return True

    def has(self, key: Digest) -> bool:
        """Whether this engine has the entry, anywhere."""
        return self._entries.get(key) is not None

    def ended(self, key: Digest) -> None:
        """The other member has it no more. What this engine has above is its own."""
        entry = self._entries.get(key)
        if entry is not None and self._is_idle_here(entry):
            self._entries.end(entry, "ttl_expired")

    def lost(self, name: str) -> None:
        """A file is not there, or not what it must be: what stands on it ends."""
        self._tier.reads.forget(name)
        block = self._tier.files.block_of(name)
        if block is None:
            return
        for entry in list(block.dependents):
            self._entries.end(entry, "damaged")
        self._tier.forget(block)

    def sweep(self) -> None:
        """End the entries whose blocks made way for others here."""
        for entry in self._tier.pool.take_broken():
            if self._entries.get(entry.key) is entry:
                self._entries.end(entry, entry.why_broken)
        self._tier.take_deletes()

    def _is_idle_here(self, entry: Entry) -> bool:
        """Whether it is only another member's, and no request is reading it."""
        is_theirs = any(block.home is self._tier.pool for block in entry.blocks)
        return is_theirs and not entry.is_leased and not entry.refreshed_until

    def _is_above(self, key: BlockKey) -> bool:
        return any(pool.find(key.digest, key.packed) is not None for pool in self._above)
