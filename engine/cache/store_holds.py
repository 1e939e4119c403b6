"""The store's holds: which entries' whole copies it keeps, and whose makes way for whose.

A hold is one lease reference on each block of an entry's copy. Where a new hold does not fit, holds
of the scope that holds the most make way, those of best-effort entries first, then the soonest
expiry. No scope takes from one that then holds less than itself.
"""

from collections.abc import Iterable

from engine.cache.block import Block, Entry
from engine.cache.order import EntryOrder, Key
from engine.cache.pool import BlockPool


class StoreHolds:
    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self.max_blocks = max_blocks
        self._by_scope: dict[str, dict[Entry, None]] = {}
        self._orders: dict[str, EntryOrder] = {}
        self._num_blocks: dict[str, int] = {}
        self._by_block: dict[Block, dict[Entry, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_scope.values()))

    def entries(self) -> list[Entry]:
        return [entry for entries in self._by_scope.values() for entry in entries]

    def of(self, block: Block) -> list[Entry]:
        """The entries whose copies have this block."""
        return list(self._by_block.get(block, ()))

    def room_for(self, scope: str, num_new: int) -> list[Entry] | None:
        """The entries whose holds must make way for `num_new` blocks, None if there is no room."""
        doomed: dict[Entry, None] = {}
        excess = self._pool.num_leased + num_new - self.max_blocks
        if excess <= 0:
            return []
        largest = max(self._num_blocks, key=lambda name: self._num_blocks[name], default=scope)
        spare = self._num_blocks.get(largest, 0) - self._num_blocks.get(scope, 0) - num_new
        if largest == scope or spare < 0:
            return None
        order = self._orders[largest]
        while excess > 0 and (entry := order.pop()) is not None:
            if entry not in doomed:
                doomed[entry] = None
                excess -= len(entry.stored or ())
        for entry in doomed:
            order.push(entry)
        return list(doomed) if excess <= 0 else None

    def changed(self, entry: Entry) -> None:
        """An entry's expiry or lease has changed."""
        if entry.stored is not None:
            self._orders[entry.scope].push(entry)

    def add(self, entry: Entry, blocks: list[Block]) -> None:
        new = self._pool.num_unleased(blocks)
        self._pool.lease(blocks)
        entry.stored = blocks
        self._by_scope.setdefault(entry.scope, {})[entry] = None
        self._orders.setdefault(entry.scope, EntryOrder(_turn_to_go)).push(entry)
        self._num_blocks[entry.scope] = self._num_blocks.get(entry.scope, 0) + new
        for block in blocks:
            self._by_block.setdefault(block, {})[entry] = None

    def end(self, entry: Entry) -> list[str]:
        """End an entry's hold. Return the names that no hold keeps any more."""
        blocks, entry.stored = entry.stored, None
        assert blocks is not None
        for block in blocks:
            holders = self._by_block[block]
            del holders[entry]
            if not holders:
                del self._by_block[block]
        before = self._pool.num_leased
        names = self._pool.end_lease(blocks)
        self._num_blocks[entry.scope] -= before - self._pool.num_leased
        del self._by_scope[entry.scope][entry]
        if not self._by_scope[entry.scope]:
            del self._by_scope[entry.scope], self._num_blocks[entry.scope]
            del self._orders[entry.scope]
        return names

    def check(self, blocks: Iterable[Block]) -> None:
        """Prove that holds and references agree; raises AssertionError."""
        counts: dict[Block, int] = {}
        for scope, entries in self._by_scope.items():
            own: set[Block] = set()
            for entry in entries:
                assert entry.scope == scope and entry.stored
                own.update(entry.stored)
                for block in entry.stored:
                    assert entry in self._by_block[block]
                    counts[block] = counts.get(block, 0) + 1
            assert self._num_blocks[scope] == len(own), "a scope's blocks are miscounted"
            self._orders[scope].check(entries)
        for block in blocks:
            assert block.lease_count == counts.get(block, 0)
        assert self._pool.num_leased <= self.max_blocks


def _turn_to_go(entry: Entry) -> Key | None:
    return (entry.is_leased, entry.expires_at) if entry.stored is not None else None
