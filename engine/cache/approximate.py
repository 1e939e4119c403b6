"""Approximate prompts as the cache sees them: keys and values of an exact prompt are copied in.

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

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import shake_256

from msgspec import structs

from engine.cache.block import Entry
from engine.cache.digests import ActiveAdapter, PromptDigests, pack
from engine.cache.ids import TokenId
from engine.cache.kinds import Compression
from engine.cache.lookup import Mark, Piece, Segment, eligible, longest_hit, window
from engine.cache.prefix_cache import CacheQuery, Found, Placed, PrefixCache
from engine.cache.table import BlockCopy, BlockTable
from engine.protocol import SHARE_PARTS, Breakpoint, ChainHeld, Document, HeldName, Tier
from engine.sizing import blocks_for

LEAST_TOKENS = 64
"""A shorter document is computed sooner than it is copied."""
LEAST_COPIED = 16
"""So many tokens stand for a document's digest in a prompt, with seven bits each."""
MAX_ENDS = 4
"""At most so many ends of a sibling's part are tried that prompts in memory have, the longest."""
_MAGIC = b"blocks 1"
_IS_SHARE = 1 << 31
Range = tuple[int, int]


@dataclass(slots=True, eq=False)
class Placing:
    """What is to be copied into a sequence, to `ranges` of its positions. `table` has it.

    Of these the positions `chosen`, in order, are computed after all. Those `computed` went through
    the model for it.
    """

    placed: Placed
    found: Found
    ranges: list[Range]
    table: BlockTable | None = None
    computed: list[Range] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)

    @property
    def copied(self) -> Iterator[Range]:
        """The ranges without what is computed after all."""
        for start, end in self.ranges:
            for position in self.chosen[slice(*self._places(start, end))]:
                if start < position:
                    yield start, position
                start = position + 1
            if start < end:
                yield start, end

    @property
    def num_reused(self) -> int:
        """The copied tokens that did not go through the model for it."""
        again = (stop - start for start, stop in (self._places(*one) for one in self.computed))
        return _total(self.copied) - _total(self.computed) + sum(again)

    def _places(self, start: int, end: int) -> Range:
        return bisect_left(self.chosen, start), bisect_left(self.chosen, end)


def is_placing(domain: ActiveAdapter | None) -> bool:
    """Whether a chain of this domain has documents in it."""
    return domain is not None and bytes.fromhex(domain.digest).startswith(_MAGIC)


def _standing(told: bytes, count: int) -> list[TokenId]:
    """Tokens that stand for something. Every vocabulary has these."""
    return [TokenId(byte & 127) for byte in shake_256(told).digest(count)]


def compressed(query: CacheQuery, cache: PrefixCache, how: Compression) -> CacheQuery:
    """The prompt in slots. Its `origin` has the prompt's marks and names."""

    def slot(end: int | None) -> int | None:
        return None if end is None or end < how.of else end - how.cut

    exact = query.tokens[: how.of]
    own = [*exact, exact[0]]
    origin = replace(query, tokens=own, digests=cache.digests(query.scope, own), lookback_to=None)
    told = bytes.fromhex(how.domain.digest) + pack(exact)
    tokens = [*_standing(told, how.kept), *query.tokens[how.of :]]
    return replace(
        query,
        tokens=tokens,
        digests=cache.digests(query.scope, tokens, how.domain),
        segments=[Segment(one.kind, slot(one.end), one.turn) for one in query.segments],
        breakpoints=[structs.replace(one, keep=None) for one in query.breakpoints],
        names=[HeldName(one.digest, slot(one.tokens) or 0) for one in query.names],
        min_tokens=1,  # it was asked of the prefix that is compressed
        compression=how,
        placed=[Placed(origin, 0, 0, how.kept, of=how.of)],
        real=query.tokens,
    )


def with_documents(
    query: CacheQuery, cache: PrefixCache, documents: Sequence[tuple[Document, int, int]]
) -> CacheQuery:
    """The prompt with documents, each with its first position and its end, in order, apart."""
    kind = _MAGIC.ljust(32, b"\0")
    tokens = list(query.tokens)
    placed = list[Placed]()
    for document, start, end in documents:
        own = [query.tokens[0], *query.tokens[start:end]]
        origin = replace(
            query,
            tokens=[*own, own[0]],
            digests=cache.digests(query.scope, [*own, own[0]]),
            segments=[Segment("text", len(own))],
            breakpoints=[Breakpoint(0, document.ttl)],
            names=[HeldName(document.name, len(own))] if document.name else [],
            min_tokens=1,
            lookback_to=None,
        )
        number = document.recompute
        is_chosen = isinstance(document.recompute, float)
        if is_chosen:
            number = round(number * SHARE_PARTS) | _IS_SHARE
        copied = start + document.num_recomputed(end - start)
        one = Placed(origin, start, copied, end, start - 1, is_chosen)
        told = kind + int(number).to_bytes(4) + origin.digests.at(len(own))
        tokens[one.begin : end] = _standing(told, end - one.begin)
        placed.append(one)
    domain = ActiveAdapter(kind.hex(), placed[0].begin)
    digests = cache.digests(query.scope, tokens, domain)
    return replace(query, tokens=tokens, digests=digests, placed=placed, real=query.tokens)


