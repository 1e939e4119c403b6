"""Approximate prompts: keys and values of exact prompts are copied into them.

A *compressed* prompt begins with the tokens that each layer keeps of a prefix. Slot j of a layer
holds the layer's j-th kept token, so one block table serves all layers. Keys stay rotated as they
were. A later token keeps its position in the whole prompt. Its slot lies `cut` before that
position. The cache counts slots.

A *document* has an exact prompt: the first token of the prompt that it stands in, which the model
attends to most, and the document's tokens. That exact prompt has an entry like any other. In the
larger prompt some of the document's tokens are computed. The keys and values of the others are
copied, and the keys are turned from their old positions to the new ones.

In place of each copied token the prompt has a token made of a digest. The digest covers the kind
and all that is copied, so equal tokens mean equal content. From the first copy on the kind is in
the chain of digests, so no exact prompt finds such blocks. They are found, compared, shared,
leased, evicted and stored like any others.

A prompt that may read a *sibling's* entries is either exact, or it begins with the content of one
of them. In the second case the sibling's keys and values are copied into the prompt's own blocks,
and the first layers are computed. The kind is then in the chain from the first token on. It says
which sibling, how many layers, and up to which token. Each look-up decides anew between the two.
The longest entry is read, and the more exact one of two equally long ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_256
from typing import NamedTuple

from msgspec import structs

from engine.approximate.kinds import Compression, Sibling, documents_kind
from engine.cache.block import Entry
from engine.cache.digests import PromptDigests, pack
from engine.cache.ids import TokenId
from engine.cache.lookup import Mark, Segment, eligible, longest_hit, window
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.protocol import (
    SHARE_PARTS,
    Approximation,
    Breakpoint,
    Document,
    FromDocuments,
    FromSibling,
    HeldName,
)
from engine.sizing import blocks_for

LEAST_TOKENS = 64
"""The fewest tokens of a document. Computing a shorter one is faster than copying it."""
LEAST_COPIED = 16
"""The fewest copied tokens of a document. Each holds seven bits of the document's digest."""
MAX_ENDS = 4
"""The most ends of a sibling's part that a look-up tries: the longest of prompts in memory."""
_IS_SHARE = 1 << 31


@dataclass(frozen=True, slots=True)
class Placed:
    """Tokens of a prompt whose keys and values are copied from an exact prompt."""

    # The exact prompt of these tokens. Its last token is one more, which is never copied.
    origin: CacheQuery
    # The first position of these tokens in the prompt.
    start: int
    # The first copied position. The tokens before it are computed in the prompt.
    copied: int
    # The position behind these tokens.
    end: int
    # A token's position in the prompt minus its position in the origin.
    shift: int = 0
    # Whether the `copied - start` computed tokens are chosen later. They need not be the first.
    is_chosen: bool = False
    # The tokens of the origin that a compressed prefix needs; 0 without compression.
    of: int = 0
    # The sibling's entry that is read; None: the prompt's own blocks have its content already.
    entry: Entry | None = None

    @property
    def begin(self) -> int:
        """The first position that may be copied."""
        return self.start if self.is_chosen else self.copied


class DocumentPlace(NamedTuple):
    """A document, and its positions [start, end) in a prompt."""

    document: Document
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SiblingMark:
    """A breakpoint that may read the sibling's entries."""

    sibling: Sibling
    # The index of the segment that the breakpoint stands behind.
    segment: int
    # The digests of the exact prompt.
    exact: PromptDigests
    # The digests of the same tokens as the sibling wrote them.
    theirs: PromptDigests


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproximatePrompt:
    """One prompt that is made of others."""

    # The prompt in its kind's chain: digests replace copied tokens, a compressed one counts slots.
    query: CacheQuery
    # The copies into it, in the order of their positions, without overlap.
    placed: Sequence[Placed] = ()
    # The tokens of the client's prompt; empty: they are the query's.
    real: Sequence[TokenId] = ()
    compression: Compression | None = None
    sibling_mark: SiblingMark | None = None

    @property
    def report(self) -> Approximation:
        """The approximation that a client is told of."""
        if self.sibling_mark is not None:
            sibling = self.sibling_mark.sibling
            reused = sum(placed.end for placed in self.placed)
            return FromSibling(
                reused=reused,
                recomputed_layers=sibling.own_layers if reused else 0,
                of_layers=sibling.num_layers if reused else 0,
            )
        if self.compression is not None:
            return self.compression.report
        return FromDocuments(
            documents=len(self.placed),
            reused=sum(placed.end - placed.copied for placed in self.placed),
            recomputed=sum(placed.copied - placed.start for placed in self.placed),
        )


