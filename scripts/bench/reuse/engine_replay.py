"""A trace through the engine's prefix cache: no model, one request at a time, a virtual clock.

Answers take no memory here, as in the models beside it. Each request does to the cache what
`engine.schedule` does for it: it is looked up, begun, computed, written and released.
"""

from array import array
from typing import Literal

from engine.cache.digests import ChainHasher
from engine.cache.entries import ARRIVAL_GRACE_SECONDS, Entries
from engine.cache.ids import TokenId
from engine.cache.lookup import Segment
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.cache.worth import Worths
from engine.protocol import Breakpoint
from scripts.bench.reuse.models import Reads, fits
from scripts.bench.reuse.traces import MIN_TOKENS, Request, Trace

Marks = Literal["marked", "unmarked", "off"]
"""Every prompt is marked at its end by the client, or automatically, or not at all."""
LEASE_SHARE = 0.5
SCOPE = "workspace"


def replay_engine(trace: Trace, num_blocks: int, marks: Marks) -> Reads:
    """What the engine reads of the trace's prompts, from entries and without one."""
    replay = EngineReplay(num_blocks, trace.block_size, marks)
    reads = Reads()
    for request in trace.requests:
        if fits(request, num_blocks):
            reads.add(request, replay.run(request))
        else:
            reads.num_refused += 1
    return reads


class EngineReplay:
    def __init__(self, num_blocks: int, block_size: int, marks: Marks) -> None:
        self.pool = BlockPool(num_blocks, block_size, worths=Worths())
        self.entries = Entries(
            self.pool, lease_share=LEASE_SHARE, grace_seconds=ARRIVAL_GRACE_SECONDS
        )
        self._cache = PrefixCache(
            self.pool, self.entries, ChainHasher(b"a benchmark's key", block_size)
        )
        self._marks = marks

    def run(self, request: Request) -> int:
        """Run one request from its arrival to its end. Return how many tokens were reused.

        Raises NoFreeBlocks where the prompt has no room though no lease is left.
        """
        now = request.at
        self.entries.expire(now)
        self._forget_events()
        query = self._query(request)
        table = self._cache.new_table(query)
        match = self._cache.look_up(query)
        while True:
            try:
                self._cache.begin(query, match, table)
                break
            except NoFreeBlocks:
                if not self.entries.leases.sacrifice():
                    raise
        for start, end in list(table.gaps(request.tokens)):
            table.commit(query.tokens[start:end])
        usage = self._cache.write(query, match, table, now).usage
        table.release(request.end)
        assert usage.prompt_tokens == request.tokens
        return usage.prompt_tokens - usage.computed_tokens

    def _query(self, request: Request) -> CacheQuery:
        tokens = self._tokens(request)
        # A segment ends also where an earlier prompt went another way.
        ends = {request.known * self.pool.block_size, request.tokens}
        segments = [Segment("text", end) for end in sorted(ends) if 0 < end <= request.tokens]
        points: list[Breakpoint] = []
        if self._marks != "off":
            # The mark that the gateway adds to an unmarked prompt asks for no lease.
            points.append(Breakpoint(len(segments) - 1, hold=self._marks == "marked"))
        return CacheQuery(
            scope=SCOPE,
            tokens=tokens,
            digests=self._cache.digests(SCOPE, tokens),
            segments=segments,
            breakpoints=points,
            names=[],
            min_cache_tokens=MIN_TOKENS,
            arrived_at=request.at,
        )

    def _tokens(self, request: Request) -> "array[TokenId]":
        """The tokens of a block: its id, repeated. So blocks with equal ids have equal tokens."""
        tokens: array[TokenId] = array("I")
        for block in request.blocks:
            tokens.extend([TokenId(block)] * self.pool.block_size)
        del tokens[request.tokens :]
        return tokens

    def _forget_events(self) -> None:
        """Do nothing, because nobody follows the cache here."""
        self.entries.leases.take_ended()
        self.pool.changes.take()
