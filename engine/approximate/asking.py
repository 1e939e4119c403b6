"""Which approximate prompts an engine can compute, and the prompt that a request asks for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from engine.approximate.copying import Compressor
from engine.approximate.kinds import LEAST_KEPT, Sibling, new_compression
from engine.approximate.prompt import (
    LEAST_COPIED,
    LEAST_TOKENS,
    ApproximatePrompt,
    DocumentPlace,
    compressed,
    with_documents,
    with_sibling_mark,
)
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.errors import FieldRefused, Overloaded
from engine.protocol import KEEP_FIELD, SIBLING_FIELD, Breakpoint, GenerateRequest
from engine.protocol.reports import STILL_MEASURING, Description, Technique, why_refused
from engine.sizing import blocks_for


def asks_for_any(request: GenerateRequest) -> bool:
    """Whether the request allows an answer behind another prompt than the exact one."""
    return bool(request.documents) or any(point.is_approximate for point in request.breakpoints)


def is_in_other_tokens(request: GenerateRequest) -> bool:
    """Whether other tokens take the place of the prompt's. Then the digests of the exact tokens are
    not needed."""
    return bool(request.documents) or any(point.keep is not None for point in request.breakpoints)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRequest:
    """A request, and its exact prompt."""

    request: GenerateRequest
    query: CacheQuery
    # The tokens before each document's text, in the order of the request's documents.
    begins: Sequence[int] = ()
    has_images: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether the prompt's keys and values depend on more than its tokens."""
        return bool(self.request.adapter or self.request.salt) or self.has_images


