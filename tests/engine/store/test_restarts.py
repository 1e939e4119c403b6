"""What an engine with a store still has after a restart, and what it does without its files."""

import errno
import os
import random
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.store.files import FORMAT
from tests.engine.store.engines import (
    DEADLINE_SECONDS,
    OTHER,
    PREFIX,
    StoredEngine,
    read_of,
    started,
)

SEEDS = int(os.environ.get("STORE_FUZZ_SEEDS", "8"))


@pytest.fixture
def engine(tmp_path: Path) -> StoredEngine:
    return StoredEngine(tmp_path / "store")


@pytest.fixture
def stored_engine(engine: StoredEngine) -> StoredEngine:
    """With a prompt whose entry is in its files."""
    engine.say(PREFIX)
    engine.settle()
    return engine


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_lease_outlives_a_restart_to_the_token(engine: StoredEngine, is_killed: bool) -> None:
    engine.say(PREFIX)
    if is_killed:  # a planned end writes what was still wanted
        engine.settle()
    again = engine.restart(is_killed=is_killed)
    assert again.stats.restored_leases == 1
    entry = again.entries.live()[0]
    assert entry.is_leased and entry.lease_tier == "disk" and entry.tokens == 22
    assert read_of(again.say(PREFIX, scope="other")) == 0
    turn = again.say(PREFIX, [77])
    assert read_of(turn) == 22 and started(turn).usage.computed_tokens == 2
    assert started(turn).read_tier == "disk"
    assert started(again.say(PREFIX, [78])).read_tier == "device"
    assert entry.is_leased and entry.lease_tier == "device"
    again.restart()


def test_a_longer_prompts_copy_needs_room_for_its_new_blocks_alone(engine: StoredEngine) -> None:
    assert engine.cache.store is not None
    engine.cache.store.copies.max_blocks = 13
    chat = list(range(1, 17))
    for scope in ("b", "a"):
        engine.say(chat, [90], scope=scope)  # 4 blocks and one of its own
        engine.settle()
    longer = [*chat, *range(17, 25)]
    engine.say(longer, [91], scope="a")
    engine.settle()
    stats = engine.stats
    assert (stats.entries, stats.unsaved_entries, stats.displaced_entries) == (3, 0, 0)
    assert stats.held_blocks <= 13


def test_no_lease_is_told_as_stored_before_its_line_is_in_the_journal(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.store is not None
    directory = engine.store.directory
    may_append = threading.Event()
    append = directory.append_journal

    def append_late(lines: bytes) -> None:
        assert may_append.wait(DEADLINE_SECONDS)
        append(lines)

    monkeypatch.setattr(directory, "append_journal", append_late)
    engine.say(PREFIX)
    entry = engine.entries.live()[0]
    engine.step_until(lambda: entry.stored is not None)
    engine.step()
    assert not entry.outlives_restarts and engine.stats.pending_entries == 1
    may_append.set()
    engine.step_until(lambda: entry.outlives_restarts)
    assert engine.stats.pending_entries == 0
    again = engine.restart(is_killed=True)
    assert again.stats.restored_leases == 1 and again.entries.live()[0].outlives_restarts


def are_all_stored(engine: StoredEngine) -> bool:
    return all(entry.outlives_restarts for entry in engine.entries.live())


def test_what_is_told_as_stored_is_there_after_a_kill_at_that_moment(engine: StoredEngine) -> None:
    for count in range(1, 8):
        engine.say([count, *PREFIX])
        engine.step_until(partial(are_all_stored, engine))
        engine = engine.restart(is_killed=True)
        assert engine.stats.restored_leases == count


def test_another_model_finds_nothing_and_says_so(stored_engine: StoredEngine) -> None:
    again = stored_engine.restart(model="other")
    usage = started(again.say(PREFIX)).usage
    assert usage.cache_read_tokens == usage.automatic_tokens == 0
    assert again.stats.misses == {"journal_other_model": 1}


def test_what_a_workspace_drops_is_gone_from_the_disk(engine: StoredEngine) -> None:
    """Its entries, and content whose entries have ended."""
    engine.say(PREFIX, scope="mine")
    engine.say(OTHER, scope="theirs")
    engine.settle()
    files = set(engine.path.glob("blocks/*/*"))
    engine.accounting.drop("mine", None)
    engine.drop_files("mine")
    remaining_files = set(engine.path.glob("blocks/*/*"))
    assert len(files - remaining_files) == 6 and len(remaining_files) == 8
    again = engine.restart(is_killed=True)
    assert read_of(again.say(PREFIX, scope="mine")) == 0
    assert read_of(again.say(OTHER, scope="theirs")) == 30
    again.clock.advance(4000.0)  # type: ignore[attr-defined]
    again.step()
    assert not again.entries.live() and list(again.path.glob("blocks/*/*"))
    again.settle()
    for scope in ("mine", "theirs"):
        again.drop_files(scope)
    assert not list(again.path.glob("blocks/*/*"))


def test_modes_and_names(engine: StoredEngine) -> None:
    engine.say(PREFIX, scope="secret-scope")
    engine.settle()
    for place in [engine.path, *engine.path.rglob("*")]:
        mode = stat.S_IMODE(os.lstat(place).st_mode)
        assert mode == (0o700 if place.is_dir() else 0o600), place
        assert "secret-scope" not in str(place)


def of_a_newer_version(engine: StoredEngine) -> None:
    engine.kill()
    (engine.path / "format").write_text(f"{FORMAT + 1}\n")


def of_an_older_version(engine: StoredEngine) -> None:
    engine.kill()
    (engine.path / "format").write_text(f"{FORMAT - 1}\n")


def of_somebody_else(engine: StoredEngine) -> None:
    engine.kill()
    engine.path.rename(engine.path.with_name("elsewhere"))
    engine.path.mkdir()
    (engine.path / "thesis.txt").write_text("mine")


def no_directory(engine: StoredEngine) -> None:
    engine.kill()
    engine.path.rename(engine.path.with_name("elsewhere"))
    engine.path.write_text("")


def contents(path: Path) -> dict[Path, bytes]:
    return {place: place.read_bytes() for place in path.rglob("*") if place.is_file()}


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda engine: None, "in_use"),
        (of_a_newer_version, "newer"),
        (of_an_older_version, "older"),
        (of_somebody_else, "strangers"),
        (no_directory, "unusable"),
    ],
)
def test_a_directory_that_can_not_be_used_is_left_alone_and_costs_no_request(
    stored_engine: StoredEngine, make: Callable[[StoredEngine], None], refused: str
) -> None:
    make(stored_engine)
    files = contents(stored_engine.path)
    second = StoredEngine(stored_engine.path)
    assert second.store is None and second.refused == refused
    assert read_of(second.say(PREFIX)) == 0 and read_of(second.say(PREFIX)) == 22
    assert contents(stored_engine.path) == files


