"""What a store lost is told: damaged journals, full disks, directories that vanish."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from engine.store import store
from engine.store.journal import Put, decode_line
from tests.engine.store.engines import NUM_BLOCKS, StoredEngine, read_of, started


def prompt(number: int, tokens: int = 16) -> list[int]:
    return [number * 100 + offset for offset in range(tokens)]


@pytest.mark.parametrize("damage", ["a byte of each", "the beginning of each", "all but one"])
def test_leases_of_damaged_lines_are_counted_and_told(tmp_path: Path, damage: str) -> None:
    writer = StoredEngine(tmp_path / "store")
    for number in range(4):
        writer.say(prompt(number))
    writer.settle()
    assert writer.store is not None and writer.stats.leases == 4
    journal = tmp_path / "store" / "journal"
    keys = writer.store.directory.keys
    writer.kill()
    lines = journal.read_bytes().splitlines(keepends=True)
    puts = [at for at, line in enumerate(lines) if isinstance(decode_line(line[:-1], keys), Put)]
    for at in puts[1:]:
        line = bytearray(lines[at])
        if damage == "the beginning of each":
            line[:200] = b"?" * 200
        else:
            line[-40] ^= 1
        lines[at] = bytes(line)
    if damage == "all but one":
        lines = [b"".join(lines[: puts[1]]), b"\0" * 100 + b"\n", *lines[puts[2] :]]
    journal.write_bytes(b"".join(lines))
    with structlog.testing.capture_logs() as logs:
        reader = writer.next()
    assert reader.stats.restored_leases == 1 and reader.stats.lost_leases == 3
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [entry["lost_leases"] for entry in errors] == [3]
    assert reader.restart().stats.lost_leases == 0, "told once"


def test_leases_of_a_directory_that_vanished_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "IDLE_SECONDS", 0.02)
    engine = StoredEngine(tmp_path / "store")
    for number in range(3):
        engine.say(prompt(number))
    engine.settle()
    assert engine.stats.leases == 3
    with structlog.testing.capture_logs() as logs:
        shutil.rmtree(tmp_path / "store")
        engine.step_until(lambda: not engine.stats.is_up)
    assert (engine.stats.leases, engine.stats.entries, engine.stats.used_blocks) == (0, 0, 0)
    assert "error" in [entry["log_level"] for entry in logs]
    # What the device holds stays leased and is read, and the engine goes on.
    assert [read_of(engine.say(prompt(number), [7])) for number in range(3)] == [16] * 3
    assert all(entry.is_leased for entry in engine.entries.live())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_on_a_full_disk_leased_is_what_memory_holds_and_stored_what_a_restart_finds(
    small_disk: Path,
) -> None:
    engine = StoredEngine(small_disk / "store")
    states = {}
    for number in range(12):
        [outcome] = started(engine.say(prompt(number))).breakpoints
        states[number] = outcome.state
        # While the store is down its next try is half a minute away.
        engine.step_until(lambda: not (engine.stats.is_up and engine.is_wanting))
    engine.flush()
    stats = engine.stats
    assert not stats.is_up and stats.failed_writes
    live = engine.entries.live()
    assert sum(entry.is_leased for entry in live) * 4 <= NUM_BLOCKS // 2 + 4 * stats.leases
    assert "best_effort" in states.values(), "more was promised than is held"
    stored = {entry.key for entry in live if entry.outlives_restarts and entry.is_leased}
    assert len(stored) == stats.leases > 0
    again = engine.restart(is_killed=True)
    assert {entry.key for entry in again.entries.live() if entry.is_leased} == stored
    assert again.stats.lost_leases == 0
