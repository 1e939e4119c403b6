"""What of the waiting prompts is on the device, and which of them is next for it. Pure.

Requests are admitted in order of arrival. Where the blocks for the first one can only be had by
evicting what others would reuse, the one that has least to compute goes first: its blocks are here
now, and would be computed again later. SGLang admits by the longest cached prefix for the same
reason (Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language Model Programs",
section 3).

Nobody starves. A request is passed MAX_OVERTAKEN times at most. Those that pass it compute no more
tokens than it computes itself, or than MAX_STEPS steps do.

What is here is estimated from digests, without comparing tokens. What a request reuses is decided
at its admission.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.cache.digests import PromptDigests
from engine.cache.pool import BlockPool

MAX_OVERTAKEN = 16
"""How many requests may be admitted before one that came earlier."""
MAX_STEPS = 4
MAX_COMPARED = 16
"""How many requests a step compares."""


class Residency(NamedTuple):
    """Full blocks of a prompt, counted from its beginning.

    `num_blocks` are on the device; the first `num_held` of these have a reference.
    """

    num_blocks: int
    num_held: int


def residency(pool: BlockPool, digests: PromptDigests) -> Residency:
    """O(log n): a chain is evicted from its tail, so bisection finds where it ends.

    Where a block in the middle is gone, the end that is found may be before or behind it.
    """
    num_blocks = _bisect(pool, digests, len(digests.full), is_held=False)
    return Residency(num_blocks, _bisect(pool, digests, num_blocks, is_held=True))


def touch(pool: BlockPool, digests: PromptDigests) -> None:
    """Count the blocks that a prompt begins with as used now: a request for them has come."""
    num_blocks = residency(pool, digests).num_blocks
    blocks = (pool.peek(digest) for digest in digests.full[:num_blocks])
    pool.touch([block for block in blocks if block is not None])


class Waiting(NamedTuple):
    """A request that waits.

    `uncached` are the tokens that it would compute now. `num_unheld` blocks on the device would be
    reused and have no reference. `num_overtaken` requests went before it, and those that passed it
    computed `overtaken` tokens.
    """

    uncached: int
    num_unheld: int
    num_overtaken: int
    overtaken: int


def as_waiting(
    pool: BlockPool, digests: PromptDigests, read: int, *, num_overtaken: int, overtaken: int
) -> Waiting:
    """`read` tokens of the prompt are held for it."""
    here = residency(pool, digests)
    # The last token is always computed.
    reused = min(max(here.num_blocks * pool.block_size, read), digests.num_tokens - 1)
    num_unheld = here.num_blocks - here.num_held
    return Waiting(digests.num_tokens - reused, num_unheld, num_overtaken, overtaken)


def next_by_reuse(line: Sequence[Waiting], pool: BlockPool, step_tokens: int) -> int:
    """The index of the next request. `line` is in order of arrival and not empty.

    A step computes at most `step_tokens`.
    """
    first, *others = line
    spare = pool.num_reclaimable - sum(one.num_unheld for one in others)
    if spare * pool.block_size >= first.uncached:
        return 0
    max_tokens = MAX_STEPS * step_tokens
    best, patience = 0, _patience(first, max_tokens)
    for index, one in enumerate(others, 1):
        if one.uncached < line[best].uncached and one.uncached <= patience:
            best = index
        patience = min(patience, _patience(one, max_tokens))
    return best


def _patience(one: Waiting, max_tokens: int) -> int:
    """How many tokens the next request that passes this one may compute."""
    if one.num_overtaken >= MAX_OVERTAKEN:
        return 0
    return max(one.uncached, max_tokens) - one.overtaken


def _bisect(pool: BlockPool, digests: PromptDigests, high: int, *, is_held: bool) -> int:
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        block = pool.peek(digests.full[middle - 1])
        if block is not None and (block.ref_count or not is_held):
            low = middle
        else:
            high = middle - 1
    return low
