"""Results of rows are kept a few at a time, and none is lost to a stop."""

import asyncio
import json
import zlib
from collections.abc import Coroutine, Sequence
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


class Kept:
    """Stands in for the store: the rows of each transaction, and each row's result."""

    def __init__(self) -> None:
        self.together: list[list[int]] = []
        self.results: dict[int, bytes] = {}

    async def finish(self, batch_id: str, results: Sequence[Result]) -> None:
        self.together.append([one.position for one in results])
        self.results |= {one.position: one.result for one in results}


class QuickRunner(BatchRunner):
    """Its rows end at once."""

    async def _result(self, batch: Batch, row: BatchItem, attempts: Any) -> Result | None:
        await asyncio.sleep(0)
        return Result(position=row.position, status="succeeded", result=b"")


class BrokenRunner(BatchRunner):
    """The first row fails in a way that nobody foresaw."""

    async def _message(self, batch: Batch, row: BatchItem, *_: Any) -> Any:
        raise InvalidRequest("foreseen") if row.position else ValueError("unforeseen")


def running(kept: Any, kind: type[BatchRunner]) -> Coroutine[Any, Any, bool]:
    services: Any = SimpleNamespace(clock=Clock(), batches=kept)
    turns: Any = SimpleNamespace(new_id=lambda: "msg_1")
    runner = kind(services, turns, NUM_ROWS)
    runner._places[BATCH.workspace_id] = asyncio.Semaphore(NUM_ROWS)
    return runner._run_rows(BATCH, ROWS, {"p"}, {})


async def test_rows_that_end_together_are_kept_in_one_transaction() -> None:
    kept = Kept()
    assert await running(kept, QuickRunner)
    [together] = kept.together
    assert sorted(together) == list(range(NUM_ROWS))


async def test_a_row_that_fails_in_an_unforeseen_way_ends_alone() -> None:
    kept = Kept()
    assert await running(kept, BrokenRunner)
    told = [json.loads(zlib.decompress(kept.results[n]))["error"] for n in range(NUM_ROWS)]
    kinds = [each["error"]["type"] for each in told]
    assert kinds == ["api_error"] + ["invalid_request_error"] * (NUM_ROWS - 1)


async def test_what_ended_before_a_stop_is_kept() -> None:
    kept = Kept()
    task = asyncio.create_task(running(kept, QuickRunner))
    for _ in range(10):  # each row has ended by then
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sorted(kept.results) == list(range(NUM_ROWS))
