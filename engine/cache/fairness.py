"""Which scope holds how much of a pool, and whose content makes way.

A scope holds what was allocated for it, from then until nothing of use is left in it: what it
computes with, what it leases, what is cached. The victim is the scope that holds the most of those
with something unreferenced, and a scope takes from another only where that leaves it with no more
than the other: so whoever holds no more than an equal part of the pool loses nothing to others
(max-min fairness), and who is alone has all of it.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from engine.cache.block import Block, Digest
from engine.cache.free_list import FreeList, StaleQueue, Total

_SPARE = 64


class Holding:
    """What one scope holds: `held` blocks, of which those in the queues have no reference.

    `cached` is by the time of coming, which is that of the last use; what was spared after its last
    use, by a lease or as best-effort, comes to `stale`, and the two are one order by last use.
    `rank` is the number of blocks that it is known to hold where the largest are looked for, 0
    while it is not looked for.
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
        """What is reused next of this scope's: plain content first. There must be something."""
        stale, cached = self.stale.first, self.cached.first
        if stale is not None and (cached is None or stale.last_use < cached.last_use):
            return self.stale.pop()
        return (self.cached or self.best_effort).pop()


class Holdings:
    """All scopes with something in one pool, by the digest of their empty prefix."""

    def __init__(self) -> None:
        self.cached, self.best_effort = Total(), Total()
        self._by_owner: dict[Digest, Holding] = {}
        # A heap of (-rank, a number that makes them differ, holding). An entry may say too much,
        # or be superseded; it never says too little of a holding with something to reclaim.
        self._largest: list[tuple[int, int, Holding]] = []
        self._pushes = 0

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._by_owner.values())

    def take(self, block: Block) -> None:
        """Its owner holds this block, which nobody held, from now on."""
        holding = self._by_owner.get(block.owner)
        if holding is None:
            holding = Holding(block.owner, self.cached, self.best_effort)
            self._by_owner[block.owner] = holding
        holding.held += 1
        block.holding = holding
        if holding.rank and holding.held > holding.rank:
            self.rank(holding)

    def give(self, block: Block) -> None:
        """Nothing of use is left in it: it is nobody's."""
        holding = block.holding
        assert holding is not None
        holding.held -= 1
        block.holding = None
        if not holding.held:
            del self._by_owner[holding.owner]

    def rank(self, holding: Holding) -> None:
        """Something of it can be reclaimed, and it holds more than it is known to hold."""
        holding.rank = holding.held
        self._pushes += 1
        heappush(self._largest, (-holding.held, self._pushes, holding))
        if len(self._largest) > 2 * len(self._by_owner) + _SPARE:
            ranked = [holding for holding in self if holding.rank]
            self._largest = [(-holding.rank, i, holding) for i, holding in enumerate(ranked)]
            heapify(self._largest)

    def pop_victim(self, owner: Digest) -> Block | None:
        """The block that makes way for one of this scope; None where all have references."""
        largest = self._find_largest()
        own = self._by_owner.get(owner)
        if largest is None:
            return None
        if own is not None and own.is_reclaimable and largest.held <= own.held + 1:
            return own.pop()
        return largest.pop()

    def _find_largest(self) -> Holding | None:
        """Of those with something to reclaim, the one that holds most; O(log n), amortized."""
        while self._largest:
            negative, number, holding = self._largest[0]
            if holding.rank != -negative:
                heappop(self._largest)
            elif not holding.is_reclaimable:
                heappop(self._largest)
                holding.rank = 0
            elif holding.held != holding.rank:
                holding.rank = holding.held
                heapreplace(self._largest, (-holding.held, number, holding))
            else:
                return holding
        return None

    def check(self) -> None:
        """Prove that what is looked for is found; raises AssertionError."""
        known = {(-negative, id(holding)) for negative, _, holding in self._largest}
        for owner, holding in self._by_owner.items():
            assert holding.owner == owner and holding.held > 0
            assert not holding.is_reclaimable or holding.rank >= holding.held
            assert not holding.rank or (holding.rank, id(holding)) in known