def _tokens_for(content: bytes, count: int) -> list[TokenId]:
    """`count` token ids below 128 that stand for this content. Every vocabulary has such ids."""
    return [TokenId(byte & 127) for byte in shake_256(content).digest(count)]


def compressed(
    query: CacheQuery, cache: PrefixCache, compression: Compression
) -> ApproximatePrompt:
    """The compressed prompt, counted in slots. Its origin keeps the prompt's breakpoints and names
    in positions."""

    def slot(end: int | None) -> int | None:
        return None if end is None or end < compression.of else end - compression.cut

    exact = query.tokens[: compression.of]
    with_first = [*exact, exact[0]]
    origin = replace(
        query, tokens=with_first, digests=cache.digests(query.scope, with_first), lookback_to=None
    )
    content = bytes.fromhex(compression.kind.digest) + pack(exact)
    tokens = [*_tokens_for(content, compression.kept), *query.tokens[compression.of :]]
    in_slots = replace(
        query,
        tokens=tokens,
        digests=cache.digests(query.scope, tokens, compression.kind),
        segments=[
            Segment(segment.kind, slot(segment.end), segment.turn) for segment in query.segments
        ],
        breakpoints=[structs.replace(point, keep=None) for point in query.breakpoints],
        names=[HeldName(name.digest, slot(name.tokens) or 0) for name in query.names],
        min_cache_tokens=1,  # the exact prefix was held to the minimum already
        cut=compression.cut,
    )
    return ApproximatePrompt(
        query=in_slots,
        placed=[Placed(origin, 0, 0, compression.kept, of=compression.of)],
        real=query.tokens,
        compression=compression,
    )


def with_documents(
    query: CacheQuery, cache: PrefixCache, documents: Sequence[DocumentPlace]
) -> ApproximatePrompt:
    """The prompt with its documents. They must be in the order of their positions and must not
    overlap."""
    kind = bytes.fromhex(documents_kind(0).digest)
    tokens = list(query.tokens)
    all_placed: list[Placed] = []
    for document, start, end in documents:
        alone = [query.tokens[0], *query.tokens[start:end]]
        origin = replace(
            query,
            tokens=[*alone, alone[0]],
            digests=cache.digests(query.scope, [*alone, alone[0]]),
            segments=[Segment("text", len(alone))],
            breakpoints=[Breakpoint(0, document.ttl)],
            names=[HeldName(document.name, len(alone))] if document.name else [],
            min_cache_tokens=1,
            lookback_to=None,
        )
        number = document.recompute
        is_chosen = isinstance(document.recompute, float)
        if is_chosen:
            number = round(number * SHARE_PARTS) | _IS_SHARE
        copied = start + document.num_recomputed(end - start)
        placed = Placed(origin, start, copied, end, start - 1, is_chosen)
        content = kind + int(number).to_bytes(4) + origin.digests.at(len(alone))
        tokens[placed.begin : end] = _tokens_for(content, end - placed.begin)
        all_placed.append(placed)
    digests = cache.digests(query.scope, tokens, documents_kind(all_placed[0].begin))
    return ApproximatePrompt(
        query=replace(query, tokens=tokens, digests=digests),
        placed=all_placed,
        real=query.tokens,
    )


def with_sibling_mark(
    query: CacheQuery, cache: PrefixCache, sibling: Sibling, segment: int
) -> ApproximatePrompt:
    """The exact prompt, whose breakpoint at `segment` may read the sibling's entries."""
    theirs = cache.digests(query.scope, query.tokens, sibling.kind)
    sibling_mark = SiblingMark(sibling, segment, query.digests, theirs)
    return ApproximatePrompt(query=query, sibling_mark=sibling_mark)


