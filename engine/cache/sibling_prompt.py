"""A prompt that may read a sibling's entries: it is exact, or begins with what one of them has.

The sibling's keys and values are copied into the prompt's own blocks, but for the first layers,
which are computed. Then kind, sibling, layers and end are in the chain from the first token on.
Which of both it is, is decided at each look-up: by the longest entry, and of equally long ones by
the more exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.cache.block import Entry
from engine.cache.digests import PromptDigests
from engine.cache.lookup import Mark, eligible, longest_hit, window
from engine.cache.prefix_cache import CacheQuery, Placed, PrefixCache

MAX_ENDS = 4
"""At most so many ends of a sibling's part are tried that prompts in memory have, the longest."""


def with_sibling(query: CacheQuery, cache: PrefixCache) -> CacheQuery:
    """The prompt as it is to be computed now. Nothing is held or refreshed yet."""
    asked, now = query.asked, query.arrived_at
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

    best, most = replace(query, digests=asked.exact, placed=(), real=()), 0
    if (entry := found(asked.exact, marks)) is not None:
        most = entry.tokens
    for end in _known_ends(query, cache, may_read):
        ours = _behind(query, cache, end, None)
        entry = found(ours.digests, marks)
        # One in front of the end has not all that the sibling wrote.
        if entry is not None and entry.tokens >= end and entry.tokens > most:
            best, most = ours, entry.tokens
    entry, size = found(asked.theirs, may_read), cache.pool.block_size
    if entry is not None and entry.tokens > most:
        # The sibling's blocks and the copies are in memory at once.
        num_blocks = -(-len(query.tokens) // size) + len(entry.blocks) + 2
        if num_blocks <= cache.pool.num_blocks:
            best = _behind(query, cache, min(entry.tokens, len(query.tokens) - 1), entry)
    return best


def _known_ends(query: CacheQuery, cache: PrefixCache, marks: Sequence[Mark]) -> Iterator[int]:
    """The ends of a sibling's part that prompts in memory have which begin like this one."""
    asked, num_found = query.asked, 0
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
