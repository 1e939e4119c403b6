"""How long an entry of an earlier epoch, or of another member, still lives."""

from pathlib import Path

import pytest

from engine.cache.block import Entry
from engine.clock import ManualClock
from tests.engine.store.engines import PREFIX, MovedWall, StoredEngine, read_of


@pytest.fixture
def wall() -> MovedWall:
    return MovedWall()


@pytest.fixture
def engine(tmp_path: Path, wall: MovedWall) -> StoredEngine:
    engine = StoredEngine(tmp_path / "store", wall=wall)
    engine.say(PREFIX)
    engine.settle()
    return engine


def only_entry(engine: StoredEngine) -> Entry:
    (entry,) = engine.entries.live()
    return entry


def seconds_left(engine: StoredEngine) -> float:
    return only_entry(engine).expires_at - engine.clock.now()


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_time_between_two_epochs_counts(
    engine: StoredEngine, wall: MovedWall, is_killed: bool
) -> None:
    wall.go_on(1000.0)
    again = engine.restart(is_killed=is_killed)
    assert seconds_left(again) == pytest.approx(2600.0)
    entry = only_entry(again)
    assert entry.is_leased and again.clock.now() - entry.used_at == pytest.approx(1000.0)
    wall.go_on(2590.0)
    third = again.restart(is_killed=True)
    assert seconds_left(third) == pytest.approx(10.0) and read_of(third.say(PREFIX)) == 22
    assert seconds_left(third) == pytest.approx(3600.0), "a read begins its time again"


def test_the_longest_class_outlives_a_restart_and_is_held_for_its_time(
    tmp_path: Path, wall: MovedWall
) -> None:
    first = StoredEngine(tmp_path / "long", clock=ManualClock(), wall=wall)
    first.say(PREFIX, ttl="12h")
    first.settle()
    wall.go_on(43_100.0)
    again = first.restart(is_killed=True)
    assert seconds_left(again) == pytest.approx(100.0) and only_entry(again).is_leased
    assert read_of(again.say(PREFIX)) == 22
    assert seconds_left(again) == pytest.approx(43_200.0)


def test_a_lifetime_of_its_own_outlives_a_restart_to_its_end(
    tmp_path: Path, wall: MovedWall
) -> None:
    """A cached content of a week was held for 16 hours more, behind a restart."""
    week = 7 * 86_400.0
    first = StoredEngine(tmp_path / "long", clock=ManualClock(), wall=wall)
    first.say(PREFIX, seconds=week)
    first.settle()
    wall.go_on(1000.0)
    again = first.restart(is_killed=True)
    assert seconds_left(again) == pytest.approx(week - 1000.0) and only_entry(again).is_leased
    assert read_of(again.say(PREFIX, hold=False)) == 22
    assert seconds_left(again) == pytest.approx(week - 1000.0), "no read prolongs it"


def test_an_entry_whose_time_ended_is_not_there_after_a_restart(
    engine: StoredEngine, wall: MovedWall
) -> None:
    wall.go_on(400.0)
    again = engine.restart(is_killed=True)
    again.step()
    assert only_entry(again).is_leased
    wall.go_on(3200.0)
    again = again.restart(is_killed=True)
    assert not again.entries.live() and not again.stats.restored_entries
    assert read_of(again.say(PREFIX)) == 0


def test_a_wall_clock_that_went_back_counts_as_no_time(
    engine: StoredEngine, wall: MovedWall
) -> None:
    wall.go_on(-86_400.0)
    again = engine.restart(is_killed=True)
    assert seconds_left(again) == pytest.approx(3600.0)


def test_a_members_entry_ends_when_its_time_is_over_there(tmp_path: Path, wall: MovedWall) -> None:
    writer, reader = (
        StoredEngine(tmp_path / "store", clock=ManualClock(), is_shared=True, wall=wall)
        for _ in range(2)
    )
    writer.say(PREFIX)
    writer.settle()
    wall.go_on(1000.0)
    reader.step_until(lambda: bool(reader.entries.live()))
    assert seconds_left(reader) == pytest.approx(2600.0)
