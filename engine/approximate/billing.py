"""How documents' tokens are billed: read or written with the TTL of their own entries."""

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
    # The entry was written with this TTL. None: it was read.
    ttl: Ttl | None


class DocumentsResult(NamedTuple):
    """What became of the entries of a prompt's documents."""

    # The tokens that they have, behind what was read of the prompt.
    pieces: list[Piece]
    # Where they were read from.
    tiers: list[Tier]
    held: list[ChainHeld]


def write_documents(
    cache: PrefixCache,
    prompt: ApproximatePrompt,
    lookup: Lookup,
    documents: Sequence[Lookup],
    placings: Sequence[Placing],
    now: float,
) -> DocumentsResult:
    """Write the entries of a prompt's documents, which are looked up and pinned in `documents`.

    What the prompt's own blocks have is read too if the entry was there.
    """
    result = DocumentsResult([], [], [])
    tables = {id(placing.placed): placing.table for placing in placings}
    for placed, document in zip(prompt.placed, documents, strict=False):
        tier: Tier | None
        piece = Piece(max(placed.copied, lookup.read), placed.end, None)
        table = tables.get(id(placed))
        if prompt.sibling_mark is not None:
            # Its entry is the sibling's alone. It is not written, leased or counted here.
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
    """The usage of a prompt with documents; `usage` has its own entries alone.

    The pieces lie behind what was read. A token is billed once, with the longer TTL.
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
            else:  # an entry of the prompt keeps it for as long
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
