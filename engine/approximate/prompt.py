"""Approximate prompts: keys and values of exact prompts are copied into them.

A *compressed* prompt begins with what each layer keeps of its first tokens. Slot j of a layer holds
the layer's j-th kept token, so one block table serves all layers. Keys stay rotated as they were. A
later token keeps its position in the whole prompt, and its slot lies `cut` before. The cache counts
slots.

A *document* that stands anywhere is by itself an exact prompt: the first token of the prompt that
it stands in, which the model attends to most, and its own tokens. It has an entry like any other.
Where it stands some of its tokens are computed, and the others' keys and values are copied, the
keys turned from their old positions to the new ones.

What is copied is stood for by bytes of a digest of all its tokens and of the kind, so that equal
ones mean equal content, and the kind is in the chain of digests from there on. So such blocks are
found, compared, shared, leased, evicted and stored like any others, and no exact prompt finds them.

A prompt that may read a *sibling's* entries is exact, or begins with what one of them has. The
sibling's keys and values are copied into the prompt's own blocks, but for the first layers, which
are computed. Then kind, sibling, layers and end are in the chain from the first token on. Which of
both it is, is decided at each look-up: by the longest entry, and of equally long ones by the more
exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_256

from msgspec import structs

from engine.approximate.kinds import Compression, Sibling, blocks_domain
from engine.cache.block import Entry
from engine.cache.digests import PromptDigests, pack
from engine.cache.ids import TokenId
from engine.cache.lookup import Mark, Segment, eligible, longest_hit, window
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.protocol import (
    SHARE_PARTS,
    Approximation,
    Blocks,
    Breakpoint,
    Document,
    FromSibling,
    HeldName,
)
from engine.sizing import blocks_for

LEAST_TOKENS = 64
"""A shorter document is computed sooner than it is copied."""
LEAST_COPIED = 16
"""So many tokens stand for a document's digest in a prompt, with seven bits each."""
MAX_ENDS = 4
"""At most so many ends of a sibling's part are tried that prompts in memory have, the longest."""
_IS_SHARE = 1 << 31


@dataclass(frozen=True, slots=True)
class Placed:
    """What stands at positions [start, end) of a prompt, and the exact prompt that it is by itself.

    All but `copied - start` tokens are copied.
    """

    # The exact prompt. Its last token stands behind what is copied, because a prompt's last token
    # is never read. A document's first token is the prompt's.
    origin: CacheQuery
    start: int
    # Behind the first tokens, which are computed where it stands.
    copied: int
    end: int
    # So many positions behind those of the origin.
    shift: int = 0
    # What is computed is chosen later, and is not the first tokens.
    is_chosen: bool = False
    # Of a compressed prefix: how many tokens of the origin are needed.
    of: int = 0
    # What the sibling wrote. Without one it is in the prompt's own blocks.
    entry: Entry | None = None

    @property
    def begin(self) -> int:
        """Where what is copied begins."""
        return self.start if self.is_chosen else self.copied


@dataclass(frozen=True, slots=True)
class SiblingAsked:
    """One breakpoint may read the sibling's entries."""

    sibling: Sibling
    # The breakpoint's.
    segment: int
    # Those of the exact prompt.
    exact: PromptDigests
    # Those of what the sibling wrote of it.
    theirs: PromptDigests


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproximatePrompt:
    """One prompt that is made of others."""

    # The prompt in the chain of its kind. Of a compressed one it counts slots. Its tokens stand for
    # what is copied.
    query: CacheQuery
    # What is copied into it, in order, apart: documents, what is kept of the prefix, or what a
    # sibling wrote.
    placed: Sequence[Placed] = ()
    # The whole prompt's own tokens. Empty where they are the query's.
    real: Sequence[TokenId] = ()
    compression: Compression | None = None
    asked: SiblingAsked | None = None

    @property
    def told(self) -> Approximation:
        """What the answer is computed behind."""
        if self.asked is not None:
            sibling = self.asked.sibling
            reused = sum(placed.end for placed in self.placed)
            layers = (sibling.own_layers, sibling.num_layers) if reused else (0, 0)
            return FromSibling(reused=reused, recomputed_layers=layers[0], of_layers=layers[1])
        if self.compression is not None:
            return self.compression.told
        return Blocks(
            documents=len(self.placed),
            reused=sum(placed.end - placed.copied for placed in self.placed),
            recomputed=sum(placed.copied - placed.start for placed in self.placed),
        )


def _standing(content: bytes, count: int) -> list[TokenId]:
    """Tokens that stand for something. Every vocabulary has these."""
    return [TokenId(byte & 127) for byte in shake_256(content).digest(count)]


def compressed(query: CacheQuery, cache: PrefixCache, how: Compression) -> ApproximatePrompt:
    """The prompt in slots. Its origin has the prompt's marks and names."""

    def slot(end: int | None) -> int | None:
        return None if end is None or end < how.of else end - how.cut

    exact = query.tokens[: how.of]
    with_first = [*exact, exact[0]]
    origin = replace(
        query, tokens=with_first, digests=cache.digests(query.scope, with_first), lookback_to=None
    )
    content = bytes.fromhex(how.domain.digest) + pack(exact)
    tokens = [*_standing(content, how.kept), *query.tokens[how.of :]]
    in_slots = replace(
        query,
        tokens=tokens,
        digests=cache.digests(query.scope, tokens, how.domain),
        segments=[
            Segment(segment.kind, slot(segment.end), segment.turn) for segment in query.segments
        ],
        breakpoints=[structs.replace(point, keep=None) for point in query.breakpoints],
        names=[HeldName(name.digest, slot(name.tokens) or 0) for name in query.names],
        min_tokens=1,  # it was asked of the prefix that is compressed
        cut=how.cut,
    )
    return ApproximatePrompt(
        query=in_slots,
        placed=[Placed(origin, 0, 0, how.kept, of=how.of)],
        real=query.tokens,
        compression=how,
    )


