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
"""Ticks a second. An age's bucket is the number of binary digits of its ticks, so each bucket is
twice as long as the one before."""
NUM_AGES = 64
BUCKET_SECONDS = [max(2**bucket // 2, 1) / TICKS for bucket in range(NUM_AGES)]
MAX_USES = 6
"""Blocks that were used more often are in the class of blocks with this many uses."""
NUM_DISTANCES = 6
NUM_CLASSES = MAX_USES * len(ENDS) * NUM_DISTANCES
RELEARN_AFTER = 1500
"""The worth of a class is computed anew after so many uses of blocks."""
DECAY = 0.9
"""A class's counts are multiplied by this whenever its worth is computed anew."""
MAX_SCOPES = 64
"""The number of scopes whose times of reuse are kept. A scope takes about 110 KB."""
REMEMBERED = 2
"""How many evicted blocks are remembered, as a multiple of the pool's blocks."""


_END_OFFSETS = {end: place * NUM_DISTANCES for place, end in enumerate(ENDS)}
_REACH = [max(distance.bit_length() - 1, 0) for distance in range(2 ** (NUM_DISTANCES - 1))]


@dataclass(slots=True)
class Moment:
    """The latest known moment, in seconds of the engine's clock. Ages end at it."""

    now: float = 0.0


class Worth:
    """The worth of a block, by its class and its age.

    The worth of a class is computed anew from time to time. The classes take turns, so that no
    single use of a block takes long.
    """

    def __init__(self, moment: "Moment | None" = None) -> None:
        self._moment = moment or Moment()
        self._reused = [array("d", bytes(8 * NUM_AGES)) for _ in range(NUM_CLASSES)]
        self._begun = [0.0] * NUM_CLASSES
        # The last row is of class -1: of blocks that no prompt has used.
        self._worth = [array("d", bytes(8 * NUM_AGES)) for _ in range(NUM_CLASSES + 1)]
        self._num_uses = 0
        # The class whose worth is computed anew next.
        self._next_class = 0
        # The total number of uses at which it is.
        self._learn_at: float = RELEARN_AFTER

    def at(self, block: Block) -> float:
        """The worth of a block now. 0 for one that no prompt has used."""
        ticks = int((self._moment.now - block.used_at) * TICKS)
        return self._worth[block.use_class][ticks.bit_length()]

    def use(self, block: Block, end: AnswerEnd, distance: int) -> None:
        """A prompt used a block. `distance` is 1 for the prompt's last block."""
        if block.use_class >= 0:
            ticks = int((self._moment.now - block.used_at) * TICKS)
            self._reused[block.use_class][ticks.bit_length()] += 1
        block.num_uses += 1
        block.used_at = self._moment.now
        block.use_class = class_of(block.num_uses, end, distance)
        self._begun[block.use_class] += 1
        self._num_uses += 1
        if self._num_uses >= self._learn_at:
            self._learn(self._next_class)
            self._learn_at += RELEARN_AFTER / NUM_CLASSES
            self._next_class = (self._next_class + 1) % NUM_CLASSES

    def _learn(self, use_class: int) -> None:
        """Compute the worth of a class at each age.

        Each age is a point: the block-seconds and the uses up to this age. The worth at an age is
        the steepest slope from its point to a later one. These slopes are edges of the upper hull
        of the points, which is built from the last point back.
        """
        reused = self._reused[use_class]
        alive = max(self._begun[use_class], sum(reused))
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
            self._worth[use_class][age] = _slope(point, hull[-1])
            hull.append(point)
        for bucket, count in enumerate(reused):
            reused[bucket] = count * DECAY
        self._begun[use_class] *= DECAY


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
        """The worth of a block now, learned from its own scope."""
        return self.of(block.owner).at(block)


class Evicted:
    """The last uses of evicted blocks, by their digests. The oldest are forgotten.

    Without them a class whose blocks are evicted early would look like one that nobody reuses.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # `use_class`, `used_at` and `num_uses` of each block.
        self._uses: OrderedDict[Digest, tuple[int, float, int]] = OrderedDict()

    def add(self, digest: Digest, block: Block) -> None:
        if block.use_class < 0:
            return
        self._uses[digest] = (block.use_class, block.used_at, block.num_uses)
        if len(self._uses) > self._size:
            self._uses.popitem(last=False)

    def give_back(self, digest: Digest, block: Block) -> None:
        """This block has the evicted content again. It gets the uses from before the eviction."""
        uses = self._uses.pop(digest, None)
        if uses is not None and block.use_class < 0:
            block.use_class, block.used_at, block.num_uses = uses


def copy_use(source: Block, target: Block) -> None:
    """Give the target the source's uses, since it has the source's content."""
    target.use_class = source.use_class
    target.used_at = source.used_at
    target.num_uses = source.num_uses


def class_of(num_uses: int, end: AnswerEnd, distance: int) -> int:
    """The class of a block, by its uses, by how the answer ended, and by its distance.

    The distance is the number of blocks from this one to the prompt's end.
    """
    # No call of `min`: this runs for each block of each prompt.
    uses = (num_uses if num_uses < MAX_USES else MAX_USES) - 1
    reach = _REACH[distance] if distance < len(_REACH) else NUM_DISTANCES - 1
    return uses * len(ENDS) * NUM_DISTANCES + _END_OFFSETS[end] + reach


def _slope(start: tuple[float, float], end: tuple[float, float]) -> float:
    """Uses per block-second from `start` to `end`. 0 if no block-seconds lie between them."""
    seconds = end[0] - start[0]
    return (end[1] - start[1]) / seconds if seconds > 0 else 0.0
