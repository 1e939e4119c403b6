"""Leases that move down to the store: kept, slower, and never told as ended; and its copies."""

import pytest

from engine.cache.block import Entry
from tests.engine.cache.checks import check_entries
from tests.engine.cache.disk import damage, restart, save, work
from tests.engine.cache.test_entries import finished
from tests.engine.cache.world import World


def eight(start: int) -> tuple[int, ...]:
    """Two full blocks."""
    return tuple(range(start, start + 8))


def plain(world: World, *segments: tuple[int, ...]) -> None:
    """A request without markers, and over."""
    world.end(world.run("red", segments, {}))


def stored(world: World) -> None:
    """All that is wanted of the store is in its files."""
    save(world)
    work(world)
    world.check()


def flood(world: World) -> None:
    """Plain content takes the whole pool, as far as no lease holds it."""
    room = world.pool.num_reclaimable * world.block_size
    plain(world, tuple(range(2000, 2000 + room - 1)))


def entry(world: World, start: int, scope: str = "red") -> Entry:
    lease = world.entry_at(scope, eight(start))
    assert lease is not None
    return lease


def place(world: World, start: int, scope: str = "red") -> tuple[str, str]:
    lease = entry(world, start, scope)
    return lease.state, lease.lease_tier


def test_what_nobody_asked_for_makes_way_in_the_store_for_newer_entries_of_its_scope() -> None:
    world = World(num_blocks=40, store_blocks=10)  # entries may hold nine blocks of the store
    for start in (10, 20, 30, 40):
        world.end(world.run("red", [eight(start)], {0: "5m"}, hold=False))
        stored(world)
        world.wait(1)
    assert entry(world, 10).stored is not None
    world.end(world.run("red", [eight(10), (1,)], {0: "5m"}, hold=False))  # used last
    world.wait(1)
    finished(world, "red", eight(50), ttl="1h")
    stored(world)
    assert entry(world, 50).stored is not None, "first come may not be first kept"
    assert entry(world, 20).stored is None, "the least recently used makes way"
    assert entry(world, 10).stored is not None
    world.check()


def test_a_lease_moves_down_and_is_still_leased() -> None:
    world = World(num_blocks=20, store_blocks=40)
    finished(world, "red", eight(10), ttl="1h")
    stored(world)
    assert place(world, 10) == ("leased", "device")
    assert world.sacrifice()
    assert place(world, 10) == ("leased", "disk") and world.pool.num_leased == 0
    assert not world.entries.leases.take_ended() and world.entries.leases.num_lowered == 1
    flood(world)
    assert [block.tier for block in entry(world, 10).blocks] == ["disk", "disk"]
    world.check()
    life = world.run("red", [eight(10), (1,)], {0: "1h"})
    assert life.found is not None and life.found.read == 8
    assert place(world, 10) == ("leased", "device"), "a read brings it back up"
    world.end(life)
    world.check()


def test_what_is_over_the_budget_is_leased_once_the_store_has_it() -> None:
    world = World(num_blocks=20, lease_share=0.0, store_blocks=40)
    finished(world, "red", eight(10))
    assert entry(world, 10).state == "best_effort"
    stored(world)
    assert place(world, 10) == ("leased", "disk") and entry(world, 10).why_unleased is None
    flood(world)
    assert place(world, 10) == ("leased", "disk")
    world.check()


def test_a_new_lease_takes_the_room_of_one_that_can_move_down() -> None:
    world = World(num_blocks=20, lease_share=0.1, store_blocks=40)
    finished(world, "red", eight(10))
    stored(world)
    finished(world, "red", eight(20))
    assert place(world, 10) == ("leased", "disk") and place(world, 20) == ("leased", "device")
    world.check()


def test_a_request_that_needs_the_room_moves_leases_down_before_any_ends() -> None:
    world = World(num_blocks=20, store_blocks=40)
    finished(world, "red", eight(10))
    stored(world)
    finished(world, "red", eight(20))
    assert world.sacrifice()
    assert place(world, 10) == ("leased", "disk") and place(world, 20) == ("leased", "device")
    assert world.sacrifice()
    assert entry(world, 20).state == "best_effort" and entry(world, 10).is_leased
    world.check()


def test_a_lease_whose_copy_is_damaged_is_held_on_the_device_or_ends_and_says_so() -> None:
    for lease_share, state in ((0.5, "leased"), (0.0, "best_effort")):
        world = World(num_blocks=20, lease_share=lease_share, store_blocks=40)
        finished(world, "red", eight(10), ttl="1h")
        stored(world)
        if lease_share:
            world.sacrifice()
        assert place(world, 10) == ("leased", "disk")
        damage(world, 0, is_torn=False)
        copy = entry(world, 10).stored
        assert copy is not None
        world.entries.damaged(copy[0], world.now)
        lease = entry(world, 10)
        assert lease.state == state and (not lease.is_leased or lease.lease_tier == "device")
        reasons = [ended.reason for ended in world.entries.leases.take_ended()]
        assert reasons == ([] if state == "leased" else ["damaged"])
        check_entries(world.entries)


def test_what_the_store_keeps_takes_no_room_from_leases_without_a_copy() -> None:
    world = World(num_blocks=20, lease_share=0.1, scope_lease_share=0.5, store_blocks=40)
    finished(world, "blue", (1, 2, 3, 4))
    stored(world)
    world.sacrifice()
    assert world.entry_at("blue", (1, 2, 3, 4)).lease_tier == "disk"  # type: ignore[union-attr]
    finished(world, "red", eight(20))
    finished(world, "blue", (1, 2, 3, 4), (5,))
    assert place(world, 20) == ("leased", "device")
    world.check()


SIX = (1, 2, 3, 4, 5, 6)
"""A full block of four tokens and a part of another."""


@pytest.mark.parametrize("num_steps", range(6))
def test_a_killed_engine_left_no_journal_of_an_entry_without_its_files(num_steps: int) -> None:
    """`restart` fails where the journal tells of a file that is not there."""
    world = World(num_blocks=20, store_blocks=40)
    finished(world, "red", SIX)
    save(world)
    save(world)
    work(world, num_steps)
    restart(world, is_planned=False)
    world.check()


def test_a_copy_stands_on_no_file_of_an_earlier_epoch_that_was_not_read() -> None:
    """The second block's tokens are an answer: decoding does not look in the store."""
    tokens = (1, 2, 3, 4, 99, 1000, 1001, 1002)
    world = World(num_blocks=20, store_blocks=40)
    finished(world, "red", tokens)
    stored(world)
    restart(world, is_planned=True)
    world.wait(301)
    assert len(world.disk.files) == 2 and not world.entries.live()
    for index in range(2):
        damage(world, index, is_torn=False)
    world.end(world.run("red", [tokens[:4]], {}, answer=3))
    finished(world, "red", tokens)
    stored(world)
    stored(world)
    assert not world.disk.damaged, "a damaged file is part of a copy"
    restart(world, is_planned=False)
    life = world.run("red", [tokens, (7,)], {0: "5m"})
    assert life.found is not None and life.found.read == len(tokens)
    world.end(life)
    world.check()
