"""Documents that stand anywhere in a prompt, as the cache sees them.

A document by itself is an exact prompt: the first token of the prompt that it stands in, which the
model attends to most, and its own tokens. It has an entry like any other. Where it stands in a
prompt its first tokens are computed, and the others' keys and values are copied into the prompt's
own blocks, the keys turned from their old positions to the new ones.

In the prompt those others are stood for by bytes of a digest of the document and of the kind, and
from the first of them on the kind is in the chain of digests too. So what is computed behind a
document is found, shared, leased and stored like all else, by prompts with equal documents in equal
places alone. No exact prompt finds it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_256

from engine.cache.digests import ActiveAdapter
from engine.cache.ids import TokenId
from engine.cache.lookup import Piece, Segment
from engine.cache.prefix_cache import CacheQuery, Found, Placed, PrefixCache
from engine.cache.table import BlockCopy, BlockTable
from engine.protocol import Breakpoint, Document, Tier

LEAST_TOKENS = 64
"""A shorter document is computed sooner than it is copied."""
LEAST_COPIED = 16
"""So many tokens stand for a document's digest in a prompt, with seven bits each."""
_MAGIC = b"blocks 1"


@dataclass(slots=True, eq=False)
class Placing:
    """A document of a sequence whose `ranges` of positions are to be copied. `table` has it.

    `num_reused` of the copied tokens did not go through the model for it.
    """

    placed: Placed
    found: Found
    ranges: list[tuple[int, int]]
    table: BlockTable | None = None
    num_reused: int = 0


def is_placing(domain: ActiveAdapter | None) -> bool:
    """Whether a chain of this domain has documents in it."""
    return domain is not None and bytes.fromhex(domain.digest).startswith(_MAGIC)


def with_documents(
    query: CacheQuery, cache: PrefixCache, documents: Sequence[tuple[Document, int, int]]
) -> CacheQuery:
    """The prompt with documents, each with its first position and its end, in order, apart."""
    kind = _MAGIC.ljust(32, b"\0")
    tokens, placed = list(query.tokens), list[Placed]()
    for document, start, end in documents:
        own = [query.tokens[0], *query.tokens[start:end]]
        origin = replace(
            query,
            tokens=[*own, own[0]],
            digests=cache.digests(query.scope, [*own, own[0]]),
            segments=[Segment("text", len(own))],
            breakpoints=[Breakpoint(0, document.ttl)],
            names=[],
            min_tokens=1,
            lookback_to=None,
        )
        copied = start + document.recompute
        told = kind + document.recompute.to_bytes(4) + origin.digests.at(len(own))
        standing = shake_256(told).digest(end - copied)
        tokens[copied:end] = [TokenId(byte & 127) for byte in standing]
        placed.append(Placed(origin, start, copied, end))
    domain = ActiveAdapter(kind.hex(), placed[0].copied)
    return replace(
        query, tokens=tokens, digests=cache.digests(query.scope, tokens, domain), placed=placed
    )


def new_placings(
    cache: PrefixCache, query: CacheQuery, table: BlockTable, found: Found | None
) -> list[Placing]:
    """The documents that a prompt's table lacks. `found` has their look-ups, None once the
    response has begun."""
    placings = []
    for number, one in enumerate(query.placed):
        if ranges := list(table.gaps(one.end, one.copied)):
            own = Found([], None, 0, None) if found is None else found.documents[number]
            placings.append(Placing(one, own, ranges))
    return placings


def begin_document(cache: PrefixCache, placing: Placing) -> list[BlockCopy]:
    """Fill a table for a document alone. Raises NoFreeBlocks like `PrefixCache.begin`."""
    placed = placing.placed
    table = cache.new_table(placed.origin)
    copies = cache.begin(placed.origin, placing.found, table)
    placing.table = table
    moved = [(start - placed.shift, end - placed.shift) for start, end in placing.ranges]
    gaps = (gap for start, end in moved for gap in table.gaps(end, start))
    placing.num_reused = _total(moved) - _total(gaps)
    return copies


def _total(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in ranges)


def write_documents(
    cache: PrefixCache, query: CacheQuery, found: Found, placings: Sequence[Placing], now: float
) -> tuple[list[Piece], list[Tier]]:
    """Write the entries of a prompt's documents.

    Return the tokens that are theirs behind what was `found` of the prompt, and the tiers that they
    were read from. What the prompt's own blocks have is read too if the entry was there.
    """
    pieces, tiers = list[Piece](), list[Tier]()
    tables = {id(one.placed): one.table for one in placings}
    for placed, own in zip(query.placed, found.documents, strict=True):
        piece = Piece(max(placed.copied, found.read), placed.end, None)
        if (table := tables.get(id(placed))) is not None:
            tier = cache.write(placed.origin, own, table, now).read_tier
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
    return pieces, tiers
