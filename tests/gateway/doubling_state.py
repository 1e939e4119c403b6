"""Dimensions of what a gateway holds, not of one request."""

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch
from urllib.parse import parse_qsl

from engine.protocol import ChainHeld, HeldName, Snapshot
from gateway.base.record import TurnRecord
from gateway.http.query import query_problems
from gateway.journal import store
from gateway.journal.store import Journal
from gateway.routing.held import ResidencyIndex
from tests.doubling import Dimension, Work
from tests.gateway.serving import WAIT_SECONDS

NOW = datetime(2026, 11, 22, tzinfo=UTC)


def _chain(number: int) -> ChainHeld:
    names = [HeldName(f"{number * 10 + n:016x}", 10) for n in range(10)]
    return ChainHeld(seq=number + 1, names=names, num_leased=10, lease_seconds=300.0)


def _snapshot(size: int) -> Work:
    frame = Snapshot(seq=0, epoch="e", chains=[_chain(n) for n in range(size // 10)])
    return lambda: ResidencyIndex().apply(frame, 0.0)


def _record(turn_id: str, workspace: str = "w") -> TurnRecord:
    return TurnRecord(
        id=turn_id,
        instance="i",
        workspace=workspace,
        key_id="k",
        model="m",
        stream=False,
        opened_at=NOW,
    )


def _opened(size: int) -> Work:
    """A journal with as many records is opened after a kill."""
    folder = Path(tempfile.mkdtemp(prefix="doubling-"))

    async def live(number: int) -> None:
        journal = Journal(folder).start()
        await asyncio.gather(*(journal.open(_record(f"msg_{n:08}", "w")) for n in range(number)))
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
        given: dict[str, list[str]] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            given.setdefault(name, []).append(value)
        query_problems(declared, given)

    return work


_ROWS: dict[str, tuple[int, Callable[[int], Work]]] = {
    # More names do not fit into a processor's cache, and then each costs about twice as much.
    "names of an engine's snapshot": (16_000, _snapshot),
    "records of a journal that is opened": (16_384, _opened),
    "bytes of a query": (65_536, _queried),
}
STATE_DIMENSIONS = [Dimension(f"held: {name}", most, make) for name, (most, make) in _ROWS.items()]
