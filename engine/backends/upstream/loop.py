"""Brings requests to a server and its tokens back, on the event loop's thread."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import structlog

from engine.backends.upstream.books import UpstreamCache
from engine.backends.upstream.chat import ChatParser
from engine.backends.upstream.gate import Place, Slots
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

T = TypeVar("T")
log = structlog.get_logger()

MAX_IDLE_SECONDS = 1.0


class UpstreamLoop:
    """The counterpart of `engine.schedule.loop.EngineLoop`; `call` may be used from any thread.

    `suspect` is called when a connection to the server broke.
    """

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
        self.lifecycle = lifecycle
        self._server = server
        self._facts = facts
        self._cache = cache
        self._turns = turns
        self._clock = clock
        self._event_loop = event_loop
        self._supervisor = supervisor
        self._suspect = suspect
        self._on_crash: Callable[[BaseException], None] = lambda error: None
        self._slots = Slots(facts.max_running)
        self._queue: deque[asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._served: dict[SequenceState, asyncio.Task[None]] = {}
        self._is_stopped = False
        turns.serve, turns.drop = self._serve, self._drop

    def start(self, on_crash: Callable[[BaseException], None]) -> None:
        """`on_crash` hears of an error in our own books."""
        self._on_crash = on_crash
        self._event_loop.call_soon_threadsafe(self._watch)

    def stop(self) -> None:
        """End what runs. Called from another thread, while the event loop runs or after it."""
        self._is_stopped = True
        if self._event_loop.is_running():
            asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self._event_loop).result()

    async def end(self, message: str, code: ErrorCode) -> None:
        """The server is gone: every request fails, and this loop is not used again."""
        self._is_stopped = True
        for sequence in self._turns.sequences:
            if self._turns.has(sequence):
                self.lifecycle.fail(sequence, message, code)
        self.lifecycle.publish()
        await self._cancel_tasks()

    def call(self, function: Callable[[], T], *, is_urgent: bool = False) -> "Future[T]":
        """Run a function between two pieces; what it ended is told."""

        async def run() -> T:
            result = function()
            self.lifecycle.publish()
            return result

        return asyncio.run_coroutine_threadsafe(run(), self._event_loop)

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
            async with self._place(sequence) as place:
                await self._run(sequence, _order(sequence, place, self._facts))
        except UpstreamError as error:
            log.warning("the upstream server failed a request", why=str(error))
            if isinstance(error, UpstreamGone):
                self._suspect()
            if self._turns.has(sequence):
                message = f"the upstream server failed: {error}"
                self.lifecycle.fail(sequence, message, error.code)
        self.lifecycle.publish()

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
        self.lifecycle.publish()

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

    @asynccontextmanager
    async def _place(self, sequence: SequenceState) -> AsyncIterator[Place]:
        """A turn at the server, in order of arrival."""
        query = sequence.request.query
        place = None if self._queue else self._slots.take(query.scope, query.digests.packed)
        while place is None:
            waiter: asyncio.Future[None] = self._event_loop.create_future()
            self._queue.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._queue:
                    self._queue.remove(waiter)
                else:
                    self._wake_next()
                raise
            place = self._slots.take(query.scope, query.digests.packed)
        self._turns.running += 1
        try:
            yield place
        finally:
            self._turns.running -= 1
            self._slots.give_back(place)
            self._wake_next()

    def _wake_next(self) -> None:
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():  # a cancelled one is still here until its task runs
                waiter.set_result(None)
                return

    # Along the way.

    async def _cancel_tasks(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self) -> None:
        self._supervisor.start("expiry", self._watch_time)

    async def _watch_time(self) -> None:
        """Announce expiry, also when nothing runs."""
        while not self._is_stopped:
            due = self.lifecycle.seconds_to_expiry(self._clock.now())
            await asyncio.sleep(min(due, MAX_IDLE_SECONDS))
            self.lifecycle.expire(self._clock.now())
            self.lifecycle.publish()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._event_loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._is_stopped:
            self._on_crash(error)


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
