"""Random damage to the data directory of a killed gateway, then the next start.

Each trial takes the files as `kill -9` leaves them: turns that are open, closed, and in the ledger.
It damages one to three of them and starts. Most trials do in this process what a start does: open
the journal, settle what is open with the engine's counts, drain. A share of them starts a real
gateway process before a real engine's protocol, and looks at its log, `/readyz` and its files.

Then each turn is looked for. It is *intact* where its whole row is in the ledger as it was written,
or where its record waits in the journal. It is *named* where its own id is in the journal's list of
turns set aside, in the log or in a finding, or where the one file that had it is named as damaged
as a whole. Anything else is *unnamed*: a silently wrong number. A turn that was in no damaged
file and is not intact is *collateral*.
"""

import asyncio
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.gateway.journal.damaged_starts import Outcome, start_a_gateway, start_here
from tests.gateway.journal.damaged_turns import Truth, prepare

FILES = (
    "journal/segment-*",
    "journal/turns.log",
    "journal/turns-copy.log",
    "journal/turns-copy-2.log",
    "ledger.db",
    "ledger.db-wal",
    "ledger.db-shm",
)
_PAGE = 4096


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
    others = [each for each in path.parent.iterdir() if each.is_file() and each != path]
    shutil.copy(rng.choice(sorted(others)), path)


def take_another_journals(path: Path, _rng: random.Random, older: Path) -> None:
    """As where the files of two workers are mixed up."""
    other = older.parents[2] / "other" / "killed" / older.parent.name / older.name
    if other.exists():
        shutil.copy(other, path)


DAMAGES: dict[str, Callable[[Path, random.Random, Path], None]] = {
    "flipped bits": flip,
    "cut": truncate,
    "a lost page": lose_a_page,
    "deleted": delete,
    "swapped for an older one": take_an_older_one,
    "swapped for another file": take_another_file,
    "swapped for another journal's": take_another_journals,
}


def damage(data: Path, earlier: Path, rng: random.Random) -> list[str]:
    """Damage one file, sometimes up to three; in words what was done to each."""
    paths = sorted(path for name in FILES for path in data.glob(name) if path.stat().st_size)
    there = [path.relative_to(data).as_posix() for path in paths]
    done = []
    for name in rng.sample(there, rng.choice((1, 1, 1, 2, 3))):
        kind = rng.choice(list(DAMAGES))
        DAMAGES[kind](data / name, rng, earlier / name)
        done.append(f"{name} {kind}")
    return done


def trial(seed: int, prepared: Path, truth: dict[str, Truth], is_process: bool) -> Outcome:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        shutil.copytree(prepared / "killed", data)
        outcome = Outcome(seed, damage(data, prepared / "earlier", rng), is_process=is_process)
        if is_process:
            start_a_gateway(data, truth, outcome)
        else:
            asyncio.run(start_here(data, truth, outcome))
    return outcome


def run(count: int, first_seed: int = 0, processes: float = 0.0) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        truth = asyncio.run(prepare(Path(folder) / "data"))
        outcomes = []
        for number in range(count):
            is_process = int((number + 1) * processes) > int(number * processes)
            outcomes.append(trial(first_seed + number, Path(folder), truth, is_process))
        return outcomes
