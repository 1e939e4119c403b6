"""Damaged stores: every damaged file that an engine looks for is one counted miss, and no answer is
another. STORE_SEEDS=1000 runs a thousand of these.
"""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

from engine.store import files, peers
from tests.engine.store.engines import StoredEngine, read_of

DAMAGES_OF_FILES = ["flip", "cut", "swap", "zero", "grow", "remove", "version", "model"]
DAMAGES = [*DAMAGES_OF_FILES, "journal", "index", "secret", "all"]
SEEDS = range(int(os.environ.get("STORE_SEEDS", "12")))
PLACES = ("own", "own with a host tier", "a member's")


@dataclass
class Looks:
    """Watches the reads of block files, and knows which show a damage.

    `good` and `hurt` are the files' bytes before and after the damage, None for one that is gone. A
    look at a size shows no other bytes.
    """

    good: dict[Path, bytes] = field(default_factory=dict)
    hurt: dict[Path, bytes | None] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def read(self, root: Path, name: str, max_bytes: int) -> bytes:
        place = root / "blocks" / name[:2] / name
        try:
            data = READ(root, name, max_bytes)
        except FileNotFoundError:
            if self.hurt.get(place, b"") is None:
                self.seen.add(name)
            raise
        hurt = self.hurt.get(place)
        if hurt is not None and data == hurt[:max_bytes]:
            self.seen.add(name)
        return data

    def size(self, root: Path, name: str) -> int:
        place = root / "blocks" / name[:2] / name
        try:
            size = SIZE(root, name)
        except FileNotFoundError:
            # A member may have deleted its file: it is a miss once it is read.
            if self.hurt.get(place, b"") is None and root.parent.name != "members":
                self.seen.add(name)
            raise
        hurt = self.hurt.get(place)
        if hurt is not None and size == len(hurt) != len(self.good[place]):
            self.seen.add(name)
        return size


READ = files._read_block
SIZE = files._size_of


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    monkeypatch.setattr(files, "_read_block", looks.read)
    monkeypatch.setattr(files, "_size_of", looks.size)
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.02)
    return looks


def prompts_of(rng: random.Random) -> list[list[int]]:
    """Four prompts, of which two begin alike."""
    prompts = [[rng.randrange(1, 500) for _ in range(rng.randrange(6, 40))] for _ in range(3)]
    return [*prompts, [*prompts[0], *(rng.randrange(1, 500) for _ in range(9))]]


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_stores_give_a_miss_a_file_and_never_other_answers(
    tmp_path: Path, looks: Looks, seed: int
) -> None:
    """`say` compares each answer with that of an engine without any memory."""
    rng = random.Random(seed)
    where = PLACES[seed % len(PLACES)]
    writer = StoredEngine(tmp_path / "store", is_shared="member" in where)
    prompts = prompts_of(rng)
    for prompt in prompts:
        writer.say(prompt)
    writer.settle()
    is_late = rng.random() < 0.25
    kind = rng.choice(DAMAGES_OF_FILES if is_late or "member" in where else DAMAGES)
    if not is_late:
        hurt(writer, kind, rng, looks)
    again = begin_again(writer, where)
    if is_late or "member" in where:
        has_looked_around(again)
    if is_late:
        hurt(writer, kind, rng, looks)
    for prompt in prompts:
        again.say(prompt, [rng.randrange(500)])
        again.say(prompt)
    has_looked_around(again)
    if kind in ("journal", "secret"):
        assert sum(again.stats.misses.values()) > 0, "damage that nobody counted"
    elif kind != "index":  # files of which no journal tells are nobody's
        check_counted(again, looks, must_look=not is_late)
    third = again.restart(is_killed=True)
    for prompt in prompts:
        assert read_of(third.say(prompt)) == len(prompt), "what was damaged was not written anew"


