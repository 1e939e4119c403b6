"""Which gateway owns which batch, on both databases."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.ledger.batches import Batch, Batches, BatchItem
from gateway.ledger.database import Ledger

NOW = datetime(2026, 11, 22, tzinfo=UTC)
MASTER = SecretStr("a master secret")
OWNED = timedelta(seconds=15)


@pytest.fixture
def store(ledger: Ledger) -> Batches:
    return Batches(ledger, MASTER, max_running=10, max_bytes=1000)


async def create_batch(store: Batches, name: str, workspace: str, **changes: Any) -> Batch:
    """A batch with one row. The names tell the order of creation."""
    values: dict[str, Any] = {
        "id": name,
        "workspace_id": workspace,
        "key_id": "key",
        "version": "2023-06-01",
        "status": "in_progress",
        "num_bytes": 10,
        "created_at": NOW - timedelta(seconds=60 - int(name[1:])),
        "expires_at": NOW + timedelta(days=1),
    }
    batch = Batch(**{**values, **changes})
    row = BatchItem(position=0, custom_id="r", rank=0, prefix="", params=b"x")
    await store.create(batch, [row])
    return batch


async def claimed(store: Batches, owner: str, working: list[str], seconds: float = 0) -> list[str]:
    now = NOW + timedelta(seconds=seconds)
    batches = await store.claim(owner, now, now + OWNED, working=working, max_owned=2)
    return [batch.id for batch in batches]


@pytest.mark.anyio
async def test_gateways_share_the_batches_of_a_workspace_and_each_keeps_what_it_works_on(
    store: Batches,
) -> None:
    for number in range(5):
        await create_batch(store, f"a{number}", "a")
    await create_batch(store, "b9", "b")
    assert await claimed(store, "one", []) == ["a0", "a1", "b9"]
    assert await claimed(store, "two", []) == ["a2", "a3"]
    # What it works on stays its own, also where older ones became free.
    assert await claimed(store, "one", ["a1", "b9"], 1) == ["a0", "a1", "b9"]
    await store.end("a1", "succeeded", b"", NOW)
    assert await claimed(store, "one", ["a0", "b9"], 2) == ["a0", "a4", "b9"]
    # The second gateway went away: its batches are free 15 seconds later, and wait their turn.
    assert await claimed(store, "one", ["a0", "a4", "b9"], 16) == ["a0", "a4", "b9"]
    assert await claimed(store, "three", [], 16) == ["a2", "a3"]


@pytest.mark.anyio
async def test_a_batch_that_is_to_end_does_not_wait_for_the_others_of_its_workspace(
    store: Batches,
) -> None:
    for number in range(5):
        await create_batch(store, f"a{number}", "a", expires_at=NOW + timedelta(seconds=number * 9))
    assert await claimed(store, "one", [], -1) == ["a0", "a1"]
    await store.cancel("a", "a4", NOW)
    assert await claimed(store, "one", ["a0", "a1"], -1) == ["a0", "a1", "a4"]
    assert await claimed(store, "one", ["a0", "a1", "a4"], 18) == ["a0", "a1", "a2", "a4"]
