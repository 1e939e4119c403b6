"""Brings requests to a server and its tokens back, on the event loop's thread.

A server that is not ours evicts when it wants and tells nobody. So an entry here is never leased:
it says what a scope has sent, and the server's own count of reused tokens decides what was read. An
entry of which less was reused than it has is over, and the request writes it anew.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import structlog

from engine.backends.external import ExternalLoop, MirrorCache, MirrorPool, new_order
from engine.backends.upstream.chat import ChatParser
from engine.backends.upstream.server import Facts, Piece, Server
from engine.backends.upstream.slots import Place, Slots
from engine.backends.upstream.wire import UpstreamError, UpstreamGone
from engine.cache.block import Entry
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, Found
from engine.cache.table import BlockTable
from engine.clock import Clock
from engine.schedule.accounting import Accounting
from engine.schedule.request import SequenceState
from engine.supervisor import Supervisor

log = structlog.get_logger()


class UnheldEntries(Entries):
    """Entries without a lease: `no_hold`."""

    def __init__(self, pool: MirrorPool, *, ttl_scale: float, grace_seconds: float) -> None:
        super().__init__(
            pool,
            lease_share=0.0,
            scope_lease_share=0.0,
            idle_lease_share=0.0,
            ttl_scale=ttl_scale,
            grace_seconds=grace_seconds,
        )

    def lose(self, entry: Entry) -> None:
        """Its content, or a part of it, is not in the server's memory any more."""
        if self.get(entry.key) is entry:
            self.end(entry, entry.why_broken)
            entry.is_broken = True

    def _try_lease(self, entry: Entry) -> bool:
        entry.why_unleased = "no_hold"
        return False


class UpstreamCache(MirrorCache):
    """`is_isolated`: no scope's prompt reuses what another scope sent.

    Where it is not, reuse beyond a scope's own entries is not told: it would tell of others.
    """

    entries: UnheldEntries

    def __init__(
        self, pool: MirrorPool, entries: UnheldEntries, hasher: ChainHasher, *, is_isolated: bool
    ) -> None:
        super().__init__(pool, entries, hasher)
        self._is_isolated = is_isolated

    def admit(self, query: CacheQuery, found: Found, table: BlockTable, reused: int | None) -> None:
        """The prompt is computed: `reused` of its tokens came from memory; None: not told."""
        is_whole, hit = self._settle(query, found, reused or 0), found.hit
        if not self._is_isolated:
            found.reused, found.raced = found.read, min(found.raced, found.read)
        if hit is not None and reused is None:
            found.hit, found.miss_reason = None, "not_told"
        elif hit is not None and not is_whole:
            self.entries.lose(hit)
            found.miss_reason = "best_effort_evicted"
            if not found.read:
                found.hit = None
        self._unwritten = set()
        try:
            self._mirror(query, table)
        except NoFreeBlocks:
            # Waiting requests hold all of the books: this prompt is not written down.
            self._unwritten = {mark.segment for mark in found.marks}
            found.marks = []

    def _was_overtaken(self, query: CacheQuery, found: Found, now: float) -> bool:
        return found.miss_reason != "not_told" and super()._was_overtaken(query, found, now)


class UpstreamLoop(ExternalLoop):
    """`suspect` is called when a connection to the server broke."""

    _cache: UpstreamCache

    def __init__(
        self,
        server: Server,
        facts: Facts,
        accounting: Accounting,
        cache: UpstreamCache,
        clock: Clock,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        suspect: Callable[[], None],
        *,
        max_waiting: int,
    ) -> None:
        super().__init__(accounting, cache, clock, event_loop, supervisor, max_waiting=max_waiting)
        self._server = server
        self._facts = facts
        self._slots = Slots(facts.max_running)
        self._suspect = suspect

    @property
    def num_sent(self) -> int:
        return self._slots.num_taken

    @property
    def num_unsent(self) -> int:
        return max(len(self._serving) - self.num_sent, 0)

    @property
    def num_waiting(self) -> int:
        """Those that have not begun to answer: no server tells which of them it computes."""
        return sum(one.request.started_at is None for one in self._serving)

    async def _generate(self, sequence: SequenceState) -> None:
        try:
            query = sequence.request.query
            async with self._slots.taken(query.scope, query.digests.packed) as place:
                await self._run(sequence, place)
        except UpstreamError as error:
            log.warning("the upstream server failed a request", why=str(error))
            if isinstance(error, UpstreamGone):
                self._suspect()
            if sequence in self._serving:
                self._fail(sequence, f"the upstream server failed: {error}", error.code)
        self._tell()

    async def _run(self, sequence: SequenceState, place: Place) -> None:
        request = sequence.request
        order = new_order(sequence, request.request_id, self._facts.max_context_tokens)
        if request.began_at is None:
            request.began_at = self._clock.now()
        if request.started_at is None and self._facts.tells == "at_the_end":
            self._admit(sequence, await self._server.prefill(order, place))
            self._end_if_finished(sequence)
        if sequence not in self._serving:
            return
        # Closing the connection ends the request at the server.
        async with aclosing(self._server.generate(order, place)) as pieces:
            async for piece in pieces:
                is_answer = piece.token_ids or piece.delta is not None or piece.is_last
                if request.started_at is None and is_answer:
                    self._admit(sequence, piece)
                self._take(sequence, piece)
                if sequence not in self._serving:
                    return
        raise UpstreamError("the answer ended before its end")

    def _admit(self, sequence: SequenceState, piece: Piece) -> None:
        """The prompt is computed: what was reused is known now, or never will be."""
        request, is_told = sequence.request, self._facts.tells != "never"
        assert request.found is not None
        if is_told and piece.cached_tokens is None:
            raise UpstreamError("the server did not say how much it reused")
        told = piece.cached_tokens if is_told else None
        self._cache.admit(request.query, request.found, sequence.table, told)
        self._started(sequence)

    def _take(self, sequence: SequenceState, piece: Piece) -> None:
        parser = sequence.parser
        if isinstance(parser, ChatParser):
            self._take_chat(sequence, parser, piece)
        for token in piece.token_ids:
            if sequence.finish is not None:
                break
            self.accounting.token(sequence, token)
        if piece.is_last and sequence.finish is None:
            sequence.finish = parser.finish or piece.finish or "failed"
        self._end_if_finished(sequence)
        self._tell()

    def _take_chat(self, sequence: SequenceState, parser: ChatParser, piece: Piece) -> None:
        """Deltas, each taken for a token until the server tells how many there were."""
        if piece.delta is not None and not parser.has_ended():
            deltas = parser.take(piece.delta, piece.finish_reason)
            self.accounting.text(sequence, deltas, sequence.num_output + bool(deltas))
            if parser.has_ended() and piece.finish_reason is None:
                # Ours ended it: nobody will tell.
                self.accounting.text(sequence, [], parser.count_written())
                sequence.finish = parser.finish
        if piece.sampled_tokens is not None:
            self.accounting.text(sequence, [], piece.sampled_tokens)
