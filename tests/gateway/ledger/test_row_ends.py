"""A batch's row and its turn end together, once over all gateways, on both databases."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from gateway.base.metrics import Metrics
from gateway.base.record import RowTry, TurnRecord
from gateway.base.row_ids import is_try, new_try_id, row_turn_id, turn_of_try
from gateway.journal.drain import Drain
from gateway.journal.store import Journal
from gateway.ledger.batches import Batches
from gateway.ledger.database import Ledger
from gateway.ledger.row_ends import end_rows
from gateway.ledger.sealed import Texts
from gateway.structs.usage import NOT_DELIVERED
from tests.gateway.ledger.test_batches import MASTER, NOW, create_batch
from tests.gateway.records import ledger_rows, turn_record

pytestmark = pytest.mark.anyio
BATCH = "b1"


@pytest.fixture
def store(ledger: Ledger) -> Batches:
    return Batches(ledger, MASTER, max_running=10, max_bytes=1000)


def ended(instance: str, result: bytes, tokens: int) -> TurnRecord:
    """What a gateway's try of the row left."""
    turn_id = row_turn_id(BATCH, 0)
    row = RowTry(id=new_try_id(instance, turn_id), batch=BATCH, position=0, status="succeeded")
    row.result = Texts(MASTER).batch(BATCH).sealed_result(0, "succeeded", result)
    values = {"instance": instance, "workspace": "a", "price": "reference", "outcome": "stop"}
    counted = {"status": 200, "output_tokens": tokens, "cost": tokens, "cost_without_cache": tokens}
    return turn_record(turn_id, row=row, **values, **counted)


def test_a_try_is_told_by_its_id_and_names_its_turn() -> None:
    turn_id = row_turn_id(BATCH, 7)
    assert turn_id == row_turn_id(BATCH, 7) != row_turn_id(BATCH, 8)
    tries = {new_try_id("0123abcd", turn_id) for _ in range(10)}
    assert len(tries) == 10
    for try_id in tries:
        assert is_try(try_id) and try_id.startswith("msg_0123abcd")
        assert turn_of_try(try_id) == turn_id
    assert not is_try(turn_id)


async def test_the_first_try_ends_the_row_and_is_charged_and_no_other(
    ledger: Ledger, store: Batches, shared_database: str
) -> None:
    await create_batch(store, BATCH, "a")
    first = ended("11111111", b"first", 5)
    second = ended("22222222", b"second", 7)
    assert await end_rows(ledger, [first]) == {first.id}
    for _ in range(2):  # a repeated drain
        assert await end_rows(ledger, [second]) == set()
        assert await end_rows(ledger, [first]) == {first.id}
    assert await store.results(BATCH, -1, 10) == [(0, "r", b"first")]
    (turn,) = ledger_rows(shared_database)
    assert (turn["id"], turn["instance"], turn["cost_nano"]) == (first.id, "11111111", 5)


async def test_a_turn_whose_row_was_canceled_is_not_delivered(
    ledger: Ledger, store: Batches, shared_database: str
) -> None:
    await create_batch(store, BATCH, "a")
    await store.end(BATCH, "canceled", b"canceled", NOW + timedelta(seconds=1))
    record = ended("11111111", b"late", 5)
    for _ in range(2):
        assert await end_rows(ledger, [record]) == {record.id}
    assert await store.results(BATCH, -1, 10) == [(0, "r", b"canceled")]
    (turn,) = ledger_rows(shared_database)
    assert (turn["price"], turn["cost_nano"], turn["output_tokens"]) == (NOT_DELIVERED, 0, 5)


async def test_the_journal_tells_ended_rows_and_counts_those_that_the_ledger_has_from_it(
    ledger: Ledger, store: Batches, tmp_path: Path
) -> None:
    await create_batch(store, BATCH, "a")
    acknowledged: list[str] = []

    async def acknowledge(_engine: str, request_ids: list[str]) -> None:
        acknowledged.extend(request_ids)

    async def end(records: Sequence[TurnRecord]) -> set[str]:
        return await end_rows(ledger, records)

    journal = Journal(tmp_path / "journal").start()
    try:
        drain = Drain(journal, ledger.insert_turns, acknowledge, Metrics(), end_rows=end)
        row = ended(journal.instance, b"whole", 5)
        given_up = ended(journal.instance, b"", 3)
        foreign = ended(journal.instance, b"late", 4)
        assert given_up.row is not None and foreign.row is not None
        given_up.row.result = given_up.row.status = None
        for record in (row, given_up):
            record.engine = "engine-0"
            await journal.open(record)
            await journal.close(record)
        assert await journal.ended_rows() == {row.id}
        while await drain.step():
            pass
        assert sorted(acknowledged) == sorted([row.request_id, given_up.request_id])
        assert await journal.ended_rows() == set()
        assert sum((await journal.forgotten()).values()) == 1
        # What another gateway ended first is not counted here.
        foreign.instance = "22222222"
        await journal.open(foreign)
        await journal.close(foreign)
        while await drain.step():
            pass
        assert journal.backlog == 0
        assert sum((await journal.forgotten()).values()) == 1
    finally:
        await journal.stop()
    assert [result for _, _, result in await store.results(BATCH, -1, 10)] == [b"whole"]
