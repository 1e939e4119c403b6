"""Random damage to the journal and the SQLite ledger of a killed gateway, then the next start.

    python -m scripts.faults.damages --count 200

Each trial makes turns that are open, closed, and in the ledger, copies the files as `kill -9` would
leave them, damages one file, and does what a start does: it opens the journal, takes over what is
open, and drains what is closed. Then every turn must be where it belongs with its own counts, or be
named: by the journal's list of turns set aside, by an error of one line, or by `ledger check`.
"""

import argparse
import asyncio
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from gateway.base.errors import GatewayError
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import migrate
from gateway.journal.drain import Drain
from gateway.journal.writer import Journal
from gateway.ledger.check import problems
from gateway.ledger.database import Ledger
from gateway.ledger.reads.turns import one

OPEN, CLOSED, DRAINED = 6, 12, 12
FILES = (
    "journal/journal.db",
    "journal/journal.db-wal",
    "journal/turns.log",
    "ledger.db",
    "ledger.db-wal",
)
NOW = datetime(2026, 11, 22, tzinfo=UTC)


@dataclass
class Outcome:
    """What became of the turns of one trial. `unnamed` are wrong or gone without a word."""

    damage: str
    said: str = ""
    intact: int = 0
    named: int = 0
    unnamed: list[str] = field(default_factory=list)


def turn(journal: Journal, number: int) -> TurnRecord:
    return TurnRecord(
        id=f"msg_{journal.instance}{number:06}",
        instance=journal.instance,
        workspace="default",
        key_id="key",
        model="m",
        stream=False,
        opened_at=NOW,
        fingerprint=b"f" * (number * 97 % 5000),
        output_tokens=number,
    )


async def _nobody(_engine: str, _turns: list[str]) -> None: ...


async def prepare(data: Path) -> dict[str, int]:
    """Turns of all kinds under `data`, and beside it the files as a kill would leave them, before
    (`earlier`) and after (`killed`) the last turns. Their ids with their output tokens."""
    await asyncio.to_thread(migrate, DatabaseSettings(data=data))
    journal, ledger = Journal(data / "journal"), Ledger(f"sqlite+aiosqlite:///{data}/ledger.db")
    drain = Drain(journal, ledger.insert_turns, _nobody, Metrics(), ledger.known)
    turns = [turn(journal, number) for number in range(1, OPEN + CLOSED + DRAINED + 1)]
    for number, each in enumerate(turns):
        if number == DRAINED // 2:
            shutil.copytree(data, data.parent / "earlier")
        await journal.open(each)
        if number < DRAINED + CLOSED:
            each.outcome = "stop"
            await journal.close(each)
        if number < DRAINED:
            await drain.step()
    shutil.copytree(data, data.parent / "killed")
    await ledger.close()
    await journal.stop()
    return {each.id: each.output_tokens for each in turns}


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def delete(path: Path, _: random.Random) -> None:
    path.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped bits": flip,
    "cut": truncate,
    "deleted": delete,
}


def damage(data: Path, earlier: Path, rng: random.Random) -> str:
    """Damage one file that is there; return in words what was done to which."""
    name = rng.choice([name for name in FILES if (data / name).exists()])
    kind = rng.choice([*DAMAGES, "swapped for an older one"])
    path = data / name
    if kind in DAMAGES:
        if path.stat().st_size:
            DAMAGES[kind](path, rng)
    elif (earlier / name).exists():
        shutil.copy(earlier / name, path)
    return f"{name} {kind}"


async def restart(data: Path, truth: dict[str, int], outcome: Outcome) -> None:
    """What the next start does, and a look at every turn."""
    try:
        await asyncio.to_thread(migrate, DatabaseSettings(data=data))
    except GatewayError as error:
        outcome.said = str(error)
    try:
        journal = Journal(data / "journal")
    except GatewayError as error:
        outcome.said, outcome.named = str(error), len(truth)
        return
    ledger = Ledger(f"sqlite+aiosqlite:///{data}/ledger.db")
    held: dict[str, int] = {}
    try:
        drain = Drain(journal, ledger.insert_turns, _nobody, Metrics(), ledger.known)
        while await drain.step():
            pass
        found = {turn_id: await one(ledger, turn_id) for turn_id in truth}
        held = {turn_id: row.output_tokens for turn_id, row in found.items() if row}
        outcome.said = "; ".join(await found_in(ledger)) or outcome.said
    except GatewayError as error:
        outcome.said = str(error)
    waiting = [*await journal.open_turns(), *await journal.closed_turns(1000)]
    held |= {record.id: record.output_tokens for record in waiting}
    named = set(await journal.set_aside_turns())
    await ledger.close()
    await journal.stop()
    for turn_id, tokens in truth.items():
        if held.get(turn_id) == tokens:
            outcome.intact += 1
        elif turn_id in named or outcome.said:
            outcome.named += 1
        else:
            outcome.unnamed.append(turn_id)


async def found_in(ledger: Ledger) -> list[str]:
    return [line async for line in problems(ledger, lambda: asyncio.sleep(0))]


def trial(seed: int, prepared: Path, truth: dict[str, int]) -> Outcome:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        shutil.copytree(prepared / "killed", data)
        outcome = Outcome(damage(data, prepared / "earlier", rng))
        asyncio.run(restart(data, truth, outcome))
    return outcome


def run(count: int, first_seed: int = 0) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        truth = asyncio.run(prepare(Path(folder) / "data"))
        return [trial(first_seed + number, Path(folder), truth) for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    options = parser.parse_args()
    outcomes = run(options.count, options.seed)
    kinds = Counter(outcome.damage for outcome in outcomes)
    print(f"{'damage':50} trials intact  named unnamed")
    for kind in sorted(kinds):
        own = [outcome for outcome in outcomes if outcome.damage == kind]
        sums = (sum(o.intact for o in own), sum(o.named for o in own))
        unnamed = sum(len(o.unnamed) for o in own)
        print(f"{kind:50} {len(own):6} {sums[0]:6} {sums[1]:6} {unnamed:7}")
    total = sum(len(outcome.unnamed) for outcome in outcomes)
    print(f"{len(outcomes)} trials, every start went through; {total} turns wrong without a word")
    return 1 if total else 0


if __name__ == "__main__":
    raise SystemExit(main())