def new_placings(query: CacheQuery, table: BlockTable, found: Found | None) -> list[Placing]:
    """What a prompt's table lacks of what is copied. `found` has the documents' look-ups, None once
    the response has begun."""
    placings = []
    for number, one in enumerate(query.placed):
        is_held = found is not None and query.compression is None
        own = found.documents[number] if found and is_held else Found([], None, 0, None)
        # What a sibling wrote is read or not there: it is never computed in its place.
        if query.asked is not None and own.hit is None:
            continue
        if ranges := list(table.gaps(one.end, one.begin)):
            placings.append(Placing(one, own, ranges))
    return placings


def begin_placing(cache: PrefixCache, placing: Placing) -> list[BlockCopy]:
    """Fill a table for an exact prompt that is copied. Raises NoFreeBlocks like
    `PrefixCache.begin`."""
    placed = placing.placed
    table = cache.new_table(placed.origin)
    copies = cache.begin(placed.origin, placing.found, table)
    placing.table = table
    shift = placed.shift
    ranges = [(0, placed.of)] if placed.of else placing.ranges
    moved = ((start - shift, end - shift) for start, end in ranges)
    gaps = (gap for start, end in moved for gap in table.gaps(end, start))
    placing.computed = [(start + shift, end + shift) for start, end in gaps]
    return copies


def _total(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


def write_documents(
    cache: PrefixCache, query: CacheQuery, found: Found, placings: Sequence[Placing], now: float
) -> tuple[list[Piece], list[Tier], list[ChainHeld]]:
    """Write the entries of a prompt's documents.

    Return the tokens that are theirs behind what was `found` of the prompt, the tiers that they
    were read from, and their names. What the prompt's own blocks have is read too if the entry was
    there.
    """
    pieces = list[Piece]()
    tiers = list[Tier]()
    held = list[ChainHeld]()
    tables = {id(one.placed): one.table for one in placings}
    for placed, own in zip(query.placed, found.documents, strict=False):
        tier: Tier | None
        piece = Piece(max(placed.copied, found.read), placed.end, None)
        table = tables.get(id(placed))
        if query.asked is not None:
            # Its entry is the sibling's alone: it is not written, leased or counted here.
            tier = None if table is None else table.origin(placed.end)
            cache.let_go(own)
        elif table is not None:
            written = cache.write(placed.origin, own, table, now)
            tier = written.read_tier
            held += [written.held] if written.held is not None else []
        else:
            if own.hit is not None and piece.start < piece.end:
                own.hit.reads += 1
            tier = "device"
            cache.let_go(own)
        if own.read:
            tiers.append(tier or "device")
        elif table is not None:
            piece = piece._replace(ttl=placed.origin.breakpoints[0].ttl)
        else:
            continue
        if piece.start < piece.end:
            pieces.append(piece)
    return pieces, tiers, held


def with_sibling(query: CacheQuery, cache: PrefixCache) -> CacheQuery:
    """The prompt as it is to be computed now. Nothing is held or refreshed yet."""
    asked = query.asked
    now = query.arrived_at
    assert asked is not None
    marks = eligible(query.segments, query.breakpoints, query.min_tokens)
    may_read = [mark for mark in marks if mark.segment <= asked.segment]

    def found(digests: PromptDigests, some: Sequence[Mark]) -> Entry | None:
        return longest_hit(
            query.segments,
            some,
            lambda tokens: cache.entries.find(digests, tokens, now),
            query.lookback_to,
        )

    best = replace(query, digests=asked.exact, placed=(), real=())
    most = 0
    if (entry := found(asked.exact, marks)) is not None:
        most = entry.tokens
    for end in _known_ends(query, cache, may_read):
        ours = _behind(query, cache, end, None)
        entry = found(ours.digests, marks)
        # One in front of the end has not all that the sibling wrote.
        if entry is not None and entry.tokens >= end and entry.tokens > most:
            best = ours
            most = entry.tokens
    entry = found(asked.theirs, may_read)
    size = cache.pool.block_size
    if entry is not None and entry.tokens > most:
        # The sibling's blocks and the copies are in memory at once.
        num_blocks = blocks_for(len(query.tokens), size) + len(entry.blocks) + 2
        if num_blocks <= cache.pool.num_blocks:
            best = _behind(query, cache, min(entry.tokens, len(query.tokens) - 1), entry)
    return best


def _known_ends(query: CacheQuery, cache: PrefixCache, marks: Sequence[Mark]) -> Iterator[int]:
    """The ends of a sibling's part that prompts in memory have which begin like this one."""
    asked = query.asked
    num_found = 0
    assert asked is not None
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


def _behind(query: CacheQuery, cache: PrefixCache, end: int, entry: Entry | None) -> CacheQuery:
    """The prompt whose first `end` tokens are the sibling's, read from this entry if any."""
    assert query.asked is not None
    sibling = query.asked.sibling
    # A prompt's last token is never read: one stands behind those of the entry.
    tokens = [*query.tokens[:end], query.tokens[0]]
    digests = query.asked.theirs if entry is None else None
    origin = replace(
        query,
        tokens=tokens,
        digests=digests or cache.digests(query.scope, tokens, sibling.domain),
        breakpoints=[],
        names=[],
        asked=None,
        placed=(),
        real=(),
    )
    return replace(
        query,
        digests=cache.digests(query.scope, query.tokens, sibling.domain_of(end)),
        placed=[Placed(origin, 0, 0, end, entry=entry)],
        real=query.tokens,
    )
