"""Copies into one sequence: from an exact prompt's table to ranges of the sequence's own."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.approximate.prompt import ApproximatePrompt, Placed
from engine.cache.digests import PromptDigests
from engine.cache.prefix_cache import Lookup, PrefixCache
from engine.cache.table import BlockCopy, BlockTable, Source
from engine.sizing import blocks_for

Range = tuple[int, int]
Sources = dict[int, Source]
"""A prompt's blocks in memory, by logical block, ascending."""


@dataclass(slots=True, eq=False)
class Placing:
    """One exact prompt that is copied into a sequence."""

    placed: Placed
    # The exact prompt's look-up.
    lookup: Lookup
    # The ranges it is copied to: positions of the sequence, or slots of a compressed prompt.
    ranges: list[Range]
    # The exact prompt's blocks; None: its turn has not come yet.
    table: BlockTable | None = None
    # The parts of the ranges whose tokens the model computed for the exact prompt.
    computed: list[Range] = field(default_factory=list)
    # The positions in the ranges that are computed instead of copied, in order.
    chosen: list[int] = field(default_factory=list)

    @property
    def copied(self) -> Iterator[Range]:
        """The ranges without the chosen positions."""
        for start, end in self.ranges:
            for position in self.chosen[slice(*self._places(start, end))]:
                if start < position:
                    yield start, position
                start = position + 1
            if start < end:
                yield start, end

    @property
    def num_reused(self) -> int:
        """The number of copied tokens that were in memory before."""
        # Chosen positions are not among the copied ones, so the computed ones that were chosen must
        # not be subtracted.
        num_chosen = _total(self._places(start, end) for start, end in self.computed)
        return _total(self.copied) - _total(self.computed) + num_chosen

    def begin(self, cache: PrefixCache) -> list[BlockCopy]:
        """Fill a table for the exact prompt, and note which ranges it still has to compute.

        Returns the copies that must be made first. Raises NoFreeBlocks like `PrefixCache.begin`.
        """
        placed = self.placed
        table = cache.new_table(placed.origin)
        copies = cache.begin(placed.origin, self.lookup, table)
        self.table = table
        shift = placed.shift
        ranges = [(0, placed.of)] if placed.of else self.ranges
        moved = ((start - shift, end - shift) for start, end in ranges)
        gaps = (gap for start, end in moved for gap in table.gaps(end, start))
        self.computed = [(start + shift, end + shift) for start, end in gaps]
        return copies

    def _places(self, start: int, end: int) -> Range:
        return bisect_left(self.chosen, start), bisect_left(self.chosen, end)


def new_placings(
    prompt: ApproximatePrompt, table: BlockTable, documents: Sequence[Lookup]
) -> list[Placing]:
    """The exact prompts whose copies a prompt's table still lacks.

    `documents` are the look-ups of all exact prompts, or empty if the look-ups were let go.
    """
    placings: list[Placing] = []
    for number, placed in enumerate(prompt.placed):
        lookup = documents[number] if documents else Lookup([], None, 0, None)
        # A sibling's content can only be read. This engine can't compute it.
        if prompt.sibling_mark is not None and lookup.hit is None:
            continue
        ranges = list(table.gaps(placed.end, placed.begin))
        if ranges:
            placings.append(Placing(placed, lookup, ranges))
    return placings


def usable_sources(
    cache: PrefixCache,
    prompt: ApproximatePrompt,
    digests: PromptDigests,
    lookup: Lookup | None = None,
) -> Sources:
    """The blocks in memory that a prompt continues from.

    If the computed tokens of a document are chosen, its copy is reused whole or not at all, because
    they are chosen among all tokens of the document.
    """
    size = cache.pool.block_size
    sources = cache.sources(digests, lookup)
    num_pinned = 0
    tail = 0
    if lookup is not None and lookup.pinned:
        num_pinned, tail = divmod(lookup.read, size)
    num_read = num_pinned * size + tail
    while True:
        dropped = {
            index
            for placed in prompt.placed
            if placed.is_chosen and not has_copy(sources, placed, size)
            for index in range(placed.begin // size, blocks_for(placed.end, size))
            if index in sources and index * size + sources[index].num_tokens > num_read
        }
        # Two documents may share a block. Dropping it for one may break the other's copy, so look
        # again until nothing is dropped.
        if not dropped:
            return sources
        for index in dropped:
            if lookup is not None and tail and index == num_pinned:
                sources[index] = Source(lookup.pinned[index], tail)
            else:
                del sources[index]


def num_spare(cache: PrefixCache, prompt: ApproximatePrompt, sources: Sources) -> int:
    """The most blocks that the exact prompts take besides the prompt's own blocks.

    An exact prompt takes blocks if `sources` lack its copy.
    """
    size = cache.pool.block_size
    spare = 0
    for placed in prompt.placed:
        is_copied = prompt.sibling_mark is None or placed.entry is not None
        if is_copied and not has_copy(sources, placed, size):
            # Blocks that a look-up pins or a lease holds are there already. They are counted one by
            # one, because each may be of another copy of the prompt.
            blocks = map(cache.pool.peek, placed.origin.digests.full)
            here = sum(block is not None and block.ref_count > 0 for block in blocks)
            spare += len(placed.origin.tokens) // size + 2 - here
    return spare


def has_copy(sources: Sources, placed: Placed, size: int) -> bool:
    """Whether `sources` have the whole copy that `placed` says. `size` is a block's tokens."""
    wanted = {
        index: min(size, placed.end - index * size)
        for index in range(placed.begin // size, blocks_for(placed.end, size))
    }
    return all(i in sources and sources[i].num_tokens >= num for i, num in wanted.items())


def _total(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)
