"""Block tables: what a sequence holds, and gives back once."""

from tests.engine.cache.world import World

SIX = (1, 2, 3, 4, 5, 6)


def test_a_preempted_sequence_that_is_cancelled_gives_back_nothing_twice() -> None:
    world = World(num_blocks=20)
    life = world.run("red", [SIX], {})
    twin = world.fork(life)
    world.preempt(life)
    world.end(life)
    world.check()
    assert world.decode(twin, 1000), "its twin's blocks are still its own"
    world.end(twin)
    world.check()
