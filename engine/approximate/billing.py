"""How the tokens of documents are billed: as read, or as written with their own entries' TTL."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import structs

from engine.approximate.placing import Placing
from engine.approximate.prompt import ApproximatePrompt
from engine.cache.prefix_cache import Lookup, PrefixCache
from engine.protocol import (
    TTLS,
    WRITE_FIELDS,
    ChainHeld,
    InputUsage,
    Tier,
    Ttl,
    outlives,
)


class Piece(NamedTuple):
    """Tokens [start, end) of a prompt that were copied from a document's entry."""

    start: int
    end: int
    # The TTL with which the entry was written; None: the entry was read.
    ttl: Ttl | None


class DocumentsResult(NamedTuple):
    """What became of the entries of a prompt's documents."""

    # The copied tokens behind the read part of the prompt.
    pieces: list[Piece]
    # The tiers that the entries were read from.
    tiers: list[Tier]
    # The names that the written entries hold.
    held: list[ChainHeld]


def write_documents(
    cache: PrefixCache,
    prompt: ApproximatePrompt,
    lookup: Lookup,
    documents: Sequence[Lookup],
    placings: Sequence[Placing],
    now: float,
) -> DocumentsResult:
    """Write the entries of a prompt's documents. `documents` are their pinned look-ups, in order.

    A copy that was in the prompt's own blocks before also counts as read, if the document's entry
    was there. The look-ups are given up.
    """
    result = DocumentsResult([], [], [])
    tables = {id(placing.placed): placing.table for placing in placings}
    for placed, document in zip(prompt.placed, documents, strict=False):
        tier: Tier | None
        piece = Piece(max(placed.copied, lookup.read), placed.end, None)
        table = tables.get(id(placed))
        if prompt.sibling_mark is not None:
            # The entry belongs to the sibling. It is not written, leased or counted here.
            tier = None if table is None else table.origin(placed.end)
        elif table is not None:
            entry = cache.write(placed.origin, document, table, now)
            tier = entry.read_tier
            result.held.extend(entry.held)
        else:
            if document.hit is not None and piece.start < piece.end:
                document.hit.reads += 1
            tier = "device"
        cache.give_up(document)
        if document.read:
            result.tiers.append(tier or "device")
        elif table is not None:
            piece = piece._replace(ttl=placed.origin.breakpoints[0].ttl)
        else:
            continue
        if piece.start < piece.end:
            result.pieces.append(piece)
    return result


def with_pieces(usage: InputUsage, pieces: Iterable[Piece]) -> InputUsage:
    """The usage of a prompt with its documents. `usage` is that of the prompt's own entries alone.

    The pieces lie behind the read tokens. A token that is in two entries is billed once, with the
    longer TTL.
    """
    read = usage.cache_read_tokens
    writes = usage.writes
    reused = read + usage.automatic_tokens
    end = read
    classes: list[tuple[int, int, Ttl]] = []
    for ttl in reversed(TTLS):
        classes.append((end, end + writes[ttl], ttl))
        end += writes[ttl]
    for piece in pieces:
        num_moved = piece.end - piece.start
        for start, stop, ttl in classes:
            num_both = max(min(piece.end, stop) - max(piece.start, start), 0)
            if piece.ttl is None or outlives(piece.ttl, ttl):
                writes[ttl] -= num_both
            else:  # an entry of the prompt keeps these tokens at least as long
                num_moved -= num_both
        if piece.ttl is None:
            read += num_moved
        else:
            writes[piece.ttl] += num_moved
    return structs.replace(
        usage,
        input_tokens=usage.prompt_tokens - read - sum(writes.values()),
        cache_read_tokens=read,
        automatic_tokens=reused - read,
        **{WRITE_FIELDS[ttl]: tokens for ttl, tokens in writes.items()},
    )
