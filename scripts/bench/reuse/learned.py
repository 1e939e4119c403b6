"""An order of reuse that learns from times of reuse. It is not the engine's: README.md says why.

Of the blocks that no cached block follows, some are drawn at random, and the one of the least worth
makes way. Worth is the largest ratio, over all horizons, of the chance that the block is used again
within the horizon to the expected time that it is held till then: Gittins' index ("Bandit processes
and dynamic allocation indices", 1979); LHD (Beckmann, Chen, Cidon, NSDI '18) is near it.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.bench.reuse.models import Reads, fits, num_readable
from scripts.bench.reuse.traces import ENDS, Request, Trace

NUM_AGES = 64
AGE_UNIT = 0.1
"""Seconds. An age of so many is where the logarithmic buckets begin to grow."""
AGES = [AGE_UNIT * (2 ** (bucket / 2) - 1) for bucket in range(NUM_AGES + 1)]
"""The first age of each bucket, in seconds, and the end of the last one."""
MAX_USES = 6
"""A block that was used more often is in the class of these."""
NUM_DISTANCES = 6
NUM_CLASSES = MAX_USES * len(ENDS) * NUM_DISTANCES
RELEARN_AFTER = 1500
"""Uses between two times that the worth of all classes is computed anew."""
DECAY = 0.9
"""What is left of each count then."""
NUM_DRAWN = 64
REMEMBERED = 4
"""So many times the memory's blocks are remembered after they made way."""


class Worth:
    """What a block of a class is worth at an age, by what became of others of its class."""

    def __init__(self) -> None:
        self._reused = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self._begun = [0.0] * NUM_CLASSES
        self._worth = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self._num_begun = 0

    def at(self, kind: int, age: float) -> float:
        return self._worth[kind][_bucket(age)]

    def begin(self, kind: int) -> None:
        """A block was used, and belongs to this class now."""
        self._begun[kind] += 1
        self._num_begun += 1
        if self._num_begun % RELEARN_AFTER == 0:
            for learned in range(NUM_CLASSES):
                if self._begun[learned]:
                    self._learn(learned)

    def use_again(self, kind: int, age: float) -> None:
        """A block of this class was used again, so many seconds after its last use."""
        self._reused[kind][_bucket(age)] += 1

    def _learn(self, kind: int) -> None:
        reused = self._reused[kind]
        alive = [max(self._begun[kind], sum(reused), 1e-9)]
        for count in reused:
            alive.append(alive[-1] - count)
        for first in range(NUM_AGES):
            best = 0.0
            uses = 0.0
            seconds_held = 0.0
            for age in range(first, NUM_AGES):
                uses += reused[age]
                seconds_held += (alive[age] + alive[age + 1]) / 2 * (AGES[age + 1] - AGES[age])
                if seconds_held > 0:
                    best = max(best, uses / seconds_held)
            self._worth[kind][first] = best
        self._reused[kind] = [count * DECAY for count in reused]
        self._begun[kind] *= DECAY


@dataclass(slots=True)
class Cached:
    """A block in the memory, or one that is remembered."""

    block: int
    kind: int = 0
    # Seconds of the trace.
    used_at: float = 0.0
    num_uses: int = 0
    # The block in front of it; None: it begins a prompt.
    parent: "Cached | None" = None
    num_children: int = 0
    # Its place among the leaves; -1: it is none.
    place: int = -1
    # The number of the last request that it belongs to.
    request: int = -1


