"""Brings requests to a server and its tokens back, on the event loop's thread."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import structlog

from engine.backends.external import ExternalLoop
from engine.backends.upstream.chat import ChatParser
from engine.backends.upstream.entries import UpstreamCache
from engine.backends.upstream.server import Facts, Order, Piece, Server
from engine.backends.upstream.slots import Place, Places
from engine.backends.upstream.wire import UpstreamError, UpstreamGone
from engine.clock import Clock
from engine.protocol import ErrorCode
from engine.schedule.request import SequenceState
from engine.supervisor import Supervisor
from engine.text.formats.turn_parser import TurnParser

log = structlog.get_logger()


class UpstreamLoop(ExternalLoop):
    """`suspect` is called when a connection to the server broke."""

    _cache: UpstreamCache

    def __init__(
        self,
        server: Server,
        facts: Facts,
        cache: UpstreamCache,
        clock: Clock,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        suspect: Callable[[], None],
    ) -> None:
        super().__init__(cache, clock, event_loop, supervisor)
        self._server = server
        self._facts = facts
        self._places = Places(facts.max_running)
        self._suspect = suspect

    @property
    def num_sent(self) -> int:
        return self._places.num_taken

    @property
    def num_unsent(self) -> int:
        return max(len(self._serving) - self.num_sent, 0)

    @property
    def waiting(self) -> range:
        """As long as the requests are many that have not begun to answer.

        No server tells which of them it computes.
        """
        return range(sum(one.request.started_at is None for one in self._serving))

    async def end(self, message: str, code: ErrorCode) -> None:
        """The server is gone: every request fails, and this loop is not used again."""
        self._is_stopped = True
        for sequence in list(self._serving):
            if self.has(sequence):
                self.lifecycle.fail(sequence, message, code)
        self._tell()
        await self._cancel_tasks()

    async def _generate(self, sequence: SequenceState) -> None:
        try:
            async with self._places.taken(sequence) as place:
                await self._run(sequence, _order(sequence, place, self._facts))
        except UpstreamError as error:
            log.warning("the upstream server failed a request", why=str(error))
            if isinstance(error, UpstreamGone):
                self._suspect()
            if self.has(sequence):
                message = f"the upstream server failed: {error}"
                self.lifecycle.fail(sequence, message, error.code)
        self._tell()

    async def _run(self, sequence: SequenceState, order: Order) -> None:
        request = sequence.request
        if request.began_at is None:
            request.began_at = self._clock.now()
        if request.started_at is None and self._facts.tells == "at_the_end":
            self._admit(sequence, await self._server.prefill(order))
            self.lifecycle.finish_ended([sequence])
        if not self.has(sequence):
            return
        # Closing the connection ends the request at the server.
        async with aclosing(self._server.generate(order)) as pieces:
            async for piece in pieces:
                is_answer = piece.token_ids or piece.delta is not None or piece.is_last
                if request.started_at is None and is_answer:
                    self._admit(sequence, piece)
                self._take(sequence, piece)
                if not self.has(sequence):
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
        self._begin(sequence)

    def _take(self, sequence: SequenceState, piece: Piece) -> None:
        parser = sequence.parser
        if isinstance(parser, ChatParser):
            self._take_chat(sequence, parser, piece)
        for token in piece.token_ids:
            if sequence.finish is not None:
                break
            self.lifecycle.take_token(sequence, token)
        if piece.is_last and sequence.finish is None:
            sequence.finish = parser.finish or piece.finish or "failed"
        self.lifecycle.finish_ended([sequence])
        self._tell()

    def _take_chat(self, sequence: SequenceState, parser: ChatParser, piece: Piece) -> None:
        """Deltas, each taken for a token until the server tells how many there were."""
        if piece.delta is not None and not parser.has_ended():
            deltas = parser.take(piece.delta, piece.finish_reason)
            self.lifecycle.take_deltas(sequence, deltas, sequence.num_output + bool(deltas))
            if parser.has_ended() and piece.finish_reason is None:
                # Ours ended it: nobody will tell.
                self.lifecycle.take_deltas(sequence, [], parser.count_written())
                sequence.finish = parser.finish
        if piece.sampled_tokens is not None:
            self.lifecycle.take_deltas(sequence, [], piece.sampled_tokens)


def _order(sequence: SequenceState, place: Place, facts: Facts) -> Order:
    request, parser = sequence.request, sequence.parser
    asked = request.request.sampling.max_tokens
    room = facts.max_context_tokens - len(request.query.tokens)
    return Order(
        order_id=request.request_id,
        scope=request.query.scope,
        token_ids=request.query.tokens,
        request=request.request,
        sample=sequence.sample,
        is_seeded=request.request.sampling.seed is not None,
        # No server computes a prompt alone: pre-warming takes one token, told to nobody.
        max_tokens=max(room if asked is None else min(asked, room), 1),
        end_token_ids=sorted(parser.end_token_ids) if isinstance(parser, TurnParser) else [],
        grammar=parser.grammar if isinstance(parser, TurnParser) else None,
        slot=place.slot,
        may_reuse=place.may_reuse,
    )
