"""What an engine with a store still has after a restart, and what it does without its files."""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engine.protocol import Started
from engine.store.files import FORMAT
from tests.engine.schedule.harness import Sent
from tests.engine.store.engines import DEADLINE_SECONDS, StoredEngine

PREFIX = list(range(1, 23))
OTHER = list(range(101, 131))


def started(sent: Sent) -> Started:
    assert sent.started is not None
    return sent.started


def read_of(sent: Sent) -> int:
    return started(sent).usage.cache_read_tokens


@pytest.fixture
def engine(tmp_path: Path) -> StoredEngine:
    return StoredEngine(tmp_path / "store")


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_lease_outlives_a_restart_to_the_token(engine: StoredEngine, is_killed: bool) -> None:
    engine.say(PREFIX)
    engine.settle()
    again = engine.restart(is_killed=is_killed)
    assert again.stats.restored_leases == 1
    entry = again.entries.live()[0]
    assert entry.is_leased and entry.lease_tier == "disk" and entry.tokens == 22
    sent = again.say(PREFIX, [77])
    assert read_of(sent) == 22 and started(sent).usage.computed_tokens == 2
    assert started(sent).read_tier == "disk"
    assert started(again.say(PREFIX, [78])).read_tier == "device"
    assert entry.is_leased and entry.lease_tier == "device"
    again.restart().kill()