class LearnedCache:
    """A memory of `num_blocks` whose leaves make way by their worth."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._worth = Worth()
        self._cached: dict[int, Cached] = {}
        self._leaves: list[Cached] = []
        self._remembered: OrderedDict[int, Cached] = OrderedDict()
        self._draw = random.Random(1)
        self._number = 0

    def num_cached(self, blocks: Sequence[int]) -> int:
        """How many of them are in the memory, from the first one on without a gap."""
        for place, block in enumerate(blocks):
            if block not in self._cached:
                return place
        return len(blocks)

    def use(self, request: Request, num_whole: int) -> None:
        """Keep the first blocks of a request, and count their use."""
        self._number += 1
        blocks = request.blocks[:num_whole]
        for block in blocks:
            if block in self._cached:
                self._cached[block].request = self._number
        parent: Cached | None = None
        for place, block in enumerate(blocks):
            cached = self._cached.get(block)
            if cached is not None:
                self._worth.use_again(cached.kind, request.at - cached.used_at)
            else:
                cached = self._add(block, parent, request.at)
                if cached is None:
                    return
            cached.num_uses += 1
            cached.used_at = request.at
            cached.kind = _class(cached.num_uses, request.end, len(blocks) - place)
            self._worth.begin(cached.kind)
            parent = cached

    def _add(self, block: int, parent: Cached | None, now: float) -> Cached | None:
        """A block behind its parent. None: every leaf belongs to the same request."""
        while len(self._cached) >= self._num_blocks:
            if not self._evict(now):
                return None
        cached = self._remembered.pop(block, None)
        if cached is None:
            cached = Cached(block)
        else:
            self._worth.use_again(cached.kind, now - cached.used_at)
        cached.request = self._number
        cached.parent = parent
        cached.num_children = 0
        self._cached[block] = cached
        if parent is not None:
            parent.num_children += 1
            self._remove_leaf(parent)
        self._add_leaf(cached)
        return cached

    def _evict(self, now: float) -> bool:
        drawn = [self._draw.choice(self._leaves) for _ in range(NUM_DRAWN)]
        victim = self._least(drawn, now) or self._least(self._leaves, now)
        if victim is None:
            return False
        self._remove_leaf(victim)
        del self._cached[victim.block]
        self._remembered[victim.block] = victim
        if len(self._remembered) > REMEMBERED * self._num_blocks:
            self._remembered.popitem(last=False)
        parent = victim.parent
        victim.parent = None
        if parent is not None:
            parent.num_children -= 1
            if parent.num_children == 0:
                self._add_leaf(parent)
        return True

    def _least(self, leaves: Sequence[Cached], now: float) -> Cached | None:
        """The leaf of the least worth, of equal ones the oldest. None of the running request."""
        victim: Cached | None = None
        least = (math.inf, 0.0)
        for leaf in leaves:
            if leaf.request == self._number:
                continue
            worth = (self._worth.at(leaf.kind, now - leaf.used_at), leaf.used_at)
            if worth < least:
                least = worth
                victim = leaf
        return victim

    def _add_leaf(self, cached: Cached) -> None:
        cached.place = len(self._leaves)
        self._leaves.append(cached)

    def _remove_leaf(self, cached: Cached) -> None:
        if cached.place < 0:
            return
        last = self._leaves.pop()
        if last is not cached:
            self._leaves[cached.place] = last
            last.place = cached.place
        cached.place = -1


def replay_learned(trace: Trace, num_blocks: int) -> Reads:
    """The block of the least worth goes first, of those that no cached block follows."""
    reads = Reads()
    cache = LearnedCache(num_blocks)
    for request in trace.requests:
        if not fits(request, num_blocks):
            reads.num_refused += 1
            continue
        hit = cache.num_cached(request.blocks[: num_readable(request, trace.block_size)])
        cache.use(request, request.tokens // trace.block_size)
        reads.add(request, hit * trace.block_size)
    return reads


def _bucket(age: float) -> int:
    return min(NUM_AGES - 1, int(2 * math.log2(age / AGE_UNIT + 1)))


def _class(num_uses: int, end: str, distance: int) -> int:
    """By uses, by how the answer ended, and by the blocks from here to the prompt's end."""
    uses = min(num_uses, MAX_USES) - 1
    reach = min(int(math.log2(distance)), NUM_DISTANCES - 1)
    return (uses * len(ENDS) + ENDS.index(end)) * NUM_DISTANCES + reach
