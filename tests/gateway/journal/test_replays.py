"""One turn is one row and one charge, however often it is told (F8): replays change nothing."""

import random
from pathlib import Path

import pytest

from engine.protocol import InputUsage
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal.drain import Billing, Drain
from gateway.journal.store import Journal
from gateway.ledger.database import Ledger
from gateway.prices.files import load_prices
from tests.gateway.journal.test_journal import Witness, nobody, record, settling
from tests.gateway.records import counts_of, ledger_rows

pytestmark = pytest.mark.anyio

REPLAYS = 400
TURNS = 20


async def test_replayed_drains_and_late_or_unknown_counts_change_no_row(
    tmp_path: Path, ledger_url: str, journal: Journal
) -> None:
    rng = random.Random(8)
    ledger = Ledger(ledger_url)
    metrics = Metrics()
    witness = Witness()
    charge = Billing(load_prices(), metrics).charge
    reconciler = settling(journal, witness)
    drain = Drain(journal, ledger.insert_turns, nobody, metrics)
    turns: list[TurnRecord] = [record(journal, number) for number in range(TURNS)]
    for number, turn in enumerate(turns):
        await journal.open(turn)
        turn.outcome = "stop"
        turn.output_tokens = number
        charge(turn)
        await journal.close(turn)
    assert await drain.step() == TURNS
    once = ledger_rows(ledger_url)
    assert len(once) == TURNS
    for replay in range(REPLAYS):
        turn = rng.choice(turns)
        changed = TurnRecord(**{name: getattr(turn, name) for name in turn.__struct_fields__})
        changed.output_tokens = 10**6
        changed.cost = 10**9
        late = {"usage": InputUsage(input_tokens=999), "output_tokens": 999}
        witness.counts = [counts_of(turn.id, **late), counts_of(f"msg_unknown{replay}", **late)]
        match replay % 4:
            case 0:
                await ledger.insert_turns([changed])
            case 1:
                await journal.close(changed)
                await drain.step()
            case 2:
                reconciler.take_over(changed)
                await reconciler.step()
                await drain.step()
            case _:
                await reconciler.step(is_sweep=True)
    assert ledger_rows(ledger_url) == once
    assert journal.backlog == 0 and not await journal.open_turns()
    assert set(witness.acked) <= {turn.id for turn in turns} and witness.acked
    await ledger.close()
