import asyncio
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.protocol import FinalCounts
from gateway.base.errors import EngineTimeout
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal import store
from gateway.journal.drain import Billing, Drain, Known
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.prices.files import load_prices
from tests.gateway.records import counts_of, turn_record

pytestmark = pytest.mark.anyio


def record(journal: Journal, number: int) -> TurnRecord:
    return turn_record(
        f"msg_{journal.instance}{number:06}",
        instance=journal.instance,
        workspace="default",
        price="reference",
        engine="engine-0",
    )


class Witness:
    """An engine's memory of final counts."""

    name = "engine-0"

    def __init__(self, *counts: FinalCounts) -> None:
        self.counts = list(counts)
        self.acked: list[str] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self.is_ready = True
        self.is_silent = False

    async def unacknowledged(self) -> list[FinalCounts]:
        if self.is_silent:
            raise EngineTimeout
        return self.counts

    async def ack(self, request_ids: list[str], /) -> None:
        self.acked += request_ids

    async def cancel(self, request_id: str, /) -> bool:
        self.cancelled.append(request_id)
        return request_id in self.running


def settling(
    journal: Journal,
    *witnesses: Witness,
    now: Callable[[], float] = lambda: 0.0,
    charged: Callable[[TurnRecord], None] | None = None,
    known: Known | None = None,
) -> Reconciler:
    """A reconciler that charges what the shipped prices say."""
    metrics = Metrics()
    billing = Billing(load_prices(), metrics, charged or (lambda _: None))
    return Reconciler(journal, [*witnesses], metrics, billing.charge, now, known)


async def nobody(_engine: str, _turn_ids: list[str]) -> None:
    """Acknowledge to no engine."""


def test_what_a_killed_gateway_acknowledged_is_in_its_journal(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.gateway.journal_writer", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(100)]
    writer.send_signal(signal.SIGKILL)
    lines += writer.stdout.read().splitlines(keepends=True)
    writer.wait()
    whole = [line.split() for line in lines if line.endswith("\n")]
    opened = {words[1] for words in whole if words[0] == "open"}
    closed = {words[1]: int(words[2]) for words in whole if words[0] == "closed"}

    async def check() -> None:
        journal = Journal(tmp_path).start()
        turns = {turn.id: turn for turn in await journal.closed_turns(1_000_000)}
        still_open = {turn.id for turn in await journal.open_turns()}
        await journal.stop()
        assert opened <= turns.keys() | still_open
        assert closed.items() <= {i: turn.output_tokens for i, turn in turns.items()}.items()
        assert len(still_open) <= 8

    asyncio.run(check())
    writer.stdout.close()


async def test_the_turns_of_a_killed_gateway_are_closed_in_few_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, 43 took 12 seconds on a disk that takes 250 ms for a write."""
    journal = Journal(tmp_path).start()
    turns = [record(journal, number) for number in range(60)]
    await asyncio.gather(*map(journal.open, turns))
    await journal.stop()

    journal = Journal(tmp_path).start()
    now = [0.0]
    witness = Witness(*(counts_of(turn.id) for turn in turns[:30] * 2))
    reconciler = settling(journal, witness, now=lambda: now[0])
    assert await reconciler.recover() == 60
    commits: list[sqlite3.Connection] = []
    real = store._commit
    monkeypatch.setattr(store, "_commit", lambda db: (commits.append(db), real(db)))
    await reconciler.step()
    assert reconciler.num_pending == 30 and len(commits) <= 5
    now[0] = 30.0
    await reconciler.step()
    assert reconciler.num_pending == 0 and len(commits) <= 10
    closed = await journal.closed_turns(100)
    assert sorted(turn.id for turn in closed) == sorted(turn.id for turn in turns)
    await journal.stop()


@pytest.mark.parametrize(
    ("outcome", "is_paid"), [("client_disconnect", True), ("timeout_error", False)]
)
async def test_what_an_engine_prefilled_for_a_client_that_left_is_paid_as_uncached_input(
    journal: Journal, outcome: str, is_paid: bool
) -> None:
    turn = record(journal, 1)
    charged = list[TurnRecord]()
    await journal.open(turn)
    final = counts_of(turn.id, reason="cancelled", prefilled_tokens=3_000)
    reconciler = settling(journal, Witness(final), charged=charged.append)
    turn.outcome = outcome
    reconciler.take_over(turn)
    await reconciler.step()
    (closed,) = await journal.closed_turns(10)
    paid = 3_000 if is_paid else 0
    row = (closed.outcome, closed.input_tokens, closed.computed_tokens, closed.cache_read_tokens)
    assert row == (outcome, paid, 3_000, 0)
    assert closed.cost == paid * 1000
    assert charged[0].input_tokens == paid, "it counts against rates and spend"


async def test_a_turn_is_not_given_up_while_its_engine_is_too_busy_to_answer(
    journal: Journal,
) -> None:
    now = [0.0]
    await journal.open(record(journal, 1))
    witness = Witness(counts_of(record(journal, 1).id))
    witness.is_silent = True
    reconciler = settling(journal, witness, now=lambda: now[0])
    await reconciler.recover()
    now[0] = 60.0
    await reconciler.step()
    assert reconciler.num_pending == 1 and witness.cancelled
    counts = witness.counts
    witness.counts = []
    witness.is_silent = False
    witness.running = {record(journal, 1).id}
    await reconciler.step()
    assert reconciler.num_pending == 1, "it still runs"
    witness.counts = counts
    witness.running = set()
    await reconciler.step()
    (turn,) = await journal.closed_turns(10)
    assert turn.stop_reason == "stop" and reconciler.num_pending == 0


async def test_an_idle_drain_leaves_the_journal_alone_and_its_last_look_waits_for_closes(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last close was handed in and is not on disk when the drain is told to stop."""
    monkeypatch.setattr("gateway.journal.drain._IDLE_SECONDS", 0.01)
    ledger: list[str] = []
    looks = 0
    look = journal.closed_turns

    async def counted(limit: int) -> list[TurnRecord]:
        nonlocal looks
        looks += 1
        return await look(limit)

    async def insert(turns: Sequence[TurnRecord]) -> None:
        ledger.extend(turn.id for turn in turns)

    monkeypatch.setattr(journal, "closed_turns", counted)
    stopping = asyncio.Event()
    running = asyncio.create_task(Drain(journal, insert, nobody, Metrics()).run(stopping))
    while not looks:
        await asyncio.sleep(0.01)
    turn = record(journal, 1)
    await journal.open(turn)
    await asyncio.sleep(0.2)
    assert looks == 1
    journal.close_soon(turn)
    stopping.set()
    await running
    assert ledger == [turn.id] and journal.backlog == 0


def test_what_was_handed_in_just_before_the_stop_is_written(tmp_path: Path) -> None:
    """Writes gather for a few rounds of the event loop. A stop does not wait for those, and this
    loop is too busy for them."""

    async def close_and_stop() -> None:
        journal = Journal(tmp_path).start()
        turn = record(journal, 1)
        await journal.open(turn)
        journal.close_soon(turn)
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        await journal.stop()

    async def open_and_closed() -> tuple[int, int]:
        journal = Journal(tmp_path).start()
        counts = len(await journal.open_turns()), len(await journal.closed_turns(10))
        await journal.stop()
        return counts

    asyncio.run(close_and_stop())
    assert asyncio.run(open_and_closed()) == (0, 1)
