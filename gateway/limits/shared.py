"""A worker's side of limits that all workers of a gateway share: the parent process counts them.

A turn of a workspace with limits waits for the parent's answer, before it begins and before its
client has the last of its answer. So a client that sends one turn after another meets its own use
and no place of its last turn, at whatever worker. A turn of a workspace without limits is told to
the parent and begins at once, so that a limit that is set later knows it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)

import msgspec

from gateway.base.errors import GatewayError, Overloaded, RateLimited, SpendLimitReached
from gateway.base.grants import NO_LIMITS
from gateway.base.link import Link
from gateway.base.record import TurnRecord
from gateway.base.standing import Standing, Standings
from gateway.limits.admission import MAX_ADMITTED, MAX_BACKLOG, AdmittedTurn, used_by
from gateway.prompt.ask import Principal

_ASK_SECONDS = 5.0
_MAX_WORKSPACES = 10_000


class Entering(msgspec.Struct, frozen=True, array_like=True):
    """A turn that wants a place. `estimate` is in tokens."""

    turn_id: str
    workspace: str
    estimate: int


class Leaving(msgspec.Struct, frozen=True, array_like=True):
    turn_id: str
    is_open: bool


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """`retry_after` is None where the month's spend is used up."""

    message: str
    retry_after: int | None

    @classmethod
    def of(cls, error: GatewayError) -> "Refusal":
        return cls(str(error), error.retry_after if isinstance(error, RateLimited) else None)

    def error(self) -> GatewayError:
        if self.retry_after is None:
            return SpendLimitReached(self.message)
        error = RateLimited(retry_after=self.retry_after)
        error.args = (self.message,)
        return error


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """The parent's answer, and what is left of the workspace's limits after it."""

    standings: Standings
    refusal: Refusal | None = None


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call of `count_tokens`, by its number in its worker."""

    number: int
    workspace: str
    num_bytes: int


class Begun(msgspec.Struct, frozen=True, array_like=True):
    refusal: Refusal | None = None


class SharedAdmission:
    """What `Admission` is to turns, behind a link.

    A worker has its share of the gateway's bound on turns in flight, and the rest are the parent's.
    """

    def __init__(self, link: Link, num_workers: int) -> None:
        self._link = link
        self._most = max(MAX_ADMITTED // num_workers, 1)
        self._max_backlog = MAX_BACKLOG // num_workers
        self._in_flight = 0
        self._standings: OrderedDict[str, Standings] = OrderedDict()
        # Turns of workspaces with limits: those that hold a place, and those that gave it back
        # while the parent has not said so.
        self._limited: dict[str, AdmittedTurn] = {}
        self._leaving: dict[str, asyncio.Future[msgspec.Raw]] = {}

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def admit(
        self, turn_id: str, principal: Principal, estimate: int, backlog: int
    ) -> AbstractContextManager[AdmittedTurn]:
        """Ask for a place. Raise Overloaded, RateLimited or SpendLimitReached, with none taken.

        Raise Overloaded also where the parent does not answer in time.
        """
        if self._in_flight >= self._most or backlog >= self._max_backlog:
            raise Overloaded
        entering = Entering(turn_id, principal.workspace, estimate)
        if principal.limits == NO_LIMITS:
            self._link.tell("entered", entering)
        else:
            await self._ask(entering)
        return self._held(turn_id, is_limited=principal.limits != NO_LIMITS)

    async def _ask(self, entering: Entering) -> None:
        answer: Entered | None = None
        try:
            answer = await self._link.ask("enter", entering, Entered, _ASK_SECONDS)
        finally:
            if answer is None:
                # The parent may have given the place. It hears of both in their order.
                self._link.tell("leave", Leaving(entering.turn_id, is_open=False))
        self._standings[entering.workspace] = answer.standings
        self._standings.move_to_end(entering.workspace)
        if len(self._standings) > _MAX_WORKSPACES:
            self._standings.popitem(last=False)
        if answer.refusal is not None:
            raise answer.refusal.error()

    @contextmanager
    def _held(self, turn_id: str, *, is_limited: bool) -> Iterator[AdmittedTurn]:
        place = AdmittedTurn()
        self._in_flight += 1
        if is_limited:
            self._limited[turn_id] = place
        try:
            yield place
        finally:
            self._in_flight -= 1
            if not is_limited:
                self._link.tell("leave", Leaving(turn_id, place.is_open))
            elif turn_id in self._limited:
                self._leave(turn_id)

    def _leave(self, turn_id: str) -> None:
        """Give the parent the place back, and what the turn used before it."""
        place = self._limited.pop(turn_id)
        answer = self._link.request("leave", Leaving(turn_id, place.is_open))
        self._leaving[turn_id] = answer
        answer.add_done_callback(lambda _: self._left(turn_id, answer))

    def _left(self, turn_id: str, answer: asyncio.Future[msgspec.Raw]) -> None:
        self._leaving.pop(turn_id, None)
        if not answer.cancelled():
            answer.exception()  # a lost link ends this process, and has told so

    def count_used(self, record: TurnRecord) -> None:
        self._link.tell("used", used_by(record))

    async def settled(self, turn_id: str) -> None:
        """Give back the place of a turn that is closed or has failed. Wait until the parent has it.

        It has then counted what the turn used, too. Nobody waits for turns of workspaces without
        limits.
        """
        if turn_id in self._limited:
            self._leave(turn_id)
        if (answer := self._leaving.get(turn_id)) is not None:
            await asyncio.wait([answer], timeout=_ASK_SECONDS)

    def rates(self, principal: Principal) -> Standings:
        """As the parent told it with this worker's last turn of the workspace."""
        known = self._standings.get(principal.workspace, Standings(None, None))
        limits = principal.limits
        return Standings(
            _standing(known.requests, limits.requests_per_minute),
            _standing(known.tokens, limits.tokens_per_minute),
        )


class SharedCounting:
    """What `Counting` is to calls of `count_tokens`, behind a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._number = 0

    @asynccontextmanager
    async def admit(self, workspace: str, num_bytes: int) -> AsyncIterator[None]:
        """Hold a place at the parent while the block runs. It is free there when the block ends.

        Raise RateLimited, and Overloaded where the parent does not answer in time.
        """
        self._number += 1
        call = Call(self._number, workspace, num_bytes)
        answer: Begun | None = None
        try:
            answer = await self._link.ask("count", call, Begun, _ASK_SECONDS)
        finally:
            if answer is None:
                self._link.tell("counted", call.number)
        if answer.refusal is not None:
            raise answer.refusal.error()
        try:
            yield
        finally:
            with suppress(Overloaded):
                await self._link.ask("counted", call.number, type(None), _ASK_SECONDS)


def _standing(known: Standing | None, limit: int | None) -> Standing | None:
    if limit is None:
        return None
    return known if known is not None and known.limit == limit else Standing(limit, limit, 0.0)
