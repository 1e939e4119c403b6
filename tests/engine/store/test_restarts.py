"""What an engine with a store still has after a restart, and what it does without its files."""

import os
import random
import stat
from pathlib import Path

import pytest

from engine.protocol import Started
from tests.engine.schedule.harness import Sent
from tests.engine.store.engines import StoredEngine

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
    assert entry.is_leased and entry.lease_tier == "device"
    again.restart().kill()


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
    engine.lifecycle.drop("mine", None)
    assert engine.store is not None
    root = engine.cache.digests("mine", []).root
    engine.store.disk.drop(root, is_all=True).result(60)
    left = set(engine.path.glob("blocks/*/*"))
    assert len(files - left) == 6 and len(left) == 8
    again = engine.restart(is_killed=True)
    assert read_of(again.say(PREFIX, scope="mine")) == 0
    assert read_of(again.say(OTHER, scope="theirs")) == 30
    again.kill()


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
    assert second.store is None
    sent = second.say(PREFIX)
    assert read_of(sent) == 0
    engine.kill()


def test_a_directory_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert StoredEngine(tmp_path).store is None
    assert sorted(place.name for place in tmp_path.iterdir()) == ["thesis.txt"]


def test_a_vanishing_directory_costs_no_request(engine: StoredEngine) -> None:
    engine.say(PREFIX)
    engine.settle()
    os.rename(engine.path, engine.path.with_name("elsewhere"))
    engine.say(OTHER)
    for _ in range(400):
        engine.step()
        if not engine.stats.is_up:
            break
    assert not engine.stats.is_up and engine.stats.failed_writes
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


@pytest.mark.parametrize("seed", range(int(os.environ.get("STORE_SEEDS", "12"))))
def test_damaged_stores_give_misses_and_never_other_answers(tmp_path: Path, seed: int) -> None:
    """`scripts.faults.store` runs a thousand of these. `say` compares each answer."""
    rng = random.Random(seed)
    engine = StoredEngine(tmp_path / "store")
    prompts = [[rng.randrange(1, 500) for _ in range(rng.randrange(6, 40))] for _ in range(4)]
    for prompt in prompts:
        engine.say(prompt)
    engine.settle()
    engine.kill()
    hurt(engine.path, rng)
    again = StoredEngine(engine.path, clock=engine.clock)
    for prompt in prompts:
        again.say(prompt, [rng.randrange(500)])
        again.say(prompt)
    again.settle()
    assert sum(again.stats.misses.values()) > 0, "damage that nobody counted"
    third = again.restart(is_killed=True)
    for prompt in prompts:
        assert read_of(third.say(prompt)) == len(prompt), "what was damaged was not written anew"
    third.kill()


def hurt(path: Path, rng: random.Random) -> None:
    """Flip, cut, swap, zero or replace some files of a store."""
    files = sorted(path.glob("blocks/*/*"))
    kind = rng.choice(["flip", "cut", "swap", "zero", "grow", "remove", "version", "journal"])
    chosen = rng.sample(files, k=rng.randrange(2, min(6, len(files))))
    if kind == "journal":
        data = bytearray((path / "journal").read_bytes())
        data[rng.randrange(len(data) - 1)] ^= 1 << rng.randrange(8)
        (path / "journal").write_bytes(data)
        return
    if kind == "swap":
        del chosen[2:]
    for one, other in zip(chosen, chosen[1:] + chosen[:1], strict=True):
        if kind == "swap" and one is chosen[1]:
            return
        data = bytearray(one.read_bytes())
        if kind == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[rng.randrange(len(data)) :]
        elif kind == "swap":
            theirs = other.read_bytes()
            other.write_bytes(data)
            data = bytearray(theirs)
        elif kind == "zero":
            start = rng.randrange(len(data) - 8)
            data[start : start + 8] = bytes(8) if any(data[start : start + 8]) else b"x" * 8
        elif kind == "grow":
            data += b"\0"
        elif kind == "version":
            data[8] += 1
        if kind == "remove":
            one.unlink()
        else:
            one.write_bytes(data)
