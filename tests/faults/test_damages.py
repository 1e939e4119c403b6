"""Random damage to the journal of a killed gateway, then the next start: is any turn lost without
a word?

Each trial takes the files as `kill -9` leaves them: turns that are open, closed, and in the ledger.
It damages one to three of the journal's files and starts. Most trials do in this process what a
start does: open the journal, settle what is open with the engine's counts, drain. A share of them
starts a real gateway process beside a real engine's protocol.

Then each turn is looked for. It is *exact* where its row in the ledger has the tokens that the
engine counted, *named* where its own id is in the journal's list of turns set aside. Where both the
journal and its list of instances are hurt, that is *told*, and nobody knows whose counts the
engines keep. Any other turn is lost without a word. FAULTS=full has 200 trials.
"""

import asyncio
import random
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from engine.protocol import FinalCounts, InputUsage
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.journal.drain import Billing, Drain
from gateway.journal.file import rows_in
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.journal.table import ASIDE
from gateway.ledger.database import Ledger
from gateway.prices.files import load_prices
from scripts.stack import free_port, gateway_environment, python, start
from tests.faults import sizes
from tests.gateway.records import turn_record
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import serve
from tests.migrated import migrate

OPEN = 6
CLOSED = 12
DRAINED = 12
FILES = ("journal.db", "journal.db-wal", "journal.db-shm", "instances")
_ENGINE = "engine-0"
_PAGE = 4096
_STEPS = 40
_STEADY_SECONDS = 3.0
_WAIT_SECONDS = 120.0


@dataclass
class Outcome:
    """One trial: the turns that are lost without a word, and what else is wrong."""

    damages: list[str]
    unnamed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def flip(path: Path, rng: random.Random, _: Path) -> None:
    content = bytearray(path.read_bytes())
    for _number in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random, _: Path) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lose_a_page(path: Path, rng: random.Random, _: Path) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content)) // _PAGE * _PAGE
    length = len(content[start : start + _PAGE])
    content[start : start + _PAGE] = rng.choice((bytes(length), rng.randbytes(length)))
    path.write_bytes(content)


def delete(path: Path, _rng: random.Random, _: Path) -> None:
    path.unlink()


def take_an_older_one(path: Path, _rng: random.Random, older: Path) -> None:
    if older.exists():
        shutil.copy(older, path)


def take_another_file(path: Path, rng: random.Random, _: Path) -> None:
    files = [file for file in path.parent.iterdir() if file.is_file() and file != path]
    shutil.copy(rng.choice(sorted(files)), path)


DAMAGES: dict[str, Callable[[Path, random.Random, Path], None]] = {
    "flipped bits": flip,
    "cut": truncate,
    "a lost page": lose_a_page,
    "deleted": delete,
    "swapped for an older one": take_an_older_one,
    "swapped for another file": take_another_file,
}


def damage(journal: Path, earlier: Path, rng: random.Random) -> list[str]:
    """Damage one file, sometimes up to three; in words what was done to each."""
    there = [name for name in FILES if (journal / name).exists()]
    damages = []
    for name in rng.sample(there, rng.choice((1, 1, 1, 2, 3))):
        kind = rng.choice(list(DAMAGES))
        if (journal / name).exists() and (journal / name).stat().st_size:
            DAMAGES[kind](journal / name, rng, earlier / name)
            damages.append(f"{name} {kind}")
    return damages


def counts_of(turn_id: str) -> FinalCounts:
    number = int(turn_id[-6:])
    usage = InputUsage(input_tokens=1000 + number, computed_tokens=1000 + number)
    return FinalCounts(
        request_id=turn_id, epoch="epoch-1", reason="stop", usage=usage, output_tokens=number
    )


async def _nobody(_engine: str, _turns: list[str]) -> None: ...


async def prepare(data: Path) -> list[str]:
    """Turns of all stages, the drained ones first, then the closed ones. Their ids.

    Beside `data` are the files as a kill leaves them, before (`earlier`) and after (`killed`) the
    last turns.
    """
    await asyncio.to_thread(migrate, DatabaseSettings(data=data))
    journal = Journal(data / "journal").start()
    ledger = Ledger(f"sqlite+aiosqlite:///{data}/ledger.db")
    drain = Drain(journal, ledger.insert_turns, _nobody, Metrics(), ledger.known)
    turns = [_turn(journal, number) for number in range(1, OPEN + CLOSED + DRAINED + 1)]
    for number, turn in enumerate(turns):
        await journal.open(turn)
        place = number - OPEN
        if place < 0:
            continue
        counts = counts_of(turns[place].id)
        assert counts.usage is not None
        turns[place].take_usage(counts.usage)
        turns[place].outcome = "stop"
        turns[place].output_tokens = counts.output_tokens
        await journal.close(turns[place])
        if place < DRAINED:
            await drain.step()
        if place == DRAINED // 2:
            shutil.copytree(data, data.parent / "earlier")
    shutil.copytree(data, data.parent / "killed")
    await ledger.close()
    await journal.stop()
    return [turn.id for turn in turns]