def begin_again(writer: StoredEngine, where: str) -> StoredEngine:
    """The next process on the directory, or another member beside one that does nothing more."""
    if "member" in where:
        return StoredEngine(writer.path, clock=writer.clock, is_shared=True)
    writer.kill()
    host_blocks = 100 if "host" in where else 0
    return StoredEngine(writer.path, clock=writer.clock, host_blocks=host_blocks)


def has_looked_around(engine: StoredEngine) -> None:
    """Wait until it has looked at all files and journals, and took in what they say."""
    engine.settle()
    assert engine.store is not None
    directory = engine.store.directory
    if engine.store.peers:
        with patch.object(peers, "other_members", wraps=peers.other_members) as begun:
            engine.step_until(
                lambda: sum(call.args[0] is directory for call in begun.call_args_list) > 3
            )
    disk = engine.store.disk
    engine.step_until(lambda: not disk.is_reading)
    engine.step()


def check_counted(engine: StoredEngine, looks: Looks, *, must_look: bool) -> None:
    misses = engine.stats.misses
    of_files = {reason: n for reason, n in misses.items() if not reason.startswith("journal")}
    assert sum(of_files.values()) == len(looks.seen), (of_files, sorted(looks.seen))
    assert looks.seen or not must_look, "nothing that was damaged was looked for"


@pytest.mark.parametrize("kind", ["flip a line", "cut a header"])
def test_a_members_damage_is_counted_though_nothing_of_it_was_told(
    tmp_path: Path, kind: str
) -> None:
    writer = StoredEngine(tmp_path / "store", is_shared=True)
    for prompt in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]):
        writer.say(prompt)
    writer.settle()
    assert writer.store is not None
    folder = writer.store.directory.path
    if kind == "flip a line":
        data = bytearray((folder / "journal").read_bytes())
        data[40] ^= 1
        (folder / "journal").write_bytes(data)
    else:
        place = next(iter(sorted(folder.glob("blocks/*/*"))))
        place.write_bytes(place.read_bytes()[:50])
    reader = begin_again(writer, "a member's")
    has_looked_around(reader)
    reason = "peer_journal_checksum" if kind == "flip a line" else "peer_short"
    assert reader.stats.misses == {reason: 1}
    assert len(reader.entries.live()) == 1, "the other entry is told"


def hurt(engine: StoredEngine, kind: str, rng: random.Random, looks: Looks) -> None:
    """Damage some files of a store: their bytes, the journal, or the installation's secret."""
    assert engine.store is not None
    path = engine.store.directory.path
    files = sorted(path.glob("blocks/*/*"))
    before = {place: place.read_bytes() for place in files}
    chosen = files if kind == "all" else rng.sample(files, k=rng.randrange(2, min(6, len(files))))
    if kind == "journal":
        data = bytearray((path / "journal").read_bytes())
        data[rng.randrange(len(data) - 1)] ^= 1 << rng.randrange(8)
        (path / "journal").write_bytes(data)
    elif kind == "index":
        (path / "journal").unlink()
    elif kind == "secret":
        (path / "secret").write_bytes(rng.randbytes(rng.choice([0, 31, 32])))
    elif kind == "swap":
        first, second = (place.read_bytes() for place in chosen[:2])
        chosen[0].write_bytes(second)
        chosen[1].write_bytes(first)
    elif kind in ("remove", "all"):
        for place in chosen:
            place.unlink()
    else:
        for place in chosen:
            whole = place.read_bytes()
            place.write_bytes(hurt_file(whole, kind, rng))
    for place, good in before.items():
        now = place.read_bytes() if place.exists() else None
        if now != good:
            looks.good[place] = good
            looks.hurt[place] = now


def hurt_file(whole: bytes, kind: str, rng: random.Random) -> bytes:
    data = bytearray(whole)
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "zero":
        start = rng.randrange(len(data) - 8)
        data[start : start + 8] = bytes(8) if any(data[start : start + 8]) else b"x" * 8
    elif kind == "grow":
        data += b"\0"
    elif kind == "version":
        data[8] += 1
    else:  # of another model
        data[32:48] = bytes(16)
    return bytes(data)
