"""One store that several engines share: what one wrote another reads, or misses, and never else."""

import os
import random
import stat
import time
from pathlib import Path

import pytest

from engine.cache.block import Entry
from engine.store import peers
from tests.engine.store.engines import OTHER, PREFIX, StoredEngine, read_of, started

Pair = tuple[StoredEngine, StoredEngine]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    path = tmp_path / "store"
    return StoredEngine(path, is_shared=True), StoredEngine(path, is_shared=True)


def entries_of(engine: StoredEngine) -> list[Entry]:
    return [entry for entry in engine.entries.live() if entry.scope == "s"]


def files_of(engine: StoredEngine) -> list[Path]:
    assert engine.store is not None
    return sorted(engine.store.directory.path.glob("blocks/*/*"))


def learn(writer: StoredEngine, reader: StoredEngine, *prompts: list[int]) -> None:
    """One engine writes prompts, and the other knows of them."""
    for prompt in prompts:
        writer.say(prompt, scope="s")
    writer.settle()
    reader.step_until(lambda: len(entries_of(reader)) == len(prompts))


def test_what_one_wrote_another_reads_to_the_token(pair: Pair) -> None:
    writer, reader = pair
    learn(writer, reader, PREFIX)
    (entry,) = entries_of(reader)
    assert (entry.state, entry.why_unleased) == ("best_effort", "on_disk"), "nothing here holds it"
    turn = reader.say(PREFIX, [77], scope="s")
    assert read_of(turn) == 22 and started(turn).usage.computed_tokens == 2
    assert started(turn).read_tier == "disk" and reader.stats.peer_read_bytes
    assert entry.is_leased and entry.lease_tier == "device"


def test_what_nobody_asked_to_hold_is_read_by_another_without_a_lease(pair: Pair) -> None:
    writer, reader = pair
    writer.say(PREFIX, scope="s", hold=False)
    writer.settle()
    reader.step_until(lambda: len(entries_of(reader)) == 1)
    (entry,) = entries_of(reader)
    assert (entry.state, entry.why_unleased) == ("best_effort", "automatic")
    turn = reader.say(PREFIX, [77], scope="s", hold=False)
    assert read_of(turn) == 22 and started(turn).read_tier == "disk"
    assert (entry.state, entry.why_unleased) == ("best_effort", "automatic")
    assert not reader.pool.num_leased
    assert read_of(reader.say(PREFIX, [78], scope="s")) == 22
    assert entry.is_leased and reader.pool.num_leased


def test_another_scope_or_model_reads_nothing(pair: Pair) -> None:
    writer, reader = pair
    learn(writer, reader, PREFIX)
    turn = reader.say(PREFIX, scope="other")
    assert read_of(turn) == 0 and started(turn).usage.automatic_tokens == 0
    stranger = StoredEngine(writer.path, is_shared=True, model="another")
    stranger.settle()
    assert read_of(stranger.say(PREFIX, scope="s")) == 0 and not stranger.stats.peer_blocks
    assert len(files_of(writer)) == 6, "another model's engine deleted files"