def with_documents(
    query: CacheQuery, cache: PrefixCache, documents: Sequence[tuple[Document, int, int]]
) -> ApproximatePrompt:
    """The prompt with documents, each with its first position and its end, in order, apart."""
    kind = bytes.fromhex(blocks_domain(0).digest)
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
            min_tokens=1,
            lookback_to=None,
        )
        number = document.recompute
        is_chosen = isinstance(document.recompute, float)
        if is_chosen:
            number = round(number * SHARE_PARTS) | _IS_SHARE
        copied = start + document.num_recomputed(end - start)
        placed = Placed(origin, start, copied, end, start - 1, is_chosen)
        content = kind + int(number).to_bytes(4) + origin.digests.at(len(alone))
        tokens[placed.begin : end] = _standing(content, end - placed.begin)
        all_placed.append(placed)
    digests = cache.digests(query.scope, tokens, blocks_domain(all_placed[0].begin))
    return ApproximatePrompt(
        query=replace(query, tokens=tokens, digests=digests),
        placed=all_placed,
        real=query.tokens,
    )


def asking_sibling(
    query: CacheQuery, cache: PrefixCache, sibling: Sibling, segment: int
) -> ApproximatePrompt:
    """The exact prompt, whose breakpoint at `segment` may read the sibling's entries."""
    theirs = cache.digests(query.scope, query.tokens, sibling.domain)
    asked = SiblingAsked(sibling, segment, query.digests, theirs)
    return ApproximatePrompt(query=query, asked=asked)


def with_sibling(prompt: ApproximatePrompt, cache: PrefixCache) -> ApproximatePrompt:
    """The prompt as it is to be computed now. Nothing is held or refreshed yet."""
    asked = prompt.asked
    assert asked is not None
    query = prompt.query
    now = query.arrived_at
    marks = eligible(query.segments, query.breakpoints, query.min_tokens)
    may_read = [mark for mark in marks if mark.segment <= asked.segment]

    def longest(digests: PromptDigests, some: Sequence[Mark]) -> Entry | None:
        return longest_hit(
            query.segments,
            some,
            lambda tokens: cache.entries.find(digests, tokens, now),
            query.lookback_to,
        )

    best = ApproximatePrompt(query=replace(query, digests=asked.exact), asked=asked)
    most = 0
    entry = longest(asked.exact, marks)
    if entry is not None:
        most = entry.tokens
    for end in _known_ends(query, asked, cache, may_read):
        ours = _behind(query, asked, cache, end, None)
        entry = longest(ours.query.digests, marks)
        # One in front of the end has not all that the sibling wrote.
        if entry is not None and entry.tokens >= end and entry.tokens > most:
            best = ours
            most = entry.tokens
    entry = longest(asked.theirs, may_read)
    size = cache.pool.block_size
    if entry is not None and entry.tokens > most:
        # The sibling's blocks and the copies are in memory at once.
        num_blocks = blocks_for(len(query.tokens), size) + len(entry.blocks) + 2
        if num_blocks <= cache.pool.num_blocks:
            best = _behind(query, asked, cache, min(entry.tokens, len(query.tokens) - 1), entry)
    return best


def _known_ends(
    query: CacheQuery, asked: SiblingAsked, cache: PrefixCache, marks: Sequence[Mark]
) -> Iterator[int]:
    """The ends of a sibling's part that prompts in memory have which begin like this one."""
    num_found = 0
    first = query.tokens[: cache.pool.block_size]
    segments = {index for mark in marks for index in window(query.segments, mark.segment)}
    ends = {min(query.segments[index].end or 0, len(query.tokens) - 1) for index in segments}
    if len(first) < cache.pool.block_size:
        return
    for end in sorted(ends - {0}, reverse=True):
        digests = cache.digests(query.scope, first, asked.sibling.domain_of(end))
        if any(pool.find(digests.full[0], digests.packed) for pool in cache.pools):
            yield end
            num_found += 1
            if num_found == MAX_ENDS:
                return


def _behind(
    query: CacheQuery, asked: SiblingAsked, cache: PrefixCache, end: int, entry: Entry | None
) -> ApproximatePrompt:
    """The prompt whose first `end` tokens are the sibling's, read from this entry if any."""
    sibling = asked.sibling
    # A prompt's last token is never read: one stands behind those of the entry.
    tokens = [*query.tokens[:end], query.tokens[0]]
    digests = asked.theirs if entry is None else None
    origin = replace(
        query,
        tokens=tokens,
        digests=digests or cache.digests(query.scope, tokens, sibling.domain),
        breakpoints=[],
        names=[],
    )
    in_kind = cache.digests(query.scope, query.tokens, sibling.domain_of(end))
    return ApproximatePrompt(
        query=replace(query, digests=in_kind),
        placed=[Placed(origin, 0, 0, end, entry=entry)],
        real=query.tokens,
        asked=asked,
    )
