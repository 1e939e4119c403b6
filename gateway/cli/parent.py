"""The process beside the workers: `serve --workers N` with N above 1.

It opens the port, which all workers inherit, and keeps them running (`processes.py`). It counts the
limits of workspaces for all of them (`gateway/limits/desk.py`), has the queue in front of the
engines (`gateway/turn/gate_desk.py`), writes the turns of their journals into the ledger, and
passes on what one worker asks of the others. It serves no request itself. When
it is killed its workers end at once, and the next start finds their journals.
"""

import asyncio
import errno
import signal
import socket
import time
from contextlib import AsyncExitStack

import msgspec
import uvicorn
from uvicorn.config import STARTUP_FAILURE

from gateway.base.catalogue import load_catalogue
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError, Overloaded
from gateway.base.grants import NO_LIMITS, Limits, limits_of
from gateway.base.link import Handler
from gateway.base.logs import get_logger
from gateway.base.metrics import ParentMetrics, summed
from gateway.base.record import TurnRecord
from gateway.base.settings import Settings
from gateway.base.supervisor import Supervisor
from gateway.cli.left import recover_left
from gateway.cli.processes import Processes, Worker
from gateway.cli.relay import Relay
from gateway.http.admitted import backlog_for, num_descriptors
from gateway.http.machine import GATHER_SECONDS, MetricParts, ParentState
from gateway.http.others import apply_change, decode_change
from gateway.ledger.access import Keys, Workspaces
from gateway.ledger.database import Ledger, open_ledgers
from gateway.limits.admission import Admission
from gateway.limits.counting import Counting
from gateway.limits.desk import Seat
from gateway.limits.keyring import KeyRing, look_at_database, make_keyring
from gateway.limits.reading import read_limits
from gateway.limits.shared_reading import ReadSeat
from gateway.limits.spend import SpendWatch
from gateway.prices.book import PriceBook
from gateway.routing.opening import open_fleet
from gateway.turn.gate import gate_of
from gateway.turn.gate_desk import GateDesk, GateSeat

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_END_SECONDS = 15.0
_BUSY_SECONDS = 3.0
_BUSY_PAUSE_SECONDS = 0.05

_records = msgspec.msgpack.Decoder(list[TurnRecord]).decode
_asked = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode
_encode = msgspec.msgpack.Encoder().encode
_ids = msgspec.msgpack.Decoder(set[str]).decode


