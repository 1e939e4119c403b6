"""Approximate prompts: keys and values of exact prompts are copied into them.

A *compressed* prompt begins with what each layer keeps of its first tokens. Slot j of a layer holds
the layer's j-th kept token, so one block table serves all layers. Keys stay rotated as they were. A
later token keeps its position in the whole prompt, and its slot lies `cut` before. The cache counts
slots.

A *document* that stands anywhere is by itself an exact prompt: the first token of the prompt that
it stands in, which the model attends to most, and its own tokens. It has an entry like any other.
Where it stands some of its tokens are computed, and the others' keys and values are copied, the
keys turned from their old positions to the new ones.

Where something is copied, the prompt's tokens are bytes of a digest, of all that is copied and of
the kind. So equal tokens mean equal content. From there on the kind is in the chain of digests, so
no exact prompt finds such blocks. They are found, compared, shared, leased, evicted and stored like
any others.

A prompt that may read a *sibling's* entries is exact, or begins with what one of them has. Then the
sibling's keys and values are copied into the prompt's own blocks, and the first layers are
computed. The kind is in the chain from the first token on: it says which sibling, how many layers,
and up to which token. Each look-up decides anew between exact and copied. The longest entry is
read, and of equally long ones the more exact.
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
"""A shorter document is computed sooner than it is copied."""
LEAST_COPIED = 16
"""How many tokens stand for a document's digest in a prompt. Each has seven bits of it."""
MAX_ENDS = 4
"""How many ends of a sibling's part are tried at most: the longest ones of prompts in memory."""
_IS_SHARE = 1 << 31


@dataclass(frozen=True, slots=True)
class Placed:
    """Tokens of a prompt whose keys and values are copied from an exact prompt."""

    # The exact prompt that has just these tokens. It ends with one token more, which is computed
    # and not copied. A document's exact prompt begins with the prompt's first token.
    origin: CacheQuery
    # They stand at positions [start, end) of the prompt.
    start: int
    # The first `copied - start` of them are computed where they stand.
    copied: int
    end: int
    # Their positions minus those in the origin.
    shift: int = 0
    # Which tokens are computed is chosen when all others are in memory. They need not be the first.
    is_chosen: bool = False
    # A compressed prefix needs so many tokens of its origin.
    of: int = 0
    # The sibling's entry that is read. None: the prompt's own blocks have it already.
    entry: Entry | None = None

    @property
    def begin(self) -> int:
        """Where the copy begins."""
        return self.start if self.is_chosen else self.copied


class DocumentPlace(NamedTuple):
    """A document, and the positions [start, end) of a prompt at which it stands."""

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

    # The prompt in the chain of its kind. Where something is copied other tokens stand for it. A
    # compressed prompt's tokens are counted in slots.
    query: CacheQuery
    # What is copied into it, in the order of its positions, without overlap.
    placed: Sequence[Placed] = ()
    # The tokens that the client's prompt has. Empty where they are the query's.
    real: Sequence[TokenId] = ()
    compression: Compression | None = None
    sibling_mark: SiblingMark | None = None

    @property
    def report(self) -> Approximation:
        """What stands in front of the answer, as a client is told."""
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
    """Tokens that stand for this content. Every vocabulary has them."""
    return [TokenId(byte & 127) for byte in shake_256(content).digest(count)]


def compressed(
    query: CacheQuery, cache: PrefixCache, compression: Compression
) -> ApproximatePrompt:
    """The prompt in slots. Its origin has the prompt's marks and names."""

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
        min_cache_tokens=1,  # the minimum was asked of the prefix that is compressed
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
    """The prompt with its documents, which are in order and do not overlap."""
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
    """The prompt as it is to be computed now. Nothing is pinned or refreshed yet."""
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
        # One in front of the end has not all that the sibling wrote.
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
    """The ends of a sibling's part that prompts in memory have which begin like this one."""
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
    """The prompt whose first `end` tokens are the sibling's, read from this entry if any."""
    sibling = sibling_mark.sibling
    # A prompt's last token is never read: one stands behind those of the entry.
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
