"""The entries whose whole copies are kept in the store.

Whose copies make way for whose is decided in `leases.py`.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

from engine.cache.block import Block, Entry
from engine.cache.leases import displacing_key, own_displacing_key, scope_to_displace
from engine.cache.order import Key, Order
from engine.cache.pool import BlockPool


@dataclass(slots=True, eq=False)
class _ScopeCopies:
    """One scope's copies."""

    entries: dict[Entry, None] = field(default_factory=dict)
    # The order in which they make way for other scopes' copies.
    for_others: Order[Entry] = field(default_factory=lambda: Order(_displacing_key))
    # The order in which copies of automatic entries make way for the scope's own new copies.
    for_own: Order[Entry] = field(default_factory=lambda: Order(_own_displacing_key))
    # The blocks that they have together.
    num_blocks: int = 0

    def push(self, entry: Entry) -> None:
        self.for_others.push(entry)
        self.for_own.push(entry)


def _displacing_key(entry: Entry) -> Key | None:
    return None if entry.stored is None else displacing_key(entry)


def _own_displacing_key(entry: Entry) -> Key | None:
    return None if entry.stored is None else own_displacing_key(entry)


class StoreCopies:
    """All whole copies in the store. A copy has one lease reference on each of its blocks."""

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self.max_blocks = max_blocks
        self._scopes: dict[str, _ScopeCopies] = {}
        self._by_block: dict[Block, dict[Entry, None]] = {}

    def __len__(self) -> int:
        return sum(len(scope.entries) for scope in self._scopes.values())

    def entries(self) -> list[Entry]:
        return list(chain.from_iterable(scope.entries for scope in self._scopes.values()))

    def of(self, block: Block) -> list[Entry]:
        """The entries whose copies have this block."""
        return list(self._by_block.get(block, ()))

    def room_for(self, scope: str, num_new: int) -> list[Entry] | None:
        """The entries whose copies must make way for a scope's `num_new` blocks.

        None if they can't get room in this way.
        """
        excess = self._pool.num_leased + num_new - self.max_blocks
        if excess <= 0:
            return []
        own_copies = self._scopes.get(scope)
        if own_copies is not None:
            doomed = _first_of(own_copies.for_own, excess)
            if doomed is not None:
                return doomed
        num_blocks = {name: copies.num_blocks for name, copies in self._scopes.items()}
        largest = scope_to_displace(num_blocks, scope, num_new)
        return None if largest is None else _first_of(self._scopes[largest].for_others, excess)

    def changed(self, entry: Entry) -> None:
        """An entry's expiry or lease has changed."""
        if entry.stored is not None:
            self._scopes[entry.scope].for_others.push(entry)

    def add(self, entry: Entry, blocks: list[Block]) -> None:
        entry.stored = blocks
        scope = self._scopes.setdefault(entry.scope, _ScopeCopies())
        scope.num_blocks += self._pool.num_unleased(blocks)
        scope.entries[entry] = None
        scope.push(entry)
        self._pool.lease(blocks)
        for block in blocks:
            self._by_block.setdefault(block, {})[entry] = None

    def end(self, entry: Entry) -> None:
        """An entry's copy is kept for it no longer."""
        blocks = entry.stored
        entry.stored = None
        assert blocks is not None
        for block in blocks:
            entries = self._by_block[block]
            del entries[entry]
            if not entries:
                del self._by_block[block]
        scope = self._scopes[entry.scope]
        before = self._pool.num_leased
        self._pool.end_lease(blocks)
        scope.num_blocks -= before - self._pool.num_leased
        del scope.entries[entry]
        if not scope.entries:
            del self._scopes[entry.scope]


def _first_of(order: Order[Entry], num_blocks: int) -> list[Entry] | None:
    """The first entries without whose copies `num_blocks` blocks are free. None: all have too few.

    Copies share blocks. A block is free once all its copies have made way, unless something else
    uses it, such as the new copy. The order stays as it is.
    """
    doomed: dict[Entry, None] = {}
    # How many copies on each block make way.
    num_ended = Counter[Block]()
    while num_blocks > 0:
        entry = order.pop()
        if entry is None:
            break
        if entry in doomed:
            continue
        doomed[entry] = None
        for block in entry.stored or ():
            num_ended[block] += 1
            num_blocks -= num_ended[block] == block.ref_count
    for entry in doomed:
        order.push(entry)
    return list(doomed) if num_blocks <= 0 else None
