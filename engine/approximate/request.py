"""A turn whose prompt is made of others. `engine.schedule` runs it like any other turn.

At its admission a sequence gets the blocks of its own prompt. The exact prompts that are copied
into it and are not in memory are computed first, one after the other, in the sequence's place. Then
a `Compressor` copies between steps, and the sequence goes on behind the copied part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from msgspec import structs

from engine.approximate.billing import with_pieces, write_documents
from engine.approximate.copying import Blend, Compressor, Move
from engine.approximate.placing import (
    Placing,
    has_copy,
    new_placings,
    num_spare,
    usable_sources,
)
from engine.approximate.prompt import ApproximatePrompt, with_sibling
from engine.cache.block import Entry
from engine.cache.ids import TokenId
from engine.cache.prefix_cache import CacheQuery, CacheResult, Lookup, PrefixCache
from engine.cache.table import BlockCopy, BlockTable
from engine.protocol import Frame, Started, Tier
from engine.schedule.output import OutputParser
from engine.schedule.request import PrefillChunk, RequestState, SequenceState, marked_ends
from engine.schedule.runner import SampleParams, Work
from engine.sizing import blocks_for

_TIERS: Sequence[Tier | None] = (None, "device", "host", "disk")


class SetAside(NamedTuple):
    """A choice's own tokens and table, while its sequence computes an exact prompt."""

    tokens: list[TokenId]
    table: BlockTable


