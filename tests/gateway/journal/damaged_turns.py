"""The turns that `damages.py` makes, and what must become of each."""

import asyncio
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from engine.protocol import FinalCounts, InputUsage
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import migrate
from gateway.journal.drain import Drain
from gateway.journal.store import Journal
from gateway.ledger.database import Ledger
from gateway.ledger.turn_rows import row_of

OPEN, CLOSED, DRAINED = 6, 12, 12
ENGINE = "engine-0"
EPOCH = "epoch-1"
NOW = datetime(2026, 11, 22, tzinfo=UTC)
_MAX_BYTES = 1_400_000
Stage = Literal["open", "closed", "drained"]
# What a turn that was open is charged with after the start, out of the engine's counts.
_OPEN_COLUMNS = ("id", "workspace_id", "key_id", "outcome", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Truth:
    """`row` is the turn's row in the ledger, as far as it must be so after the start."""

    stage: Stage
    row: dict[str, Any]

    @property
    def end(self) -> tuple[str, int]:
        """The outcome and the output tokens."""
        return self.row["outcome"], self.row["output_tokens"]

    def is_row(self, row: dict[str, Any]) -> bool:
        return all(row[name] == value for name, value in self.row.items())


def counts_of(turn_id: str) -> FinalCounts:
    """What the engine counted for a turn that was open when its gateway was killed."""
    number = int(turn_id[-6:])
    usage = InputUsage(input_tokens=1000 + number, computed_tokens=1000 + number)
    return FinalCounts(
        request_id=turn_id, epoch=EPOCH, reason="cancelled", usage=usage, output_tokens=number
    )


def _turn(journal: Journal, number: int) -> TurnRecord:
    return TurnRecord(
        id=f"msg_{journal.instance}{number:06}",
        instance=journal.instance,
        workspace="default",
        key_id="key",
        model="m",
        engine=ENGINE,
        stream=False,
        opened_at=NOW,
        fingerprint=b"f" * (number * 97 % 5000),
    )


def _truth_of(turn: TurnRecord, stage: Stage) -> Truth:
    row = row_of(turn)
    if stage == "open":
        told = counts_of(turn.id)
        assert told.usage is not None
        row |= {
            "outcome": "gateway_killed",
            "input_tokens": told.usage.input_tokens,
            "output_tokens": told.output_tokens,
        }
        row = {name: row[name] for name in _OPEN_COLUMNS}
    return Truth(stage, row)


def _stage_of(number: int) -> Stage:
    if number < DRAINED:
        return "drained"
    return "closed" if number < DRAINED + CLOSED else "open"


async def _nobody(_engine: str, _turns: list[str]) -> None: ...


async def prepare(data: Path) -> dict[str, Truth]:
    """Turns of all stages under `data`, and beside it the files as a kill would leave them, before
    (`earlier`) and after (`killed`) the last turns. What must become of each, by id. The same of
    another gateway is in `other`.

    The journal is small, so that it has several segments. While a turn is open five others are
    opened, so the record of its close may stand in a later segment than that of its opening."""
    other = data.parent / "other"
    other.mkdir()
    await _live(other / "data")
    return await _live(data)


async def _live(data: Path) -> dict[str, Truth]:
    await asyncio.to_thread(migrate, DatabaseSettings(data=data))
    journal = Journal(data / "journal", _MAX_BYTES).start()
    ledger = Ledger(f"sqlite+aiosqlite:///{data}/ledger.db")
    drain = Drain(journal, ledger.insert_turns, _nobody, Metrics(), ledger.known)
    turns = [_turn(journal, number) for number in range(1, OPEN + CLOSED + DRAINED + 1)]
    for number, turn in enumerate(turns):
        await journal.open(turn)
        if (done := number - OPEN) < 0:
            continue
        turns[done].outcome, turns[done].output_tokens = "stop", done + 1
        await journal.close(turns[done])
        if done < DRAINED:
            await drain.step()
        if done == DRAINED // 2:
            shutil.copytree(data, data.parent / "earlier")
    truth = {turn.id: _truth_of(turn, _stage_of(n)) for n, turn in enumerate(turns)}
    shutil.copytree(data, data.parent / "killed")
    await ledger.close()
    await journal.stop()
    return truth