def test_no_lease_is_told_as_stored_before_its_line_is_in_the_journal(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.store is not None
    directory, may_append = engine.store.directory, threading.Event()
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
    again.kill()


def are_all_stored(engine: StoredEngine) -> bool:
    return all(entry.outlives_restarts for entry in engine.entries.live())


def test_what_is_told_as_stored_is_there_after_a_kill_at_that_moment(engine: StoredEngine) -> None:
    for count in range(1, 21):
        engine.say([count, *PREFIX])
        engine.step_until(partial(are_all_stored, engine))
        engine = engine.restart(is_killed=True)
        assert engine.stats.restored_leases == count
    engine.kill()


def test_a_planned_end_writes_what_was_still_wanted(engine: StoredEngine) -> None:
    engine.say(PREFIX)
    again = engine.restart()
    assert again.stats.restored_leases == 1 and read_of(again.say(PREFIX)) == 22
    again.kill()


def test_the_same_restart_twice_and_a_lease_that_was_refreshed(engine: StoredEngine) -> None:
    engine.say(PREFIX)
    engine.settle()
    for _ in range(3):
        engine = engine.restart(is_killed=True)
        assert read_of(engine.say(PREFIX)) == 22
        engine.settle()
    engine.kill()


def test_another_scope_reads_nothing_after_a_restart(engine: StoredEngine) -> None:
    engine.say(PREFIX)
    engine.settle()
    again = engine.restart()
    sent = again.say(PREFIX, scope="other")
    assert read_of(sent) == 0 and started(sent).usage.automatic_tokens == 0
    again.kill()


def test_another_model_finds_nothing_and_says_so(engine: StoredEngine) -> None:
    engine.say(PREFIX)
    engine.settle()
    again = engine.restart(model="other")
    again.settle()
    assert read_of(again.say(PREFIX)) == 0
    assert again.stats.misses["other_model"] >= 6 and again.stats.misses["journal_other_model"] == 1
    assert again.stats.used_blocks == 0 or again.stats.restored_entries == 0
    again.kill()


def test_what_a_workspace_drops_is_gone_from_the_disk(engine: StoredEngine) -> None:
    engine.say(PREFIX, scope="mine")
    engine.say(OTHER, scope="theirs")
    engine.settle()
    files = set(engine.path.glob("blocks/*/*"))
    engine.accounting.drop("mine", None)
    assert engine.store is not None
    root = engine.cache.digests("mine", []).root
    engine.store.disk.drop(root).result(60)
    left = set(engine.path.glob("blocks/*/*"))
    assert len(files - left) == 6 and len(left) == 8
    again = engine.restart(is_killed=True)
    assert read_of(again.say(PREFIX, scope="mine")) == 0
    assert read_of(again.say(OTHER, scope="theirs")) == 30
    again.kill()


def test_a_drop_takes_content_whose_entries_have_ended(engine: StoredEngine) -> None:
    engine.say(PREFIX, scope="mine", ttl="5m")
    engine.settle()
    engine.clock.advance(4000.0)  # type: ignore[attr-defined]
    engine.step()
    assert not engine.entries.live() and list(engine.path.glob("blocks/*/*"))
    assert engine.store is not None
    engine.store.disk.drop(engine.cache.digests("mine", []).root).result(60)
    assert not list(engine.path.glob("blocks/*/*"))
    engine.kill()


def test_modes_and_names(engine: StoredEngine) -> None:
    engine.say(PREFIX, scope="secret-scope")
    engine.settle()
    for place in [engine.path, *engine.path.rglob("*")]:
        mode = stat.S_IMODE(os.lstat(place).st_mode)
        assert mode == (0o700 if place.is_dir() else 0o600), place
        assert "secret-scope" not in str(place)
    engine.kill()


def test_two_engines_do_not_share_a_directory(engine: StoredEngine) -> None:
    second = StoredEngine(engine.path)
    assert second.store is None and second.refused == "in_use"
    sent = second.say(PREFIX)
    assert read_of(sent) == 0
    engine.kill()


def test_a_newer_version_is_left_alone(engine: StoredEngine) -> None:
    engine.say(PREFIX)
    engine.settle()
    engine.kill()
    (engine.path / "format").write_text(f"{FORMAT + 1}\n")
    files = {place: place.read_bytes() for place in engine.path.rglob("*") if place.is_file()}
    older = StoredEngine(engine.path)
    assert older.store is None and older.refused == "newer"
    assert read_of(older.say(PREFIX)) == 0 and read_of(older.say(PREFIX)) == 22
    assert files == {place: place.read_bytes() for place in files}


def test_a_directory_that_cannot_be_made_costs_no_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = StoredEngine(tmp_path / "file" / "store")
    assert engine.store is None and engine.refused == "unusable"
    assert read_of(engine.say(PREFIX)) == 0 and read_of(engine.say(PREFIX)) == 22


def test_a_full_disk_costs_no_request(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: int, *parts: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine.settle()
    with monkeypatch.context() as full:
        full.setattr("engine.store.files._write_all", write)
        engine.say(PREFIX)
        assert eventually(engine, lambda: not engine.stats.is_up)
        assert read_of(engine.say(PREFIX)) == 22 and engine.stats.failed_writes
    assert not list(engine.path.glob("new/*")), "a part of a file is left"
    engine.kill()


def test_a_directory_that_is_full_at_the_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(directory: object, lines: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("engine.store.files.StoreDirectory.append_journal", append)
        engine = StoredEngine(tmp_path / "store")
        engine.settle()
    engine.say(PREFIX)
    engine.settle()
    assert engine.stats.is_up and engine.stats.leases == 1
    engine.kill()


def eventually(engine: StoredEngine, is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE_SECONDS
    while not is_so() and time.monotonic() < end:
        engine.step()
        time.sleep(0.002)
    return is_so()


def test_a_directory_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert StoredEngine(tmp_path).refused == "strangers"
    assert sorted(place.name for place in tmp_path.iterdir()) == ["thesis.txt"]


def test_a_vanishing_directory_costs_no_request(engine: StoredEngine) -> None:
    engine.say(PREFIX)
    engine.settle()
    os.rename(engine.path, engine.path.with_name("elsewhere"))
    engine.say(OTHER)
    assert eventually(engine, lambda: not engine.stats.is_up)
    assert engine.stats.failed_writes
    assert read_of(engine.say(OTHER)) == 30
    engine.kill()


def test_content_without_a_journal_is_reused_and_not_billed_as_a_read(
    engine: StoredEngine,
) -> None:
    engine.say(PREFIX)
    engine.settle()
    engine.kill()
    (engine.path / "journal").unlink()
    again = StoredEngine(engine.path)
    again.settle()
    usage = started(again.say(PREFIX)).usage
    assert usage.cache_read_tokens == 0 and usage.automatic_tokens == 20
    again.kill()