def with_sibling(prompt: ApproximatePrompt, cache: PrefixCache) -> ApproximatePrompt:
    """The prompt that reads the longest entry that is readable now: exact, or a sibling's.

    Nothing is pinned or refreshed.
    """
    sibling_mark = prompt.sibling_mark
    assert sibling_mark is not None
    query = prompt.query
    now = query.arrived_at
    marks = eligible(query.segments, query.breakpoints, query.min_cache_tokens)
    may_read = [mark for mark in marks if mark.segment <= sibling_mark.segment]

    def longest(digests: PromptDigests, some: Sequence[Mark]) -> Entry | None:
        return longest_hit(
            query.segments,
            some,
            lambda tokens: cache.entries.find(digests, tokens, now),
            query.lookback_to,
        )

    exact_query = replace(query, digests=sibling_mark.exact)
    best = ApproximatePrompt(query=exact_query, sibling_mark=sibling_mark)
    most = 0
    entry = longest(sibling_mark.exact, marks)
    if entry is not None:
        most = entry.tokens
    for end in _known_ends(query, sibling_mark, cache, may_read):
        ours = _behind(query, sibling_mark, cache, end, None)
        entry = longest(ours.query.digests, marks)
        # An entry that ends before `end` lacks a part of the sibling's content.
        if entry is not None and entry.tokens >= end and entry.tokens > most:
            best = ours
            most = entry.tokens
    entry = longest(sibling_mark.theirs, may_read)
    size = cache.pool.block_size
    if entry is not None and entry.tokens > most:
        # The sibling's blocks and the copies are in memory at once.
        num_blocks = blocks_for(len(query.tokens), size) + len(entry.blocks) + 2
        if num_blocks <= cache.pool.num_blocks:
            end = min(entry.tokens, len(query.tokens) - 1)
            best = _behind(query, sibling_mark, cache, end, entry)
    return best


def _known_ends(
    query: CacheQuery, sibling_mark: SiblingMark, cache: PrefixCache, marks: Sequence[Mark]
) -> Iterator[int]:
    """Ends of a sibling's part, for which a prompt in memory begins with the same block.

    They are tokens, the longest first, at most MAX_ENDS.
    """
    num_found = 0
    first = query.tokens[: cache.pool.block_size]
    segments = {index for mark in marks for index in window(query.segments, mark.segment)}
    ends = {min(query.segments[index].end or 0, len(query.tokens) - 1) for index in segments}
    if len(first) < cache.pool.block_size:
        return
    for end in sorted(ends - {0}, reverse=True):
        digests = cache.digests(query.scope, first, sibling_mark.sibling.kind_up_to(end))
        if any(pool.find(digests.full[0], digests.packed) for pool in cache.pools):
            yield end
            num_found += 1
            if num_found == MAX_ENDS:
                return


def _behind(
    query: CacheQuery, sibling_mark: SiblingMark, cache: PrefixCache, end: int, entry: Entry | None
) -> ApproximatePrompt:
    """The prompt whose first `end` tokens have the sibling's keys and values.

    They are read from `entry`. If it is None, the prompt's own blocks must have them.
    """
    sibling = sibling_mark.sibling
    # A prompt's last token is never read, so one more stands behind the entry's tokens.
    tokens = [*query.tokens[:end], query.tokens[0]]
    digests = sibling_mark.theirs if entry is None else None
    origin = replace(
        query,
        tokens=tokens,
        digests=digests or cache.digests(query.scope, tokens, sibling.kind),
        breakpoints=[],
        names=[],
    )
    in_kind = cache.digests(query.scope, query.tokens, sibling.kind_up_to(end))
    return ApproximatePrompt(
        query=replace(query, digests=in_kind),
        placed=[Placed(origin, 0, 0, end, entry=entry)],
        real=query.tokens,
        sibling_mark=sibling_mark,
    )