def _turn(journal: Journal, number: int) -> TurnRecord:
    return turn_record(
        f"msg_{journal.instance}{number:06}",
        instance=journal.instance,
        workspace="default",
        engine=_ENGINE,
        fingerprint=b"f" * (number * 97 % 5000),
    )


class _Witness:
    """The engine that ran the turns, in this process."""

    name = _ENGINE
    is_ready = True

    def __init__(self, turn_ids: list[str]) -> None:
        self.counts = {turn_id: counts_of(turn_id) for turn_id in turn_ids}

    async def unacknowledged(self) -> list[FinalCounts]:
        return list(self.counts.values())

    async def ack(self, request_ids: list[str], /) -> None:
        for request_id in request_ids:
            self.counts.pop(request_id, None)

    async def drained(self, _engine: str, request_ids: list[str]) -> None:
        await self.ack(request_ids)

    async def cancel(self, _request_id: str, /) -> bool:
        return False


async def start_here(data: Path, unacknowledged: list[str]) -> None:
    """The parts of a start, one after the other."""
    journal = Journal(data / "journal").start()
    ledger = Ledger(f"sqlite+aiosqlite:///{data}/ledger.db")
    witness = _Witness(unacknowledged)
    metrics = Metrics()
    charge = Billing(load_prices(), metrics).charge
    reconciler = Reconciler(journal, [witness], metrics, charge, time.monotonic, ledger.known)
    drain = Drain(journal, ledger.insert_turns, witness.drained, metrics, ledger.known)
    await reconciler.recover()
    for _ in range(_STEPS):
        await reconciler.step(is_sweep=True)
        if not await drain.step():
            break
    await ledger.close()
    await journal.stop()


def start_a_gateway(data: Path, unacknowledged: list[str], outcome: Outcome) -> None:
    engine = ScriptedEngine()
    engine.final = {turn_id: counts_of(turn_id) for turn_id in unacknowledged}
    log = data.parent / "gateway.log"
    with serve(engine) as engine_url:
        port = free_port()
        process = start(
            [*python("gateway"), "serve"], gateway_environment(port, data, [engine_url]), log
        )
        try:
            deadline = time.monotonic() + _WAIT_SECONDS
            since = 0.0
            last = None
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                try:
                    journal = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=10).json()
                except httpx.TransportError:
                    continue
                state = (journal["journal"]["backlog"], len(engine.final))
                if state != last:
                    last = state
                    since = time.monotonic()
                if time.monotonic() - since > _STEADY_SECONDS:
                    break
            if process.poll() is not None:
                outcome.wrong.append(f"it ended: {log.read_text('utf-8', 'replace')[-300:]}")
        finally:
            process.kill()
            process.wait()
    if "Traceback" in log.read_text("utf-8", "replace"):
        outcome.wrong.append("a traceback")


def judge(data: Path, turn_ids: list[str], outcome: Outcome) -> None:
    with closing(sqlite3.connect(data / "ledger.db")) as db:
        query = "SELECT id, input_tokens, output_tokens FROM turns"
        rows = {row[0]: row[1:] for row in db.execute(query)}
    aside = {row.id for row in rows_in(data / "journal") if row.state == ASIDE}
    hurt = {line.split()[0].removesuffix("-wal").removesuffix("-shm") for line in outcome.damages}
    for turn_id in turn_ids:
        counts = counts_of(turn_id)
        assert counts.usage is not None
        if turn_id in rows:
            if rows[turn_id] != (counts.usage.input_tokens, counts.output_tokens):
                outcome.wrong.append(f"{turn_id}: {rows[turn_id]}")
        elif turn_id not in aside and hurt != {"journal.db", "instances"}:
            outcome.unnamed.append(turn_id)
    outcome.wrong += [f"{turn_id} is nobody's" for turn_id in rows.keys() - {*turn_ids}]


def trial(seed: int, prepared: Path, turn_ids: list[str], *, is_process: bool) -> Outcome:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        shutil.copytree(prepared / "killed", data)
        damages = damage(data / "journal", prepared / "earlier" / "journal", rng)
        outcome = Outcome(damages)
        # Engines keep the counts of whatever is not in the ledger.
        unacknowledged = turn_ids[DRAINED:]
        if is_process:
            start_a_gateway(data, unacknowledged, outcome)
        else:
            asyncio.run(start_here(data, unacknowledged))
        judge(data, turn_ids, outcome)
    return outcome


def test_no_turn_of_a_damaged_journal_is_lost_without_a_word(tmp_path: Path) -> None:
    turn_ids = asyncio.run(prepare(tmp_path / "data"))
    count, every = sizes.number((16, 8), (200, 5))
    for seed in range(count):
        outcome = trial(seed, tmp_path, turn_ids, is_process=seed % every == every - 1)
        assert not (outcome.unnamed or outcome.wrong), f"{seed}: {outcome}"
