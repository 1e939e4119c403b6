"""Brings requests to a server that is not ours, and its answers back."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import structlog

from engine.backends.external import ExternalLoop, new_order
from engine.backends.upstream.books import UpstreamCache
from engine.backends.upstream.chat import ChatParser
from engine.backends.upstream.server import Facts, Slots, UpstreamError, UpstreamGone
from engine.backends.upstream.servers import Piece, Server
from engine.schedule.accounting import Accounting
from engine.schedule.request import SequenceState
from engine.supervisor import Supervisor

log = structlog.get_logger()


class UpstreamLoop(ExternalLoop):
    """`suspect` is called when a connection to the server broke."""

    _cache: UpstreamCache

    def __init__(
        self,
        server: Server,
        facts: Facts,
        accounting: Accounting,
        cache: UpstreamCache,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        suspect: Callable[[], None],
        *,
        max_waiting: int,
    ) -> None:
        super().__init__(accounting, cache, event_loop, supervisor, max_waiting=max_waiting)
        self._server = server
        self._facts = facts
        self._max_context = facts.max_context_tokens
        self._slots = Slots(facts.max_running)
        self._suspect = suspect

    @property
    def num_sent(self) -> int:
        return self._slots.num_taken

    @property
    def num_unsent(self) -> int:
        return max(len(self._serving) - self.num_sent, 0)

    async def _generate(self, sequence: SequenceState) -> None:
        request = sequence.request
        query = request.query
        order = new_order(sequence, request.request_id, self._max_context)
        try:
            async with self._slots.taken(order.cache_salt, query.digests.packed) as place:
                if request.began_at is None:
                    request.began_at = self._clock.now()
                if request.started_at is None and self._facts.tells == "at_the_end":
                    self._admit(sequence, await self._server.prefill(order, place))
                    self._end_if_finished(sequence)
                if sequence in self._serving:
                    await self._take_pieces(sequence, self._server.generate(order, place))
        except UpstreamError as error:
            self._failed(sequence, error)
        self._tell()

    def _failed(self, sequence: SequenceState, error: UpstreamError) -> None:
        log.warning("the upstream server failed a request", why=str(error))
        if isinstance(error, UpstreamGone):
            self._suspect()
        if sequence in self._serving:
            self._fail(sequence, f"the upstream server failed: {error}", error.code)

    async def _take_pieces(
        self, sequence: SequenceState, pieces: AsyncGenerator[Piece, None]
    ) -> None:
        """Take an answer's pieces until it ends, or until nobody waits for it."""
        # Closing the connection ends the request at the server.
        async with aclosing(pieces):
            async for piece in pieces:
                if sequence.request.started_at is None and piece.is_answer:
                    self._admit(sequence, piece)
                self._take(sequence, piece)
                if sequence not in self._serving:
                    return

    def _admit(self, sequence: SequenceState, piece: Piece) -> None:
        """The prompt is computed: what was reused is known now, or never will be."""
        request = sequence.request
        is_told = self._facts.tells != "never"
        assert request.lookup is not None
        if is_told and piece.cached_tokens is None:
            raise UpstreamError("the server did not say how much it reused")
        reused = piece.cached_tokens if is_told else None
        self._cache.admit(request.query, request.lookup, sequence.table, reused)
        self._started(sequence)

    def _take(self, sequence: SequenceState, piece: Piece) -> None:
        parser = sequence.parser
        if isinstance(parser, ChatParser):
            # Each delta counts as a token until the server tells how many there were.
            if piece.delta is not None and not parser.has_ended():
                deltas = parser.take(piece.delta, piece.finish_reason)
                self.accounting.text(sequence, deltas, sequence.num_output + bool(deltas))
                if parser.has_ended() and piece.finish_reason is None:
                    # Our parser ended it, so the server won't tell.
                    self.accounting.text(sequence, [], parser.count_written())
                    sequence.finish = parser.finish
            if piece.sampled_tokens is not None:
                self.accounting.text(sequence, [], piece.sampled_tokens)
        for token in piece.token_ids:
            if sequence.finish is not None:
                break
            self.accounting.token(sequence, token)
        if piece.is_last and sequence.finish is None:
            sequence.finish = parser.finish or piece.finish or "failed"
        self._end_if_finished(sequence)
        self._tell()
