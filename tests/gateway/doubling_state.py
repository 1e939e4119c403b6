"""Dimensions of what a gateway holds, not of one request.

One event, turn, connection or start among so many others costs at most in proportion to them.
"""

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch
from urllib.parse import parse_qsl

from engine.places import Connections
from engine.protocol import ChainHeld, HeldName, Snapshot
from gateway.admission.accounts import TurnClaim, WorkspaceLimits
from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.base.grants import Limits
from gateway.http.query import query_problems
from gateway.journal import store
from gateway.journal.store import Journal
from gateway.prompt.ask import Principal
from gateway.routing.held import Ends, Holdings
from tests.doubling import Dimension, Work
from tests.gateway.records import turn_record
from tests.gateway.serving import WAIT_SECONDS

NOW = datetime(2026, 11, 22, tzinfo=UTC)
_NAMES_OF_A_TURN = 512


def _chain(number: int) -> ChainHeld:
    names = [HeldName(f"{number * 10 + n:016x}", 10) for n in range(10)]
    return ChainHeld(seq=number + 1, names=names, num_leased=10, lease_seconds=300.0)


def _snapshot(size: int) -> Work:
    frame = Snapshot(seq=0, epoch="e", chains=[_chain(n) for n in range(size // 10)])
    return lambda: Holdings().apply(frame, 0.0)


def _placed(size: int) -> Work:
    """A turn of many names is looked up and expected in an index of `size` names."""
    index = Holdings()
    index.apply(Snapshot(seq=0, epoch="e", chains=[_chain(n) for n in range(size // 10)]), 0.0)
    names = range(_NAMES_OF_A_TURN)
    ends = Ends([f"{n:016x}" for n in names], [10 * (n + 1) for n in names])

    def work() -> None:
        index.coverage(ends, 1.0)
        index.expect(ends.digests, 1.0)

    return work


def _queued(size: int) -> Work:
    """One more turn among as many workspaces as wait."""
    queue: FairQueue[int] = FairQueue()
    for number in range(size):
        queue.push(Waiting(f"w{number}", None, 10, number))

    def work() -> None:
        first = queue.pop(lambda _: True)
        assert first is not None
        queue.push(first, is_first=True)

    return work


def _admitted(size: int) -> Work:
    """One turn from its admission to its close, among as many workspaces."""
    limits = WorkspaceLimits(lambda: 0.0, lambda: NOW)

    def turn(workspace: str) -> None:
        principal = Principal(workspace, "k", "s", limits=Limits(requests_per_minute=10**9))
        limits.take(TurnClaim("t", principal, 1))
        limits.leave("t", workspace, is_open=True)
        limits.count_used(turn_record("t", workspace=workspace))

    for number in range(size):
        turn(f"w{number}")
    return lambda: turn("w0")


class _Guest:
    def evict(self) -> None: ...


def _connected(size: int) -> Work:
    """One connection comes and goes among as many of other addresses."""
    connections = Connections(2 * size, 256, 0.5)
    for number in range(size):
        connections.enter(_Guest(), f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")

    def work() -> None:
        guest = _Guest()
        connections.enter(guest, "192.0.2.1")
        connections.leave(guest)

    return work


def _opened(size: int) -> Work:
    """A journal with as many records is opened after a kill."""
    folder = Path(tempfile.mkdtemp(prefix="doubling-"))

    async def live(number: int) -> None:
        journal = Journal(folder).start()
        await asyncio.gather(*(journal.open(turn_record(f"msg_{n:08}")) for n in range(number)))
        await journal.stop()

    with patch.object(store, "_DEADLINE_SECONDS", WAIT_SECONDS):
        asyncio.run(live(size))
    weakref.finalize(live, shutil.rmtree, folder, ignore_errors=True)
    return lambda: asyncio.run(live(0))


def _queried(size: int) -> Work:
    """A query of as many bytes against a description of a few parameters."""
    declared = [
        {"name": name, "required": False, "schema": {"type": "integer", "minimum": 0}}
        for name in ("since_ms", "until_ms", "limit")
    ]
    query = "&".join(f"p{n}=1" for n in range(size // 16)) + "&limit=" + "9" * (size // 2)

    def work() -> None:
        values: dict[str, list[str]] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            values.setdefault(name, []).append(value)
        query_problems(declared, values)

    return work


_ROWS: dict[str, tuple[int, Callable[[int], Work]]] = {
    # More names do not fit into a processor's cache, and then each costs about twice as much.
    "names of an engine's snapshot": (16_000, _snapshot),
    "names in the index, one turn placed": (160_000, _placed),
    "workspaces that wait, one turn": (1024, _queued),
    "workspaces known, one turn admitted": (8_000, _admitted),
    "connections, one comes and goes": (32_768, _connected),
    "records of a journal that is opened": (16_384, _opened),
    "bytes of a query": (65_536, _queried),
}
STATE_DIMENSIONS = [Dimension(f"held: {name}", most, make) for name, (most, make) in _ROWS.items()]
