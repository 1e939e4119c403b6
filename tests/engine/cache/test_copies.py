"""Copies of entries in the store: when the journal tells of one, and what it stands on."""

import pytest

from tests.engine.cache.disk import damage, restart, save, work
from tests.engine.cache.test_entries import finished
from tests.engine.cache.test_lowered import stored
from tests.engine.cache.world import World

SIX = (1, 2, 3, 4, 5, 6)
"""A full block of four tokens and a part of another."""


@pytest.mark.parametrize("done", range(6))
def test_a_killed_engine_left_no_journal_of_an_entry_without_its_files(done: int) -> None:
    """`restart` fails where the journal tells of a file that is not there."""
    world = World(num_blocks=20, store_blocks=40)
    finished(world, "red", SIX)
    save(world)
    save(world)
    work(world, done)
    restart(world, is_planned=False)
    world.check()


def test_a_copy_stands_on_no_file_of_an_earlier_epoch_that_was_not_read() -> None:
    """The second block's tokens are an answer: decoding does not look in the store."""
    told = (1, 2, 3, 4, 99, 1000, 1001, 1002)
    world = World(num_blocks=20, store_blocks=40)
    finished(world, "red", told)
    stored(world)
    world.wait(301)
    restart(world, is_planned=False)
    assert len(world.disk.files) == 2 and not world.disk.journal
    for index in range(2):
        damage(world, index, is_torn=False)
    world.end(world.run("red", [told[:4]], {}, answer=3))
    finished(world, "red", told)
    stored(world)
    stored(world)
    assert not world.disk.damaged, "a damaged file is part of a copy"
    restart(world, is_planned=False)
    life = world.run("red", [told, (7,)], {0: "5m"})
    assert life.found is not None and life.found.read == len(told)
    world.end(life)
    world.check()