@dataclass(eq=False)
class ApproximateSequence(SequenceState):
    """One choice of such a turn.

    While it computes an exact prompt, its `tokens` and `table` are that prompt's.
    """

    request: "ApproximateRequest"
    # The exact prompt that is computed now; None: no exact prompt is.
    origin: CacheQuery | None = None
    # The choice's own tokens and table; None: `tokens` and `table` are its own.
    set_aside: "SetAside | None" = None
    # The exact prompts that this sequence still copies from.
    placings: list[Placing] = field(default_factory=list)

    @property
    def placing(self) -> Placing | None:
        """The exact prompt whose tokens and table the sequence has now; None: it has its own."""
        if self.set_aside is None:
            return None
        return next((placing for placing in self.placings if placing.table is self.table), None)

    def begin(self, cache: PrefixCache) -> list[BlockCopy]:
        request = self.request
        prompt = request.prompt
        query = request.query
        table = self.table
        documents: Sequence[Lookup] = ()
        if self.is_new:
            lookup = request.lookup
            assert lookup is not None
            lookup.raced = request.raced
            documents = request.documents
            sources = usable_sources(cache, prompt, query.digests, lookup)
            spare = num_spare(cache, prompt, sources)
            copies = cache.begin(query, lookup, table, sources, spare)
        else:
            copies = self._resume(cache)
        self.placings = new_placings(prompt, table, documents)
        if self.placings:
            copies += self._begin_placing(cache, self.placings[0])
        return copies

    def _resume(self, cache: PrefixCache) -> list[BlockCopy]:
        request = self.request
        prompt = request.prompt
        query = request.query
        table = self.table
        table.kind = query.digests.kind
        digests = cache.digests(query.scope, self.tokens, table.kind)
        sources = usable_sources(cache, prompt, digests)
        if prompt.sibling_mark is None:
            spare = num_spare(cache, prompt, sources)
            return cache.resume(query, self.tokens, table, sources, spare)
        size = cache.pool.block_size
        if not all(has_copy(sources, placed, size) for placed in prompt.placed):
            # The sibling's content is not copied a second time. The sequence goes on as exact.
            table.kind = prompt.sibling_mark.exact.kind
            return cache.resume(query, self.tokens, table)
        return cache.resume(query, self.tokens, table, sources)

    def _begin_placing(self, cache: PrefixCache, placing: Placing) -> list[BlockCopy]:
        """Begin to compute an exact prompt in the sequence's place."""
        copies = placing.begin(cache)
        assert placing.table is not None
        if self.set_aside is None:
            self.set_aside = SetAside(self.tokens, self.table)
        self.origin = placing.placed.origin
        self.table = placing.table
        self.tokens = list(self.origin.tokens[:-1])
        return copies

    def go_on(self, cache: PrefixCache) -> list[BlockCopy]:
        waiting = next((placing for placing in self.placings if placing.table is None), None)
        if waiting is not None:
            return self._begin_placing(cache, waiting)
        self._go_back()
        ranges = (part for placing in self.placings for part in placing.copied)
        self.table.give(ranges, self.tokens)
        request = self.request
        if self.is_new and request.lookup is not None:
            request.lookup.reused += sum(placing.num_reused for placing in self.placings)
        if request.prompt.compression is not None or not self.is_new:
            self.let_placings_go()
        return []

    def _go_back(self) -> None:
        """Go back to the choice's own tokens and table."""
        if self.set_aside is not None:
            self.tokens = self.set_aside.tokens
            self.table = self.set_aside.table
        self.set_aside = None
        self.origin = None

    def let_placings_go(self) -> None:
        """Release the exact prompts' blocks."""
        for placing in self.placings:
            if placing.table is not None:
                placing.table.release()
        self.placings = []

    def release(self) -> None:
        self.table.release(self.answer_end)
        self._go_back()
        self.table.release(self.answer_end)
        self.let_placings_go()
        self.parts = None

    def new_parts(self) -> Iterator[int]:
        """Copy from all exact prompts, once the last of them is computed.

        First the tokens are chosen that are computed instead of copied.
        """
        request = self.request
        prompt = request.prompt
        compressor = request.compressor
        assert compressor is not None and self.set_aside is not None
        if self.placing is not self.placings[-1]:
            return
        targets = self.set_aside.table.block_ids
        blends: list[Blend] = []
        for placing in self.placings:
            assert placing.table is not None
            placed = placing.placed
            if placed.is_chosen:
                num = placed.copied - placed.start
                sources = placing.table.block_ids
                blends.append(Blend(placed.start, placed.end, num, sources, placing.chosen))
        if blends:
            gaps = list(self.set_aside.table.gaps(blends[-1].end))
            yield from compressor.choose(prompt.real, gaps, blends, targets)
        for placing in self.placings:
            assert placing.table is not None
            move = Move(placing.ranges, placing.table.block_ids, targets)
            if prompt.sibling_mark is not None:
                layers = prompt.sibling_mark.sibling.own_layers
                yield from compressor.take_over(layers, prompt.real, move)
            elif prompt.compression is None:
                yield from compressor.place(placing.placed.shift, move)
            else:
                tokens = placing.placed.origin.tokens
                yield from compressor.compress(prompt.compression, tokens, move)

    def work(self, chunk: PrefillChunk) -> Work:
        prompt = self.request.prompt
        start = chunk.start
        end = start + chunk.count
        if self.is_preparing:
            return Work(
                token_ids=self.tokens[start:end], start=start, block_table=self.table.block_ids
            )
        work = replace(super().work(chunk), adapter=None)  # no adapter acts on this kind
        # The computed tokens of a document are the client's, and not those of its digest.
        if prompt.placed and not self.request.query.cut:
            real = prompt.real
            behind = self.tokens[max(start, len(real)) : end]
            work = replace(work, token_ids=[*real[start:end], *behind, *chunk.draft])
        return work

    def position_of(self, slot: int) -> int:
        placing = self.placing
        if placing is not None:
            # The exact prompt's first token is the prompt's own. Its position counts once.
            return slot + placing.placed.shift
        return super().position_of(slot)

    @property
    def boundaries(self) -> Sequence[int]:
        if self.origin is not None:
            return sorted(marked_ends(self.origin))
        return self.request.boundaries

    @property
    def tables(self) -> Sequence[BlockTable]:
        """The choice's own table, then the table of the exact prompt that is computed, if any."""
        return [self.table] if self.set_aside is None else [self.set_aside.table, self.table]

    @property
    def num_computed(self) -> int:
        return 0 if self.is_preparing else self.table.num_tokens

    @property
    def is_whole(self) -> bool:
        return bool(self.request.prompt.placed)

    @property
    def is_preparing(self) -> bool:
        return self.set_aside is not None

    @property
    def is_part_due(self) -> bool:
        if self.set_aside is None:
            return False
        return not (self.num_pending or self.set_aside.table.incoming)

    @property
    def num_output(self) -> int:
        tokens = self.tokens if self.set_aside is None else self.set_aside.tokens
        return len(tokens) - len(self.request.query.tokens)


