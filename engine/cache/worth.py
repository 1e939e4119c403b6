"""What a cached block is worth, learned from how soon blocks like it were used again.

Worth is the largest ratio, over all horizons, of the chance that a block is used again within the
horizon to the expected time that it is held till then. That is Gittins' index ("Bandit processes
and dynamic allocation indices", 1979). LHD (Beckmann, Chen, Cidon, NSDI '18) is near it. The
chances come from histograms of times of reuse by class. `scripts/bench/README.md` has what it gives
beside LRU and Belady's bound.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.cache.block import Block
from engine.cache.ids import Digest

AnswerEnd = Literal["tool_use", "end_turn", "other"]
"""How the answer behind a prompt ended. After a tool's call the next prompt comes in seconds."""
ENDS: tuple[AnswerEnd, ...] = ("tool_use", "end_turn", "other")
TICKS = 10
"""Of a second. Ages go into buckets by the binary digits of their ticks: each is twice as long as
the one before."""
NUM_AGES = 64
BUCKET_SECONDS = [max(2**bucket // 2, 1) / TICKS for bucket in range(NUM_AGES)]
MAX_USES = 6
"""A block that was used more often is in the class of these."""
NUM_DISTANCES = 6
NUM_CLASSES = MAX_USES * len(ENDS) * NUM_DISTANCES
RELEARN_AFTER = 1500
"""Uses between two times that the worth of a class is computed anew."""
DECAY = 0.9
"""What is left of a class's counts then."""
MAX_SCOPES = 64
"""Whose times of reuse are kept, about 110 KB each."""
REMEMBERED = 2
"""So many times a pool's blocks are remembered after they made way."""


_END_OFFSETS = {end: place * NUM_DISTANCES for place, end in enumerate(ENDS)}
_REACH = [max(distance.bit_length() - 1, 0) for distance in range(2 ** (NUM_DISTANCES - 1))]


@dataclass(slots=True)
class Moment:
    """The latest moment that was told, in seconds of the engine's clock. Ages count from it."""

    now: float = 0.0


class Worth:
    """Of each class of blocks, what one is worth at an age.

    The worth of all classes is computed anew from time to time, one class after the other, so that
    no use of a block takes long.
    """

    def __init__(self, moment: "Moment | None" = None) -> None:
        self._moment = moment or Moment()
        self._reused = [array("d", bytes(8 * NUM_AGES)) for _ in range(NUM_CLASSES)]
        self._begun = [0.0] * NUM_CLASSES
        # The last row is that of class -1.
        self._worth = [array("d", bytes(8 * NUM_AGES)) for _ in range(NUM_CLASSES + 1)]
        self._num_uses = 0
        # The class whose worth is computed anew next, and after how many uses in all.
        self._next = 0
        self._learn_at: float = RELEARN_AFTER

    def at(self, block: Block) -> float:
        """The worth of a block now. 0 for one that no prompt has used."""
        return self._worth[block.kind][int((self._moment.now - block.used_at) * TICKS).bit_length()]

    def use(self, block: Block, end: AnswerEnd, distance: int) -> None:
        """A prompt used a block, so many blocks before its end; the last one is 1 before it."""
        if block.kind >= 0:
            age = int((self._moment.now - block.used_at) * TICKS)
            self._reused[block.kind][age.bit_length()] += 1
        block.num_uses += 1
        block.used_at = self._moment.now
        block.kind = class_of(block.num_uses, end, distance)
        self._begun[block.kind] += 1
        self._num_uses += 1
        if self._num_uses >= self._learn_at:
            self._learn(self._next)
            self._learn_at += RELEARN_AFTER / NUM_CLASSES
            self._next = (self._next + 1) % NUM_CLASSES

    def _learn(self, kind: int) -> None:
        """Compute the worth of a class: the steepest way from each age to a later one.

        By age go the uses and the block-seconds that are behind it. The steepest ways are those of
        the upper hull of these points, which is found from its far end.
        """
        reused = self._reused[kind]
        alive = max(self._begun[kind], sum(reused))
        if alive <= 0:
            return
        seconds = 0.0
        uses = 0.0
        points = [(seconds, uses)]
        for bucket, count in enumerate(reused):
            seconds += (alive - count / 2) * BUCKET_SECONDS[bucket]
            uses += count
            alive -= count
            points.append((seconds, uses))
        hull = [points[NUM_AGES]]
        for age in reversed(range(NUM_AGES)):
            point = points[age]
            while len(hull) > 1 and _slope(point, hull[-1]) <= _slope(point, hull[-2]):
                hull.pop()
            self._worth[kind][age] = _slope(point, hull[-1])
            hull.append(point)
        for bucket, count in enumerate(reused):
            reused[bucket] = count * DECAY
        self._begun[kind] *= DECAY


class Worths:
    """What each scope's blocks are worth, learned from that scope's prompts alone.

    So no workspace's traffic moves another's order. Beyond MAX_SCOPES the scope whose prompts came
    least recently is forgotten: its order is by recency until it is learned again.
    """

    def __init__(self) -> None:
        self.moment = Moment()
        self._by_owner: OrderedDict[Digest, Worth] = OrderedDict()

    def of(self, owner: Digest) -> Worth:
        worth = self._by_owner.get(owner)
        if worth is None:
            worth = self._by_owner[owner] = Worth(self.moment)
            if len(self._by_owner) > MAX_SCOPES:
                self._by_owner.popitem(last=False)
        return worth

    def use(self, owner: Digest, blocks: Sequence[Block], end: AnswerEnd) -> None:
        """A prompt of this scope used these blocks of a chain, from its first one on."""
        worth = self.of(owner)
        self._by_owner.move_to_end(owner)
        for place, block in enumerate(blocks):
            worth.use(block, end, len(blocks) - place)

    def at(self, block: Block) -> float:
        """The worth of a block now, of those of its scope."""
        return self.of(block.owner).at(block)


class Evicted:
    """The last uses of blocks that made way, by their digests; the oldest are forgotten.

    Without them a class whose blocks go early would look like one whose blocks nobody wants.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._uses: OrderedDict[Digest, tuple[int, float, int]] = OrderedDict()

    def add(self, digest: Digest, block: Block) -> None:
        if block.kind < 0:
            return
        self._uses[digest] = (block.kind, block.used_at, block.num_uses)
        if len(self._uses) > self._size:
            self._uses.popitem(last=False)

    def give_back(self, digest: Digest, block: Block) -> None:
        """The content with this digest is in this block now: it has the uses of before."""
        uses = self._uses.pop(digest, None)
        if uses is not None and block.kind < 0:
            block.kind, block.used_at, block.num_uses = uses


def copy_use(source: Block, target: Block) -> None:
    """The target has the source's content."""
    target.kind = source.kind
    target.used_at = source.used_at
    target.num_uses = source.num_uses


def class_of(num_uses: int, end: AnswerEnd, distance: int) -> int:
    """By uses, by how the answer ended, and by the blocks from here to the prompt's end."""
    uses = (num_uses if num_uses < MAX_USES else MAX_USES) - 1
    reach = _REACH[distance] if distance < len(_REACH) else NUM_DISTANCES - 1
    return uses * len(ENDS) * NUM_DISTANCES + _END_OFFSETS[end] + reach


def _slope(start: tuple[float, float], end: tuple[float, float]) -> float:
    """Uses per block-second on the way; 0 where nothing is held on it."""
    seconds = end[0] - start[0]
    return (end[1] - start[1]) / seconds if seconds > 0 else 0.0
