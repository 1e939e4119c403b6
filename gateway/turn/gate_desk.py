"""The parent's side of the gate that all workers of a gateway share.

The queue, the windows and the sums are those of a gateway that is one process (`gate.py`). The
engines here are polled for their readiness, and their loads come from what the workers tell. When a
worker dies, its turns are over here and at the other workers.
"""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from gateway.base.background import pause
from gateway.base.errors import NotFound, Overloaded
from gateway.base.link import Handler
from gateway.limits.congestion import Unanswered
from gateway.routing.fleet import Fleet
from gateway.routing.heard import take_news
from gateway.routing.news import Answered, Assigned, Ended, News, RunningTurns
from gateway.turn.gate import Gate
from gateway.turn.passing import Passing
from gateway.turn.room import Room
from gateway.turn.shared_gate import ANSWERED, LEFT, Entering, LetIn, Passed

PUBLISH_SECONDS = 0.1

_passed = msgspec.msgpack.Decoder(Passed).decode
_entering = msgspec.msgpack.Decoder(Entering).decode
_ticket = msgspec.msgpack.Decoder(int).decode
_window = msgspec.msgpack.Decoder(tuple[int, int]).decode
_name = msgspec.msgpack.Decoder(str).decode
_encode = msgspec.msgpack.Encoder().encode
_news = msgspec.msgpack.Decoder(News).decode


class GateDesk:
    """`relay` passes news of one worker, by its number, on to the others."""

    def __init__(
        self,
        gate: Gate,
        fleet: Fleet,
        room: Room,
        monotonic: Callable[[], float],
        relay: Callable[[int, msgspec.Raw], None],
    ) -> None:
        self.gate = gate
        self.fleet = fleet
        self.monotonic = monotonic
        self.relay = relay
        self._room = room
        self._num_counted = [0] * room.num_workers
        self._is_due = False

    def count(self, worker: int) -> None:
        """A turn of a worker that took room is in the gate's sums."""
        self._num_counted[worker - 1] += 1

    def publish_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.publish)

    def publish(self) -> None:
        """Tell the workers what they may take."""
        self._is_due = False
        self._room.tell(*self.gate.spare(), self._num_counted)

    async def run(self, stopping: asyncio.Event) -> None:
        """Publish what engines change by themselves."""
        while not stopping.is_set():
            self.publish()
            await pause(stopping, PUBLISH_SECONDS)

    def take_news(self, worker: int, news: News, told: msgspec.Raw) -> None:
        """Count what a worker told of an engine, and pass it on as it was told."""
        now = self.monotonic()
        if (engine := take_news(self.fleet, news, now)) is not None:
            match news:
                case Assigned():
                    self.gate.assigned(news.to_prefill, news.tokens)
                case Answered() | Ended():
                    self.gate.moved(engine)
        self.relay(worker, told)
        self.publish_soon()


class GateSeat:
    """One process of one worker: its turns that wait, pass, and run."""

    def __init__(self, desk: GateDesk, worker: int) -> None:
        self._desk = desk
        self._worker = worker
        self._waiting: dict[int, asyncio.Task[LetIn]] = {}
        self._passing: dict[int, Passing] = {}
        self._unanswered: dict[int, Unanswered] = {}
        self.running = RunningTurns()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "passed": self.passed,
            "enter_gate": self.enter,
            "waits": lambda body: _ticket(body) in self._waiting,
            "gave_up": self.gave_up,
            "placed": self.placed,
            "window": self.window,
            "full": self.full,
            "news": self.news,
        }

    def passed(self, body: bytes) -> None:
        passed = _passed(body)
        self._keep(passed.ticket, self._desk.gate.let_in(passed.wanting))
        self._desk.count(self._worker)
        self._desk.publish_soon()

    def enter(self, body: bytes) -> asyncio.Task[LetIn]:
        entering = _entering(body)
        task = asyncio.create_task(self._enter(entering))
        self._waiting[entering.ticket] = task
        return task

    def gave_up(self, body: bytes) -> None:
        ticket = _ticket(body)
        if (task := self._waiting.pop(ticket, None)) is not None:
            task.cancel()
        self._end(ticket)

    def placed(self, body: bytes) -> None:
        if (passing := self._passing.pop(_ticket(body), None)) is not None:
            with passing:
                pass
        self._desk.publish_soon()

    def window(self, body: bytes) -> None:
        ticket, what = _window(body)
        if what == LEFT:
            if (unanswered := self._unanswered.get(ticket)) is not None:
                unanswered.abandoned()
        elif (unanswered := self._unanswered.pop(ticket, None)) is not None:
            if what == ANSWERED:
                unanswered.answered()
            else:
                unanswered.ended()
        self._desk.publish_soon()

    def full(self, body: bytes) -> None:
        try:
            self._desk.gate.closed(self._desk.fleet.find(_name(body)))
        except NotFound:
            return  # it was removed meanwhile
        self._desk.publish_soon()

    def news(self, body: bytes) -> None:
        news = _news(body)
        self.running.take(news)
        self._desk.take_news(self._worker, news, msgspec.Raw(body))

    def lost(self) -> None:
        """The process is gone: what it had is over."""
        for task in self._waiting.values():
            task.cancel()
        self._waiting.clear()
        for ticket in [*self._passing, *self._unanswered]:
            self._end(ticket)
        for ended in self.running.ended():
            self._desk.take_news(self._worker, ended, msgspec.Raw(_encode(ended)))
        self.running = RunningTurns()

    async def _enter(self, entering: Entering) -> LetIn:
        ticket = entering.ticket
        try:
            passing = await self._desk.gate.admit(
                entering.wanting, is_first=entering.is_first, is_charged=entering.is_charged
            )
        except Overloaded as error:
            return LetIn(retry_after=error.retry_after)
        finally:
            self._waiting.pop(ticket, None)
        self._keep(ticket, passing)
        self._desk.publish()
        return LetIn(passing.is_charged, passing.unanswered is not None)

    def _keep(self, ticket: int, passing: Passing) -> None:
        self._passing[ticket] = passing
        if passing.unanswered is not None:
            self._unanswered[ticket] = passing.unanswered

    def _end(self, ticket: int) -> None:
        """Nothing of the turn is left here."""
        if (passing := self._passing.pop(ticket, None)) is not None:
            with passing:
                pass
        if (unanswered := self._unanswered.pop(ticket, None)) is not None:
            unanswered.ended()
        self._desk.gate.changed()
        self._desk.publish_soon()