def run_parent(settings: Settings, num_workers: int) -> int:
    """Run until a signal ends it. Return the exit status."""
    # What is wrong for every worker is told once, here.
    load_catalogue(settings.models, claude_alias=settings.claude_alias)
    PriceBook(settings.prices, settings.hosted_prices)
    try:
        listening = _listen(settings)
    except OSError as error:
        place = f"{settings.host}:{settings.port}"
        get_logger("gateway").error("can_not_listen", address=place, error=str(error))
        return STARTUP_FAILURE
    factory = uvicorn.Config("", loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        ended_by, status = runner.run(_run(settings, num_workers, listening))
    listening.close()
    if ended_by is not None:
        # As a single process does it: what started us sees which signal ended us.
        signal.signal(ended_by, signal.SIG_DFL)
        signal.raise_signal(ended_by)
    return status


def _listen(settings: Settings) -> socket.socket:
    """Open the port. Workers of a parent that was just killed may hold it for a moment."""
    found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            listening.bind(address)
            listening.listen(backlog_for(num_descriptors()))
            return listening
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                listening.close()
                raise
        time.sleep(_BUSY_PAUSE_SECONDS)


async def _run(
    settings: Settings, num_workers: int, listening: socket.socket
) -> tuple[signal.Signals | None, int]:
    async with AsyncExitStack() as stack:
        parent = Parent(stack, settings, num_workers, listening)
        await parent.start(stack)
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup has SIGHUP ignored
                loop.add_signal_handler(number, parent.end, number)
        await parent.processes.run()
        return parent.ended_by, parent.processes.exit_status or 0


class Parent:
    def __init__(
        self,
        stack: AsyncExitStack,
        settings: Settings,
        num_workers: int,
        listening: socket.socket,
    ) -> None:
        self.ended_by: signal.Signals | None = None
        self._settings = settings
        self._clock = Clock()
        self._metrics = ParentMetrics()
        self._supervisor = Supervisor(self._clock.monotonic, self._metrics.count_loop_end)
        ledgers = open_ledgers(stack, settings.ledger_url)
        self._ledger: Ledger = ledgers.drain
        self._keys = Keys(ledgers.access)
        self._workspaces = Workspaces(ledgers.access)
        self._keyring: KeyRing = make_keyring(self._keys, settings, self._clock)
        self._admission = Admission(self._clock.monotonic, self._clock.wall)
        self._counting = Counting(settings.load_bounds, self._clock.monotonic)
        self._seats: dict[int, Seat] = {}
        self._gate_seats: dict[int, GateSeat] = {}
        self._read_limits = read_limits()
        self._read_seats: dict[int, ReadSeat] = {}
        self._relay = Relay(lambda: self.processes.workers)
        self._inserting = asyncio.Lock()
        # Changes of the fleet, each once, where it came last: what a new worker must do too.
        self._changes: dict[bytes, None] = {}
        # Of each worker's process the last that it told, and the sum of those that have ended.
        self._told: dict[int, bytes] = {}
        self._gone = b""
        self.processes = Processes(num_workers, listening, self._seat, self._left)

    async def start(self, stack: AsyncExitStack) -> None:
        keyring, monotonic = self._keyring, self._clock.monotonic
        fleet = await open_fleet(
            stack, self._settings, self._supervisor, monotonic, only_polls=True
        )
        gate = gate_of(self._settings, fleet, self._metrics, monotonic, self._admission)
        self._desk = GateDesk(gate, fleet, self.processes.room, monotonic, self._relay.pass_on)
        spend = SpendWatch(
            self._workspaces, lambda: keyring.workspaces, self._admission, self._clock
        )
        await look_at_database(keyring, self._keys, self._settings, self._clock)
        loops = {"keys": keyring.run, "spend": spend.run, "left_journals": self._recover_left}
        loops["room"] = self._desk.run
        for name, loop in loops.items():
            self._supervisor.start(name, loop)
            stack.push_async_callback(self._supervisor.stop, name)

    def end(self, number: signal.Signals) -> None:
        """End all workers. They have the time to drain; then they are killed."""
        if self.ended_by is None:
            seconds = self._settings.drain_seconds + self._settings.grace_seconds + _END_SECONDS
            loop = asyncio.get_running_loop()
            loop.call_later(seconds, self.processes.signal, signal.SIGKILL)
        self.ended_by = number
        # A terminal that is closed ends the gateway as an orderly stop does.
        self.processes.signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _seat(self, worker: Worker) -> dict[str, Handler]:
        seat = Seat(
            self._admission, self._counting, self._limits_of, self._seats.get(worker.number)
        )
        self._seats[worker.number] = seat
        gate_seat = self._gate_seats[worker.number] = GateSeat(self._desk, worker.number)
        read_seat = self._read_seats[worker.number] = ReadSeat(self._read_limits)
        if worker.num_started > 1:
            self._metrics.worker_restarts.inc()

        def begun(body: bytes) -> list[msgspec.Raw]:
            seat.has_recovered(_ids(body))
            # What was told so far comes once, with all turns that run.
            self._relay.flush()
            worker.has_begun = True
            for number, other in self._gate_seats.items():
                if number != worker.number:
                    self._relay.tell(worker, other.running.told())
            return [msgspec.Raw(change) for change in self._changes]

        async def spread(body: bytes) -> None:
            await self._spread(worker, *_asked(body))

        return {
            **seat.handlers,
            **gate_seat.handlers,
            **read_seat.handlers,
            "begun": begun,
            "breakers": lambda _: self._desk.fleet.breakers(self._clock.monotonic()),
            "insert": self._insert,
            "gather": self._gather,
            "gather_metrics": self._gather_metrics,
            "spread": spread,
            "state": lambda _: self._state(),
        }

    def _left(self, worker: Worker) -> None:
        self._seats[worker.number].lost()
        self._gate_seats[worker.number].lost()
        self._read_seats[worker.number].lost()
        if (told := self._told.pop(worker.number, None)) is not None:
            self._gone = summed([self._gone, told], only_counts=True)

    def _limits_of(self, workspace: str) -> Limits:
        found = self._keyring.workspaces.get(workspace)
        return NO_LIMITS if found is None else limits_of(found)

    async def _insert(self, body: bytes) -> None:
        records = _records(body)
        # One after the other: SQLite has one writer, and sums of the same hour are the same rows.
        async with self._inserting:
            await self._ledger.insert_turns(records)

    async def _gather(self, body: bytes) -> list[msgspec.Raw]:
        what, content = _asked(body)
        found = await self._ask_all(what, content)
        return [answer for _, answer in found if answer is not None]

    async def _ask_all(
        self, what: str, content: msgspec.Raw
    ) -> list[tuple[Worker, msgspec.Raw | None]]:
        workers = self.processes.workers
        asked = [worker for worker in workers if worker.has_begun and not worker.is_silent]
        found = await asyncio.gather(*(self._ask(worker, what, content) for worker in asked))
        return list(zip(asked, found, strict=True))

    async def _gather_metrics(self, _: bytes) -> MetricParts:
        """The metrics of all processes at one moment, so that no count is lost or told twice."""
        processes = {each.number: each.num_started for each in self.processes.workers}
        answered = set[int]()
        for worker, answer in await self._ask_all("metrics", msgspec.Raw(_encode(None))):
            is_same = worker.has_begun and worker.num_started == processes[worker.number]
            if answer is not None and is_same:
                self._told[worker.number] = msgspec.msgpack.decode(answer, type=bytes)
                answered.add(worker.number)
        silent = [told for number, told in self._told.items() if number not in answered]
        self._metrics.workers.set(sum(each.state.is_running for each in self.processes.workers))
        self._metrics.loops_failing.set(len(self._supervisor.failing))
        return MetricParts(
            now=[self._metrics.exposition(), *(self._told[number] for number in answered)],
            before=[self._gone, *silent],
        )

    async def _spread(self, asking: Worker, what: str, content: msgspec.Raw) -> None:
        if what == "keys":
            await self._keyring.refresh()
        elif what == "engines":
            await apply_change(self._desk.fleet, decode_change(bytes(content)))
            self._changes.pop(bytes(content), None)
            self._changes[bytes(content)] = None
        others = [each for each in self.processes.workers if each.has_begun and each != asking]
        for worker in others:
            if worker.is_silent and worker.link is not None:
                worker.link.tell(what, content)  # it does so when it goes on
        answering = [worker for worker in others if not worker.is_silent]
        await asyncio.gather(*(self._ask(worker, what, content) for worker in answering))

    async def _ask(self, worker: Worker, what: str, content: msgspec.Raw) -> msgspec.Raw | None:
        """A worker's answer; None where it gives none in time."""
        if worker.link is None:
            return None
        try:
            answer = await worker.link.ask(what, content, msgspec.Raw, GATHER_SECONDS)
        except GatewayError as error:
            worker.is_silent |= isinstance(error, Overloaded)
            get_logger("workers").warning(
                "worker_silent", worker=worker.number, what=what, error=str(error)
            )
            return None
        return msgspec.Raw(bytes(answer))

    def _state(self) -> ParentState:
        workers = [worker.state for worker in self.processes.workers]
        return ParentState(workers=workers, loops=self._supervisor.failing)

    async def _recover_left(self, stopping: asyncio.Event) -> None:
        await recover_left(self._settings.data, len(self.processes.workers), stopping)
