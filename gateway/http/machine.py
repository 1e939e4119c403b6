"""A gateway's processes: this one alone, or one of several workers beside their parent.

Alone it counts limits and writes the ledger itself. A worker asks its parent for both, and through
it the other workers for what only they know.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.base.clock import Clock
from gateway.base.link import Handler, Link
from gateway.base.logs import get_logger
from gateway.base.settings import Settings
from gateway.base.supervisor import LoopHealth
from gateway.journal.drain import Insert
from gateway.journal.remote import RemoteLedger
from gateway.ledger.access import Workspaces
from gateway.limits.admission import Admission, Admitting
from gateway.limits.counting import Counting, CountingCalls
from gateway.limits.keyring import KeyRing
from gateway.limits.reading import ReadKind, Reads, read_limits
from gateway.limits.shared import SharedAdmission, SharedCounting
from gateway.limits.shared_reading import ReadNumbers, SharedReadLimit
from gateway.limits.spend import SpendWatch
from gateway.routing.breaker import BreakerView
from gateway.routing.news import News
from gateway.turn.room import OwnRoom, Room

GATHER_SECONDS = 3.0
_HELLO_SECONDS = 30.0

Loop = Callable[[asyncio.Event], Awaitable[None]]
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place: its number, from 1 on, that of all workers, its socket to the parent.

    `room` is the memory in which the parent tells what room engines have.
    """

    number: int
    num_workers: int
    parent: socket.socket
    room: Room


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent knows of a worker. `restarts` counts its processes after the first.

    `is_silent`: it runs, and did not answer the parent in time.
    """

    worker: int
    pid: int | None
    is_running: bool
    is_silent: bool
    restarts: int


class ParentState(msgspec.Struct, frozen=True, kw_only=True):
    """`loops` are the parent's loops that are failing."""

    workers: list[WorkerState]
    loops: list[LoopHealth]


class MetricParts(msgspec.Struct, frozen=True, kw_only=True):
    """Expositions of a gateway's processes.

    `now` are those of the parent and of workers that answered. Of `before` only counts are true:
    they are what other workers told last, and the sums of processes that have ended.
    """

    now: list[bytes]
    before: list[bytes]


@dataclass(slots=True)
class Machine:
    """`link` is None for a process that is alone. `handlers` answer what the parent asks.

    `recovered` are the turns that an earlier process left open in the journal.
    """

    number: int
    num_workers: int
    admission: Admitting
    counting: CountingCalls
    reads: Callable[[ReadKind], Reads]
    link: Link | None = None
    room: OwnRoom | None = None
    handlers: dict[str, Handler] = field(default_factory=dict)
    own: Admission | None = None
    recovered: list[str] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this process runs what one process of the machine must run alone."""
        return self.number == 1

    def journal(self, data: Path) -> Path:
        return journal_of(data, self.number)

    def insert(self, insert: Insert) -> Insert:
        """How turns get into the ledger; `insert` does it here."""
        return insert if self.link is None else RemoteLedger(self.link).insert

    @property
    def tell_news(self) -> Callable[[News], None] | None:
        """What tells other processes of the turns at engines; None without any."""
        return None if self.link is None else partial(self.link.tell, "news")

    def spend(self, workspaces: Workspaces, keyring: KeyRing, clock: Clock) -> SpendWatch | None:
        """What reads the spend of workspaces; None where the parent does."""
        if self.own is None:
            return None
        return SpendWatch(workspaces, lambda: keyring.workspaces, self.own, clock)

    async def has_begun(self, kind: type[Kind]) -> list[Kind]:
        """Tell the parent that this worker is about to serve, and which turns it took over.

        Return the changes of the fleet that were made since the gateway began.
        """
        assert self.link is not None
        found = await self.link.ask("begun", self.recovered, list[msgspec.Raw], _HELLO_SECONDS)
        return [msgspec.msgpack.decode(each, type=kind) for each in found]

    async def gather(self, what: str, body: object, kind: type[Kind]) -> list[Kind]:
        """The answers of all workers that give one in time, this one's too; alone, none.

        Raise Overloaded where the parent does not answer.
        """
        if self.link is None:
            return []
        found = await self.link.ask("gather", (what, body), list[msgspec.Raw], GATHER_SECONDS + 1)
        return [msgspec.msgpack.decode(each, type=kind) for each in found]

    async def spread(self, what: str, body: object = None) -> None:
        """Have the other workers, and the parent, do what this one did."""
        if self.link is not None:
            await self.link.ask("spread", (what, body), type(None), GATHER_SECONDS + 1)

    async def breakers(self) -> Mapping[str, BreakerView]:
        """The parent's breaker of each engine, by its name."""
        assert self.link is not None
        return await self.link.ask("breakers", None, dict[str, BreakerView], GATHER_SECONDS)

    async def metric_parts(self) -> MetricParts:
        """Raise Overloaded where the parent does not answer."""
        assert self.link is not None
        return await self.link.ask("gather_metrics", None, MetricParts, GATHER_SECONDS + 1)

    async def parent_state(self) -> ParentState:
        assert self.link is not None
        return await self.link.ask("state", None, ParentState, GATHER_SECONDS)


def journal_of(data: Path, number: int) -> Path:
    """The first worker's journal is the one of a gateway that is alone."""
    return data / ("journal" if number == 1 else f"journal-{number}")


async def join(
    stack: AsyncExitStack, place: Place | None, settings: Settings, clock: Clock
) -> Machine:
    if place is None:
        own = Admission(clock.monotonic, clock.wall)
        counts = Counting(settings.load_bounds, clock.monotonic)
        return Machine(1, 1, own, counts, read_limits().__getitem__, own=own)
    handlers: dict[str, Handler] = {}
    is_leaving = False

    def lost() -> None:
        # Without the parent no limit is counted. Its journal has what runs, as after any kill.
        if not is_leaving:
            get_logger("gateway").critical("parent_lost", worker=place.number)
            os.kill(os.getpid(), signal.SIGKILL)

    def leave() -> None:
        nonlocal is_leaving
        is_leaving = True
        link.close()

    link = await Link.over(place.parent, handlers, lost)
    stack.callback(leave)
    admission = SharedAdmission(link, place.num_workers)
    counting = SharedCounting(link)
    reads = partial(SharedReadLimit, link, ReadNumbers())
    room = OwnRoom(place.room, place.number)
    return Machine(
        place.number, place.num_workers, admission, counting, reads, link, room, handlers
    )
