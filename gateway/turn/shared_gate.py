"""A worker's side of the gate: the parent has the queue, and the windows, of all workers.

While engines have room and nobody waits, a turn takes room without a question (`room.py`) and tells
the parent. Any other turn asks, and waits at the parent in the fair order of all workers.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from gateway.base.errors import Overloaded
from gateway.base.link import Link
from gateway.limits.congestion import Unanswered
from gateway.prompt.ask import Ask
from gateway.routing.engine import Engine
from gateway.turn.full_engines import FullEngines
from gateway.turn.idle_room import IdleRoom
from gateway.turn.passing import Passing, PassingSum, Wanting
from gateway.turn.room import OwnRoom

_ASK_SECONDS = 5.0
_ROW_SECONDS = 60.0

ANSWERED, LEFT, OVER = range(3)


class Passed(msgspec.Struct, frozen=True, array_like=True):
    """A turn that took room. `ticket` is its number in its worker."""

    ticket: int
    wanting: Wanting


class Entering(msgspec.Struct, frozen=True, array_like=True):
    """A turn that asks for room. The last two are those of `Gate.enter`."""

    ticket: int
    wanting: Wanting
    is_first: bool
    is_charged: bool


class LetIn(msgspec.Struct, frozen=True, array_like=True):
    """The parent's answer. `retry_after` is set for a turn that is refused.

    `has_place`: it got a place in its workspace's window.
    """

    is_charged: bool = False
    has_place: bool = False
    retry_after: int | None = None


_let_in = msgspec.msgpack.Decoder(LetIn).decode


class _Window:
    """One turn's place in its workspace's window, which the parent has."""

    def __init__(self, link: Link, ticket: int) -> None:
        self._link = link
        self._ticket = ticket

    def answered(self, workspace: str) -> None:
        self._link.tell("window", (self._ticket, ANSWERED))

    def halve(self, workspace: str) -> None:
        self._link.tell("window", (self._ticket, LEFT))

    def take_out(self, workspace: str) -> None:
        self._link.tell("window", (self._ticket, OVER))


class SharedGate(FullEngines):
    def __init__(
        self,
        engines: Sequence[Engine],
        link: Link,
        room: OwnRoom,
        monotonic: Callable[[], float],
        *,
        wait_seconds: float,
        num_rows: int,
    ) -> None:
        idle_room = IdleRoom(engines, PassingSum(), monotonic, num_rows)
        super().__init__(engines, monotonic, idle_room, wait_seconds)
        self._link = link
        self._room = room
        self._ticket = 0

    async def enter(self, ask: Ask, *, is_first: bool = False, is_charged: bool = False) -> Passing:
        """As `Gate.enter`. Raise Overloaded also where the parent does not answer in time."""
        wanting = Wanting.of(ask)
        self._ticket += 1
        ticket = self._ticket
        if is_first or wanting.is_batch or not self._room.take(wanting.prompt_tokens):
            answer = await self._ask(Entering(ticket, wanting, is_first, is_charged))
        else:
            self._link.tell("passed", Passed(ticket, wanting))
            answer = LetIn(has_place=True)
        passing = Passing(partial(self._link.tell, "placed", ticket))
        passing.is_charged = answer.is_charged
        if answer.has_place:
            passing.unanswered = Unanswered(_Window(self._link, ticket), wanting.workspace)
        return passing

    def assigned(self, to_prefill: int, tokens: int) -> None:
        """The parent hears of it from the engine (`EngineTurns.assign`)."""

    def closed(self, engine: Engine) -> bool:
        self._link.tell("full", engine.name)
        return super().closed(engine)

    async def _ask(self, entering: Entering) -> LetIn:
        seconds = _ROW_SECONDS if entering.wanting.is_batch else self.wait_seconds + _ASK_SECONDS
        answer = None
        asking = self._link.request("enter_gate", entering)
        try:
            while not (await asyncio.wait([asking], timeout=seconds))[0]:
                is_there = await self._link.ask("waits", entering.ticket, bool, _ASK_SECONDS)
                if not (is_there or asking.done()):
                    raise Overloaded
            answer = _let_in(asking.result())
        finally:
            if answer is None:
                asking.cancel()
                # The parent may have let it in. It hears of both in their order.
                self._link.tell("gave_up", entering.ticket)
        if answer.retry_after is not None:
            raise Overloaded(retry_after=answer.retry_after)
        return answer