@pytest.mark.parametrize("kind", ["flip", "cut", "remove"])
def test_a_members_damaged_file_is_a_counted_miss(pair: Pair, kind: str) -> None:
    writer, reader = pair
    learn(writer, reader, PREFIX)
    for place in files_of(writer):
        data = place.read_bytes()
        if kind == "remove":
            place.unlink()
        else:
            place.write_bytes(data[:-1] if kind == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    turn = reader.say(PREFIX, [77], scope="s")
    assert read_of(turn) == 0 and started(turn).usage.computed_tokens == 24
    reason = {"flip": "peer_checksum", "cut": "peer_short", "remove": "peer_missing"}[kind]
    assert reader.stats.misses[reason] >= 1
    assert read_of(reader.say(PREFIX, [77], scope="s")) == 23, "it was written anew"


def test_what_a_member_drops_ends_at_the_others(pair: Pair) -> None:
    writer, reader = pair
    learn(writer, reader, PREFIX)
    writer.accounting.drop("s", None)
    writer.drop_files("s")
    assert not files_of(writer)
    reader.step_until(lambda: not entries_of(reader))
    turn = reader.say(PREFIX, scope="s")
    assert read_of(turn) == 0
    assert started(turn).miss_reason == "best_effort_evicted", "its time was not over"


def test_a_line_longer_than_one_look_is_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_READ_BYTES", 64)
    writer, reader = pair
    learn(writer, reader, PREFIX)
    assert read_of(reader.say(PREFIX, [77], scope="s")) == 22


def test_what_made_way_here_is_taken_in_again_and_what_was_dropped_is_not(pair: Pair) -> None:
    writer, reader = pair
    learn(writer, reader, PREFIX)
    (entry,) = entries_of(reader)
    reader.entries.end(entry, "best_effort_evicted")
    reader.step_until(lambda: bool(entries_of(reader)))
    assert read_of(reader.say(PREFIX, [77], scope="s")) == 22
    (entry,) = (entry for entry in entries_of(reader) if entry.tokens == len(PREFIX))
    reader.accounting.drop("s", entry.key)
    reader.drop_files("s", entry.key)
    for _ in range(8):
        reader.step()
    assert len(PREFIX) not in [entry.tokens for entry in entries_of(reader)]


def test_a_file_that_one_member_lost_is_read_from_another(pair: Pair) -> None:
    writer, reader = pair
    third = StoredEngine(writer.path, is_shared=True)
    for member in (writer, third):
        member.say(PREFIX, scope="s")
        member.settle()
    reader.step_until(lambda: bool(entries_of(reader)))
    for _ in range(8):
        reader.step()
    for place in files_of(writer):
        place.unlink()
    assert read_of(reader.say(PREFIX, [77], scope="s")) == 22 and not reader.stats.misses


def test_each_member_has_a_folder_and_a_killed_ones_is_taken_over(pair: Pair) -> None:
    writer, reader = pair
    learn(writer, reader, PREFIX)
    assert writer.store is not None and reader.store is not None
    folder = writer.store.directory.path
    neighbour = reader.store.directory.path
    assert folder != neighbour and folder.parent == neighbour.parent
    again = writer.restart(is_killed=True)
    assert again.store is not None and again.store.directory.path == folder
    assert again.stats.restored_leases == 1
    assert read_of(again.say(PREFIX, scope="s")) == 22
    for place in folder.parent.parent.rglob("*"):
        mode = stat.S_IMODE(place.lstat().st_mode)
        assert mode == (0o700 if place.is_dir() else 0o600), place


def test_what_an_engine_has_itself_is_not_taken_from_another(pair: Pair) -> None:
    writer, reader = pair
    reader.say(OTHER, scope="s")
    for prompt in (OTHER, PREFIX):
        writer.say(prompt, scope="s")
    writer.settle()
    reader.step_until(lambda: len(entries_of(reader)) == 2)
    (mine,) = (entry for entry in entries_of(reader) if entry.tokens == len(OTHER))
    assert mine.is_leased and [block.tier for block in mine.blocks] == ["device"] * 8


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_store_of_one_engine_is_not_shared_and_a_shared_one_is_not_one_engines(
    tmp_path: Path, is_shared: bool
) -> None:
    first = StoredEngine(tmp_path, is_shared=is_shared)
    first.say(PREFIX)
    first.settle()
    first.kill()
    files = sorted(tmp_path.rglob("*"))
    member = StoredEngine(tmp_path, is_shared=not is_shared)
    assert member.store is None and member.refused == "strangers"
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("seed", range(int(os.environ.get("STORE_FUZZ_SEEDS", "2"))))
def test_answers_do_not_depend_on_who_wrote_what(tmp_path: Path, seed: int) -> None:
    """`say` compares each answer with that of an engine without any memory. Files vanish too."""
    rng = random.Random(seed)
    path = tmp_path / "store"
    room = rng.choice([24, 48])
    host = rng.choice([0, 30])
    engines = [
        StoredEngine(path, is_shared=True, num_blocks=room, host_blocks=host) for _ in range(2)
    ]
    begins = [[rng.randrange(1, 300) for _ in range(rng.randrange(3, 30))] for _ in range(4)]
    for _ in range(40):
        index = rng.randrange(2)
        if rng.random() < 0.1:
            engines[index] = engines[index].restart(is_killed=rng.random() < 0.5)
        elif rng.random() < 0.1:
            engines[index].settle()
        elif rng.random() < 0.1:
            there = files_of(engines[index])
            for place in rng.sample(there, min(2, len(there))):
                place.unlink(missing_ok=True)
        else:
            tail = [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
            engines[index].say(rng.choice(begins), tail, scope=rng.choice("ab"))
            time.sleep(0.02)
