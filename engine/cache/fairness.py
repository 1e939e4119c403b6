"""How much of a pool each scope holds, and which scope's content is reused next.

A scope holds a block from its allocation until the block has no useful content: while the scope
computes with it, leases it, or has content cached in it. The victim is the scope that holds the
most, of the scopes with an unreferenced block. A scope takes from another only if it then holds no
more than the other. So a scope with at most an equal part of the pool loses nothing to others
(max-min fairness). A single scope can have the whole pool.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from engine.cache.block import Block
from engine.cache.free_list import FreeList, StaleQueue, Total
from engine.cache.ids import Digest

_SPARE = 64


class ScopeShare:
    """One scope's blocks: `held` counts them. Those in the queues have no reference.

    `cached` is in the order of arrival, which is the order of last use. A block that was spared
    after its last use, by a lease or as best-effort, goes to `stale`. The two queues together give
    one order by last use. `rank` is the number of held blocks in the search for the largest scope,
    0 while the scope is not in the search.
    """

    __slots__ = ("best_effort", "cached", "held", "owner", "rank", "stale")

    def __init__(self, owner: Digest, cached: Total, best_effort: Total) -> None:
        self.owner = owner
        self.held = 0
        self.rank = 0
        self.cached = FreeList(cached)
        self.stale = StaleQueue(cached)
        self.best_effort = FreeList(best_effort)

    @property
    def is_reclaimable(self) -> bool:
        return bool(self.cached) or bool(self.stale) or bool(self.best_effort)

    def pop(self) -> Block:
        """Take the scope's next block to reuse, plain content first. There must be one."""
        stale, cached = self.stale.first, self.cached.first
        if stale is not None and (cached is None or stale.last_use < cached.last_use):
            return self.stale.pop()
        return (self.cached or self.best_effort).pop()


class ScopeShares:
    """All scopes that hold blocks of one pool, by the digest of their empty prefix."""

    def __init__(self) -> None:
        self.cached, self.best_effort = Total(), Total()
        self._by_owner: dict[Digest, ScopeShare] = {}
        # A heap of (-rank, a number that makes them differ, share). An item may be too high or
        # superseded. It is never too low for a share with something to reclaim.
        self._largest: list[tuple[int, int, ScopeShare]] = []
        self._pushes = 0

    def __iter__(self) -> Iterator[ScopeShare]:
        return iter(self._by_owner.values())

    def take(self, block: Block) -> None:
        """From now on the block's owner holds it. No scope held it before."""
        share = self._by_owner.get(block.owner)
        if share is None:
            share = ScopeShare(block.owner, self.cached, self.best_effort)
            self._by_owner[block.owner] = share
        share.held += 1
        block.share = share
        if share.rank and share.held > share.rank:
            self.rank(share.owner)

    def give(self, block: Block) -> None:
        """The block has no useful content left, so no scope holds it."""
        share = block.share
        assert share is not None
        share.held -= 1
        block.share = None
        if not share.held:
            del self._by_owner[share.owner]

    def rank(self, owner: Digest) -> None:
        """The scope has something to reclaim, and its rank is too low."""
        share = self._by_owner[owner]
        share.rank = share.held
        self._pushes += 1
        heappush(self._largest, (-share.held, self._pushes, share))
        if len(self._largest) > 2 * len(self._by_owner) + _SPARE:
            ranked = [share for share in self if share.rank]
            self._largest = [(-share.rank, i, share) for i, share in enumerate(ranked)]
            heapify(self._largest)

    def pop_victim(self, owner: Digest) -> Block | None:
        """The block that is reused for this scope. None if all blocks have references."""
        largest = self._find_largest()
        own = self._by_owner.get(owner)
        if largest is None:
            return None
        if own is not None and own.is_reclaimable and largest.held <= own.held + 1:
            return own.pop()
        return largest.pop()

    def _find_largest(self) -> ScopeShare | None:
        """The scope that holds the most, of those with something to reclaim.

        O(log n), amortized.
        """
        while self._largest:
            negative, number, share = self._largest[0]
            if share.rank != -negative:
                heappop(self._largest)
            elif not share.is_reclaimable:
                heappop(self._largest)
                share.rank = 0
            elif share.held != share.rank:
                share.rank = share.held
                heapreplace(self._largest, (-share.held, number, share))
            else:
                return share
        return None

    def check(self) -> None:
        """Prove that the search finds every scope; raises AssertionError."""
        known = {(-negative, id(share)) for negative, _, share in self._largest}
        for owner, share in self._by_owner.items():
            assert share.owner == owner and share.held > 0
            assert not share.is_reclaimable or share.rank >= share.held
            assert not share.rank or (share.rank, id(share)) in known
