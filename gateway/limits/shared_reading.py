"""Places for reads of the admin API that all workers of a gateway share.

The parent has the places (`reading.py`). A worker asks for one, and waits there. When a worker dies
its places are free.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from gateway.base.errors import RateLimited
from gateway.base.link import Handler, Link
from gateway.limits.reading import PLANNER_WAIT_SECONDS, ReadKind, ReadLimit
from gateway.limits.shared import Begun, Refusal

_ASK_SECONDS = PLANNER_WAIT_SECONDS + 5.0
"""The parent refuses before, unless it stands still."""


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """A read that wants a place of its key. `number` is its number in its worker."""

    number: int
    kind: ReadKind
    key: str


_reading = msgspec.msgpack.Decoder(Reading).decode
_number = msgspec.msgpack.Decoder(int).decode


class ReadNumbers:
    """Numbers for the reads of one worker."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class SharedReadLimit:
    """What `ReadLimit` is to handlers, behind a link."""

    def __init__(self, link: Link, numbers: ReadNumbers, kind: ReadKind) -> None:
        self._link = link
        self._kind = kind
        self._numbers = numbers

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[None]:
        """As `ReadLimit.taken`. Raise Overloaded where the parent does not answer in time."""
        number = self._numbers.next()
        try:
            reading = Reading(number, self._kind, key)
            answer = await self._link.ask("read", reading, Begun, _ASK_SECONDS)
            if answer.refusal is not None:
                raise answer.refusal.error()
            yield
        finally:
            self._link.tell("has_read", number)


class ReadSeat:
    """The parent's side: the reads of one process of a worker."""

    def __init__(self, limits: Mapping[ReadKind, ReadLimit]) -> None:
        self._limits = limits
        self._holding: dict[int, asyncio.Task[None]] = {}

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"read": self.read, "has_read": self.has_read}

    def read(self, body: bytes) -> asyncio.Future[Begun]:
        """Answer when the read has a place, or is refused."""
        reading = _reading(body)
        answer: asyncio.Future[Begun] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._hold(reading, answer))
        self._holding[reading.number] = task
        task.add_done_callback(lambda _: self._holding.pop(reading.number, None))
        return answer

    def has_read(self, body: bytes) -> None:
        if (task := self._holding.get(_number(body))) is not None:
            task.cancel()

    def lost(self) -> None:
        """The process is gone: its places are free."""
        for task in self._holding.values():
            task.cancel()

    async def _hold(self, reading: Reading, answer: asyncio.Future[Begun]) -> None:
        """Hold a place until the task is cancelled."""
        try:
            async with self._limits[reading.kind].taken(reading.key):
                _tell(answer, Begun())
                await asyncio.Event().wait()
        except RateLimited as error:
            _tell(answer, Begun(Refusal.of(error)))


def _tell(answer: asyncio.Future[Begun], begun: Begun) -> None:
    if not answer.done():  # it is cancelled where the link is lost
        answer.set_result(begun)