@dataclass(eq=False, kw_only=True)
class ApproximateRequest(RequestState):
    """One turn whose prompt is made of others."""

    prompt: ApproximatePrompt
    compressor: Compressor | None
    # The look-ups of the exact prompts in `prompt.placed`. Their blocks are pinned.
    documents: list[Lookup] = field(default_factory=list)

    def __post_init__(self) -> None:
        emit = self.emit

        def tell(frame: Frame) -> None:
            if isinstance(frame, Started):
                frame = structs.replace(frame, approximate=self.prompt.report)
            emit(frame)

        self.emit = tell

    def look_up(self, cache: PrefixCache) -> None:
        """Find and pin the entries that the prompt may read.

        A prompt that may read a sibling's entries becomes exact if there is none.
        """
        if self.prompt.sibling_mark is not None:
            before = self.query.digests.kind
            self.prompt = with_sibling(self.prompt, cache)
            self.query = self.prompt.query
            if self.query.digests.kind != before:
                self.twin = None
                self.raced = 0
            for leader in self.sequences[:1]:
                leader.table = cache.new_table(self.query)
        lookup = cache.look_up(self.query)
        self.lookup = lookup
        self.documents = []
        placed_all = self.prompt.placed
        if self.prompt.sibling_mark is not None:
            for placed in placed_all:
                self.documents.append(_pinned_of_sibling(placed.entry, placed.end, cache))
            if any(document.hit is not None for document in self.documents):
                cache.explain(self.query, lookup, max(document.read for document in self.documents))
                lookup.miss_reason = None
            return
        if self.prompt.compression is None:
            self.documents = [cache.look_up(placed.origin) for placed in placed_all]
        if placed_all and not self.query.breakpoints:
            reasons = (document.miss_reason for document in self.documents)
            lookup.miss_reason = next((reason for reason in reasons if reason is not None), None)

    @property
    def has_pinned_blocks(self) -> bool:
        return super().has_pinned_blocks or any(document.pinned for document in self.documents)

    def let_go(self, cache: PrefixCache) -> None:
        super().let_go(cache)
        for document in self.documents:
            cache.let_go(document)

    def give_up(self, cache: PrefixCache) -> None:
        super().give_up(cache)
        for document in self.documents:
            cache.give_up(document)
        self.documents = []

    def take_back(self, cache: PrefixCache) -> None:
        super().take_back(cache)
        for document in self.documents:
            cache.take_back(document)

    def write(self, cache: PrefixCache, sequence: SequenceState, now: float) -> CacheResult:
        assert isinstance(sequence, ApproximateSequence) and self.lookup is not None
        prompt = self.prompt
        documents = write_documents(
            cache, prompt, self.lookup, self.documents, sequence.placings, now
        )
        written = super().write(cache, sequence, now)
        sequence.let_placings_go()
        receipt = written.receipt
        if prompt.compression is not None:
            # Names inside the compressed prefix have no slots. Their tokens are the origin's.
            names = prompt.placed[0].origin.names
            receipt = structs.replace(receipt, name_tokens=[name.tokens for name in names])
        else:
            copied = [(placed.copied, placed.end) for placed in prompt.placed]
            receipt = structs.replace(receipt, copied=copied)
        return replace(
            written,
            usage=with_pieces(written.usage, documents.pieces),
            receipt=receipt,
            held=[*documents.held, *written.held],
            read_tier=max((written.read_tier, *documents.tiers), key=_TIERS.index),
        )

    def new_sequence(
        self, choice: int, table: BlockTable, parser: OutputParser, sample: SampleParams
    ) -> SequenceState:
        return ApproximateSequence(self, choice, table, parser, sample, list(self.query.tokens))

    @property
    def prompt_tokens(self) -> Sequence[TokenId]:
        return self.prompt.real or self.query.tokens


def _pinned_of_sibling(entry: Entry | None, end: int, cache: PrefixCache) -> Lookup:
    """A look-up that pins the first `end` tokens of a sibling's entry; empty without an entry."""
    lookup = Lookup([], entry, 0, None)
    if entry is not None:
        lookup.read = end
        lookup.pinned = list(entry.blocks[: blocks_for(end, cache.pool.block_size)])
        for block in lookup.pinned:
            block.home.acquire(block)
    return lookup