def is_full(*_: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_no_request(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.settle()
    with monkeypatch.context() as full:
        full.setattr("os.replace", is_full)
        engine.say(PREFIX)
        engine.step_until(lambda: not engine.stats.is_up)
        assert read_of(engine.say(PREFIX)) == 22 and engine.stats.failed_writes
    # No part of a file is left, once the store's thread has come to its end.
    engine.step_until(lambda: not list(engine.path.glob("new/*")))


def test_a_directory_that_is_full_at_the_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr("engine.store.files.StoreDirectory.append_journal", is_full)
        engine = StoredEngine(tmp_path / "store")
        engine.settle()
    engine.say(PREFIX)
    engine.settle()
    assert engine.stats.is_up and engine.stats.leases == 1


def test_files_of_which_no_journal_tells_are_deleted(stored_engine: StoredEngine) -> None:
    stored_engine.kill()
    (stored_engine.path / "journal").unlink()
    again = StoredEngine(stored_engine.path)
    again.settle()
    assert not list(stored_engine.path.glob("blocks/*/*"))
    usage = started(again.say(PREFIX)).usage
    assert usage.cache_read_tokens == usage.automatic_tokens == 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_do_not_depend_on_restarts(tmp_path: Path, seed: int) -> None:
    """Random turns with restarts among them: every answer is that of an engine without memory."""
    rng = random.Random(seed)
    engine = StoredEngine(
        tmp_path / "store",
        store_bytes=rng.choice([2**20, 2**22]),
        host_blocks=rng.choice([0, 0, 100]),
        num_blocks=rng.choice([24, 48]),
    )
    begins = [[rng.randrange(1, 300) for _ in range(rng.randrange(3, 30))] for _ in range(5)]
    for _ in range(30):
        kind = rng.random()
        if kind < 0.12:
            is_killed = rng.random() < 0.5
            if is_killed:
                engine.settle()
            # What a planned end writes may displace a copy of a scope that has more.
            engine.end(is_killed=is_killed)
            before = stored(engine)
            engine = engine.next()
            after = stored(engine)
            assert {key: after.get(key) for key in before} == before, "a stored lease is not there"
        elif kind < 0.2:
            engine.clock.advance(rng.choice([1.0, 299.0, 3600.0]))  # type: ignore[attr-defined]
            engine.step()
        else:
            sents = []
            for _ in range(rng.randrange(1, 4)):
                tail = [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
                marks: Any = {rng.randrange(2): rng.choice(["5m", "1h"])}
                scope = rng.choice(["a", "b"])
                sents.append(engine.send(rng.choice(begins), tail, marks=marks, scope=scope))
                engine.step(rng.randrange(3))
            engine.finish(*sents)
    engine.settle()


def stored(engine: StoredEngine) -> dict[bytes, tuple[int, bool]]:
    """The leases that outlive a restart: their tokens, and that they are leases."""
    return {
        entry.key: (entry.tokens, entry.is_leased)
        for entry in engine.entries.live()
        if entry.stored is not None and entry.is_leased
    }
