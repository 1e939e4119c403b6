"""A parent with its queue, and workers at real links, before engines that are not there."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from engine.protocol import Description
from gateway.base.link import Link
from gateway.base.metrics import ParentMetrics
from gateway.base.supervisor import Supervisor
from gateway.limits.admission import Admission
from gateway.routing.client import EngineHttp
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.heard import take_news
from gateway.routing.held import PrefixEnd
from gateway.routing.news import News
from gateway.turn.gate import Gate
from gateway.turn.gate_desk import GateDesk, GateSeat
from gateway.turn.passing import Passing
from gateway.turn.room import OwnRoom, Room, make_room
from gateway.turn.shared_gate import SharedGate
from tests.gateway.serving import WAIT_SECONDS

MAX_RUNNING = 4
PLACES = MAX_RUNNING + 1
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
NAMES = tuple(f"{number:016x}" for number in range(3))
ENDS = tuple(PrefixEnd(name, 100 * (number + 1)) for number, name in enumerate(NAMES))
_heard = msgspec.msgpack.Decoder(list[News]).decode


@dataclass(frozen=True)
class _Principal:
    workspace: str


@dataclass(frozen=True)
class _Model:
    engine_model: str = "m"


@dataclass(frozen=True)
class Asked:
    """What the gate reads of an `Ask`."""

    principal: _Principal
    arrived: float
    prompt_tokens: int
    model: _Model = _Model()
    is_batch: bool = False

    @property
    def estimated_tokens(self) -> int:
        return self.prompt_tokens


@dataclass
class Worker:
    number: int
    link: Link
    parents: Link
    seat: GateSeat
    fleet: Fleet
    gate: SharedGate

    @property
    def engine(self) -> Engine:
        return self.fleet.engines[0]

    async def die(self) -> None:
        self.link.close()
        await until(lambda: not self.parents.is_open)
        self.seat.lost()


@dataclass
class House:
    """Its clock stands still until a test moves it."""

    num_workers: int = 2
    wait_seconds: float = 30.0
    queue_tokens: int = 1 << 30
    seconds: float = 100.0
    http: EngineHttp = field(default_factory=EngineHttp)
    workers: list[Worker] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """The workspaces of turns in the order in which they were let in."""

    def __post_init__(self) -> None:
        self.fleet = self._fleet(None)
        admission = Admission(self.clock, lambda: NOON)
        self.gate = Gate(
            self.fleet.engines,
            ParentMetrics(),
            self.clock,
            admission,
            wait_seconds=self.wait_seconds,
            queue_tokens=self.queue_tokens,
            num_rows=1,
        )
        descriptor = make_room(self.num_workers)
        self.room = Room(descriptor, self.num_workers)
        self.desk = GateDesk(self.gate, self.fleet, self.room, self.clock, self._pass_on)
        self.desk.publish()

    def clock(self) -> float:
        return self.seconds

    def asked(self, workspace: str, tokens: int = 100) -> Asked:
        return Asked(_Principal(workspace), self.seconds, tokens)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[list[Worker]]:
        for number in range(1, self.num_workers + 1):
            self.workers.append(await self._worker(number))
        try:
            yield self.workers
        finally:
            for worker in self.workers:
                worker.link.close()
                worker.parents.close()
            await asyncio.sleep(0.01)
            await self.http.aclose()

    async def turn(
        self, gate: SharedGate | Gate, engine: Engine, workspace: str, name: str
    ) -> None:
        """Let a turn in, and have it run at the engine."""
        passing: Passing = await gate.enter(self.asked(workspace))  # type: ignore[arg-type]
        self.order.append(workspace)
        with passing:
            engine.assign(name, ENDS, 10, 100, is_batch=False, workspace=workspace)

    def end(self, worker: Worker, name: str) -> None:
        worker.engine.left(name, ENDS, has_started=True)
        worker.gate.moved(worker.engine)

    async def _worker(self, number: int) -> Worker:
        ours, theirs = socket.socketpair()
        seat = GateSeat(self.desk, number)
        parents = await Link.over(ours, seat.handlers)

        def heard(body: bytes) -> None:
            for news in _heard(body):
                take_news(fleet, news, self.seconds)

        link = await Link.over(theirs, {"heard": heard})
        fleet = self._fleet(lambda news: link.tell("news", news))
        own = OwnRoom(self.room, number)
        gate = SharedGate(
            fleet.engines, link, own, self.clock, wait_seconds=self.wait_seconds, num_rows=1
        )
        return Worker(number, link, parents, seat, fleet, gate)

    def _fleet(self, tell: Callable[[News], None] | None) -> Fleet:
        def make(name: str, url: str) -> Engine:
            engine = Engine(name, url, "s", self.http, monotonic=self.clock, tell=tell)
            engine.description = described()
            engine.status = "ready"
            return engine

        return Fleet(["e=http://127.0.0.1:1"], make, Supervisor(self.clock, lambda _: None))

    def _pass_on(self, worker: int, news: msgspec.Raw) -> None:
        for other in self.workers:
            if other.number != worker:
                other.parents.tell("heard", [news])


def described() -> Description:
    return Description(
        backend="synthetic",
        model="m",
        epoch="e1",
        max_context_tokens=100_000,
        block_size=16,
        num_blocks=1000,
        granularity=1,
        min_cache_tokens=16,
        capabilities=[],
        max_running=MAX_RUNNING,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def cancel(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
