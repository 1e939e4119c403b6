"""What a memory of blocks would have read: with least recently used, and by Belady's bound.

The models are simple, and independent of the engine. Both have the engine's memory: a prompt that
runs has all its blocks in it, and only whole blocks in front of its last token can be read, since
that token is always computed.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.bench.reuse.traces import Request, Trace

SPARE_BLOCKS = 2
"""The fewest blocks that a prompt leaves free. An engine refuses longer prompts."""
NEVER = 2**31


@dataclass(slots=True)
class Reads:
    """Tokens that were read and those of the prompts, by group; and the refused requests."""

    read: Counter[str] = field(default_factory=Counter)
    prompt: Counter[str] = field(default_factory=Counter)
    num_refused: int = 0

    def add(self, request: Request, tokens: int) -> None:
        self.read[request.group] += tokens
        self.prompt[request.group] += request.tokens

    @property
    def share(self) -> float:
        """The share of all prompts' tokens that were read."""
        return self.read.total() / max(self.prompt.total(), 1)

    def share_of(self, group: str) -> float:
        return self.read[group] / max(self.prompt[group], 1)


def fits(request: Request, num_blocks: int) -> bool:
    return len(request.blocks) <= num_blocks - SPARE_BLOCKS


def replay_lru(trace: Trace, num_blocks: int) -> Reads:
    """The least recently used block goes first; among the blocks of one prompt, the last one."""
    reads = Reads()
    cached: OrderedDict[int, None] = OrderedDict()
    for request in trace.requests:
        if not fits(request, num_blocks):
            reads.num_refused += 1
            continue
        blocks = request.blocks
        hit = num_readable(request, trace.block_size)
        for place in range(hit):
            if blocks[place] not in cached:
                hit = place
                break
            cached.move_to_end(blocks[place])
        num_new = len(blocks) - hit
        while len(cached) + num_new > num_blocks:
            cached.popitem(last=False)
        for block in reversed(blocks[: request.tokens // trace.block_size]):
            cached[block] = None
            cached.move_to_end(block)
        reads.add(request, hit * trace.block_size)
    return reads


def replay_belady(trace: Trace, num_blocks: int) -> Reads:
    """The block whose next use is farthest goes first: no order reads more whole blocks.

    L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    reads = Reads()
    requests = [request for request in trace.requests if fits(request, num_blocks)]
    reads.num_refused = len(trace.requests) - len(requests)
    cached: dict[int, int] = {}  # a block's next use
    farthest: list[tuple[int, int, int]] = []
    for request, uses in zip(requests, _next_uses(requests, trace.block_size), strict=True):
        blocks = request.blocks
        readable = blocks[: num_readable(request, trace.block_size)]
        # The last block is computed again, so its cached content makes way at no cost.
        cached.pop(blocks[-1], None)
        num_cached = sum(block in cached for block in readable)
        hit = next((n for n, block in enumerate(readable) if block not in cached), len(readable))
        excess = len(cached) + len(blocks) - num_cached - num_blocks
        while excess > 0:
            use, _, block = heapq.heappop(farthest)
            # This prompt's blocks are used next, so enough other blocks make way before them.
            if cached.get(block) == -use:
                del cached[block]
                excess -= 1
        for place, use in enumerate(uses):
            cached[blocks[place]] = use
            heapq.heappush(farthest, (-use, -place, blocks[place]))
        reads.add(request, hit * trace.block_size)
    return reads


def num_readable(request: Request, block_size: int) -> int:
    """The number of whole blocks in front of the last token."""
    return (request.tokens - 1) // block_size


def _next_uses(requests: Sequence[Request], block_size: int) -> list[list[int]]:
    """For each whole block of each request, the number of the next request that could read it."""
    next_use: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in reversed(range(len(requests))):
        request = requests[number]
        whole = request.blocks[: request.tokens // block_size]
        uses.append([next_use.get(block, NEVER) for block in whole])
        for block in whole:
            next_use[block] = number
        if len(whole) > num_readable(request, block_size):
            del next_use[whole[-1]]
    uses.reverse()
    return uses
