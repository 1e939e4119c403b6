"""Results of rows are kept a few at a time, and none is lost to a stop."""

import asyncio
import json
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.base.clock import Clock
from gateway.base.errors import InvalidRequest
from gateway.http.batch_runner import BatchRunner
from gateway.ledger.stored import Batch, BatchItem, Result

pytestmark = pytest.mark.anyio

NUM_ROWS = 8
NOW = datetime.now(UTC)
BATCH = Batch(
    id="b",
    workspace_id="w",
    key_id="k",
    version="2023-06-01",
    status="in_progress",
    num_bytes=1,
    created_at=NOW,
    expires_at=NOW + timedelta(days=1),
)
ROWS = [
    BatchItem(position=n, custom_id=str(n), rank=n, prefix="p", params=b"") for n in range(NUM_ROWS)
]


class KeptResults:
    def __init__(self) -> None:
        self.kept: list[list[int]] = []
        self.results: list[bytes] = []

    async def finish(self, batch_id: str, results: Sequence[Result]) -> None:
        self.results += [one.result for one in sorted(results, key=lambda one: one.position)]
        self.kept.append([one.position for one in results])


class QuickRunner(BatchRunner):
    """Its rows end at once, or after `seconds`."""

    seconds = 0.0

    async def _result(self, batch: Batch, row: BatchItem, attempts: Any) -> Result | None:
        await asyncio.sleep(self.seconds)
        return Result(position=row.position, status="succeeded", result=b"")


def quick_runner(store: KeptResults, kind: type[QuickRunner] = QuickRunner) -> QuickRunner:
    stand_in: Any = SimpleNamespace(clock=Clock(), new_id=lambda: "msg_1")
    kept: Any = store
    runner = kind(kept, stand_in, stand_in, stand_in, stand_in, NUM_ROWS)
    runner._places[BATCH.workspace_id] = asyncio.Semaphore(NUM_ROWS)
    return runner


async def test_rows_that_end_together_are_kept_in_one_transaction() -> None:
    store = KeptResults()
    assert await quick_runner(store)._run_rows(BATCH, ROWS, {"p"}, {})
    [together] = store.kept
    assert sorted(together) == list(range(NUM_ROWS))


class BrokenRunner(QuickRunner):
    """The first row fails in a way that nobody foresaw."""

    _result = BatchRunner._result

    async def _message(self, batch: Batch, row: BatchItem, *_: Any) -> Any:
        if row.position == 0:
            raise ValueError("unforeseen")
        raise InvalidRequest("foreseen")


async def test_a_row_that_fails_in_an_unforeseen_way_ends_alone() -> None:
    store = KeptResults()
    runner = quick_runner(store, BrokenRunner)
    assert await runner._run_rows(BATCH, ROWS, {"p"}, {})
    assert sorted(position for kept in store.kept for position in kept) == list(range(NUM_ROWS))
    kinds = [json.loads(zlib.decompress(r))["error"]["error"]["type"] for r in store.results[:2]]
    assert kinds == ["api_error", "invalid_request_error"]


async def test_what_ended_before_a_stop_is_kept() -> None:
    store = KeptResults()
    runner = quick_runner(store)
    running = asyncio.create_task(runner._run_rows(BATCH, ROWS, {"p"}, {}))
    await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sorted(position for kept in store.kept for position in kept) == list(range(NUM_ROWS))
