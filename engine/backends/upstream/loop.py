"""Brings requests to a server and its tokens back, on the event loop's thread."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import structlog

from engine.backends.external.loop import ExternalLoop
from engine.backends.upstream.books import UpstreamCache
from engine.backends.upstream.chat import ChatParser
from engine.backends.upstream.gate import Place
from engine.backends.upstream.server import (
    Facts,
    Order,
    Piece,
    Server,
    UpstreamError,
    UpstreamGone,
)
from engine.backends.upstream.turns import Turns
from engine.clock import Clock
from engine.protocol import ErrorCode
from engine.schedule.lifecycle import Lifecycle
from engine.schedule.request import SequenceState
from engine.supervisor import Supervisor
from engine.text.formats.turn_parser import TurnParser

log = structlog.get_logger()


class UpstreamLoop(ExternalLoop):
    """`suspect` is called when a connection to the server broke."""

    def __init__(
        self,
        server: Server,
        facts: Facts,
        cache: UpstreamCache,
        turns: Turns,
        lifecycle: Lifecycle,
        clock: Clock,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        suspect: Callable[[], None],
    ) -> None:
        super().__init__(lifecycle, clock, event_loop, supervisor)
        self._server = server
        self._facts = facts
        self._cache = cache
        self._turns = turns
        self._suspect = suspect
        self._served: dict[SequenceState, asyncio.Task[None]] = {}
        turns.serve, turns.drop = self._serve, self._drop

    async def end(self, message: str, code: ErrorCode) -> None:
        """The server is gone: every request fails, and this loop is not used again."""
        self._is_stopped = True
        for sequence in self._turns.sequences:
            if self._turns.has(sequence):
                self.lifecycle.fail(sequence, message, code)
        self._tell()
        await self._cancel_tasks()

    # Requests.

    def _serve(self, sequence: SequenceState) -> None:
        self._served[sequence] = self._spawn(self._generate(sequence))

    def _drop(self, sequence: SequenceState) -> None:
        """What still runs of it ends: closing its connection ends it at the server."""
        task = self._served.pop(sequence)
        if task is not asyncio.current_task():
            task.cancel()

    async def _generate(self, sequence: SequenceState) -> None:
        try:
            async with self._turns.places.taken(sequence) as place:
                await self._run(sequence, _order(sequence, place, self._facts))
        except UpstreamError as error:
            log.warning("the upstream server failed a request", why=str(error))
            if isinstance(error, UpstreamGone):
                self._suspect()
            if self._turns.has(sequence):
                message = f"the upstream server failed: {error}"
                self.lifecycle.fail(sequence, message, error.code)
        self._tell()

    async def _run(self, sequence: SequenceState, order: Order) -> None:
        request = sequence.request
        if request.began_at is None:
            request.began_at = self._clock.now()
        if request.started_at is None and self._facts.tells == "at_the_end":
            self._begin(sequence, await self._server.prefill(order))
            self.lifecycle.finish_ended([sequence])
        if not self._turns.has(sequence):
            return
        async with aclosing(self._server.generate(order)) as pieces:
            async for piece in pieces:
                is_answer = bool(piece.token_ids) or piece.chat is not None or piece.is_last
                if request.started_at is None and is_answer:
                    self._begin(sequence, piece)
                self._take(sequence, piece)
                if not self._turns.has(sequence):
                    return
        raise UpstreamError("the answer ended before its end")

    def _begin(self, sequence: SequenceState, piece: Piece) -> None:
        """The prompt is computed: what was reused is known now, or never will be."""
        request = sequence.request
        assert request.found is not None
        if self._facts.tells != "never" and piece.cached_tokens is None:
            raise UpstreamError("the server did not say how much it reused")
        told = None if self._facts.tells == "never" else piece.cached_tokens
        self._cache.admit(request.query, request.found, sequence.table, told)
        self.lifecycle.start_if_first(sequence)
        self._cache.let_go(request.found)
        sequence.table.release()
        for fork in request.sequences[1:]:
            self._turns.add_fork(fork)

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
        if piece.chat is not None and not parser.has_ended():
            deltas = parser.take(piece.chat)
            self.lifecycle.take_deltas(sequence, deltas, sequence.num_output + bool(deltas))
            if parser.has_ended() and piece.chat.finish_reason is None:
                # Ours ended it: nobody will tell.
                self.lifecycle.take_deltas(sequence, [], parser.count_written())
                sequence.finish = parser.finish
        if piece.sampled_tokens is not None:
            self.lifecycle.take_deltas(sequence, [], piece.sampled_tokens)


def _order(sequence: SequenceState, place: Place, facts: Facts) -> Order:
    request, parser = sequence.request, sequence.parser
    ends = sorted(parser.end_token_ids) if isinstance(parser, TurnParser) else []
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
        end_token_ids=ends,
        grammar=parser.grammar if isinstance(parser, TurnParser) else None,
        slot=place.slot,
        may_reuse=place.may_reuse,
    )