@dataclass(slots=True, kw_only=True)
class Approximations:
    """The approximate prompts that one engine can compute. All others are refused."""

    compressor: Compressor | None = None
    # The model whose entries may be read.
    sibling: Sibling | None = None
    # The measured techniques. They say which requests are allowed.
    techniques: Sequence[Technique] = ()
    # The rest of the measuring. Each bounded part yields a finished technique, or None.
    gate: Iterator[Technique | None] | None = None
    # The finished techniques of the measuring that still runs.
    _measured: list[Technique] = field(default_factory=list)

    @property
    def is_measuring(self) -> bool:
        return self.gate is not None

    def measure_part(self) -> bool:
        """Do a bounded part of the measuring. False if nothing is left of it.

        All techniques are published at once, because a request is judged by the nearest technique
        at or below its own parameter.
        """
        if self.gate is None:
            return False
        try:
            technique = next(self.gate)
        except StopIteration:
            self.techniques = [*self._measured, *self.techniques]
            self.gate = None
            return False
        if technique is not None:
            self._measured.append(technique)
        return True

    def describe(self, description: Description) -> Description:
        """The description with the techniques that are published now."""
        if not self.techniques and not self.is_measuring:
            return description
        # The measuring may end between the two reads. In this order a description that says it has
        # ended always has its techniques.
        is_measuring = self.is_measuring
        return structs.replace(
            description, is_measuring=is_measuring, techniques=list(self.techniques)
        )

    def prompt_of(self, exact: ExactRequest, cache: PrefixCache) -> ApproximatePrompt:
        """The prompt of a request that asks for an approximate answer.

        Raise FieldRefused if this engine can't compute the prompt, and Overloaded while the engine
        measures.
        """
        points = exact.request.breakpoints
        kept = [point for point in points if point.keep is not None]
        borrowing = [point for point in points if point.sibling]
        if borrowing:
            return self._of_sibling(exact, cache, borrowing, is_alone=not kept)
        if self.is_measuring:
            raise Overloaded(STILL_MEASURING)
        if exact.request.documents:
            if kept:
                raise FieldRefused(KEEP_FIELD, "not in a request with a block that stands anywhere")
            return self._of_documents(exact, cache)
        return self._compressed(exact, cache, kept)

    def _of_sibling(
        self,
        exact: ExactRequest,
        cache: PrefixCache,
        points: Sequence[Breakpoint],
        *,
        is_alone: bool,
    ) -> ApproximatePrompt:
        if self.sibling is None:
            raise FieldRefused(SIBLING_FIELD, "this engine does not read entries of a sibling")
        is_alone = is_alone and not exact.request.documents and not exact.is_mixed
        if len(points) > 1 or not is_alone:
            raise FieldRefused(
                SIBLING_FIELD,
                "only in one marker of a request without `keep`, `block`, adapter, image or salt",
            )
        return with_sibling_mark(exact.query, cache, self.sibling, points[0].segment)

    def _compressed(
        self, exact: ExactRequest, cache: PrefixCache, points: Sequence[Breakpoint]
    ) -> ApproximatePrompt:
        if len(points) > 1 or exact.is_mixed:
            raise FieldRefused(
                KEEP_FIELD, "only in one marker of a request without adapter, image or salt"
            )
        query = exact.query
        num_tokens = len(query.tokens)
        keep = points[0].keep
        scorer = points[0].scorer
        assert keep is not None
        why = why_refused(self.techniques, scorer, keep)
        if why is not None:
            raise FieldRefused(KEEP_FIELD, why)
        end = query.segments[points[0].segment].end
        if end is None:
            raise FieldRefused(KEEP_FIELD, "the marked prefix has no end in tokens")
        least = query.min_cache_tokens
        if not least <= end < num_tokens:
            why = f"a marked prefix has {least} to {num_tokens - 1} tokens, this one has {end}"
            raise FieldRefused(KEEP_FIELD, why)
        block_size = cache.pool.block_size
        compression = new_compression(scorer, keep, end, block_size)
        if compression is None:
            why = f"{keep} of {end} tokens must leave at least {LEAST_KEPT}, and fewer than all"
            raise FieldRefused(KEEP_FIELD, why)
        # Two things are in memory at once: the exact prefix, and the prompt with the kept tokens.
        prompt_blocks = blocks_for(num_tokens - compression.cut, block_size)
        needed = prompt_blocks + blocks_for(end, block_size) + 2
        most = cache.pool.num_blocks
        if needed > most:
            why = f"the prefix and the prompt take {needed} blocks, and the engine has {most}"
            raise FieldRefused(KEEP_FIELD, why)
        return compressed(query, cache, compression)

    def _of_documents(self, exact: ExactRequest, cache: PrefixCache) -> ApproximatePrompt:
        query = exact.query
        size = cache.pool.block_size
        places: list[DocumentPlace] = []
        needed = blocks_for(len(query.tokens), size)
        for number, document in enumerate(exact.request.documents):
            field = f"documents[{number}]"
            why = why_refused(self.techniques, "blocks", document.recompute)
            if why is not None:
                raise FieldRefused(field, why)
            if exact.is_mixed:
                raise FieldRefused(field, "not with an adapter, an image or a salt")
            # Documents stand behind the first token, and the last token is always computed.
            start = max(exact.begins[number], 1)
            end = query.segments[document.segment].end
            end = None if end is None else min(end, len(query.tokens) - 1)
            if end is None or end <= start:
                raise FieldRefused(field, "only a text can stand anywhere, not a tool or a call")
            least = max(LEAST_TOKENS, document.num_recomputed(LEAST_TOKENS) + LEAST_COPIED)
            if end - start < least:
                why = f"a block has at least {least} tokens, this one has {end - start} tokens"
                raise FieldRefused(field, why)
            needed += blocks_for(end - start, size) + 2
            places.append(DocumentPlace(document, start, end))
        if len({place.start for place in places}) < len(places):
            raise FieldRefused("documents[0]", "two documents stand in one place")
        most = cache.pool.num_blocks
        if needed > most:
            why = f"the documents and the prompt take {needed} blocks, and the engine has {most}"
            raise FieldRefused("documents[0]", why)
        return with_documents(query, cache, sorted(places, key=lambda place: place.start))
