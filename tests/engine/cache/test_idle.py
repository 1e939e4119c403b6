"""What nobody used for five minutes: 1-hour leases in a budget of their own, and plain LRU."""

from tests.engine.cache.lives import Life
from tests.engine.cache.test_entries import finished
from tests.engine.cache.world import World


def eight(start: int) -> tuple[int, ...]:
    """Two full blocks."""
    return tuple(range(start, start + 8))


def plain(world: World, *segments: tuple[int, ...]) -> Life:
    """A request without markers, and over."""
    life = world.run("red", segments, {})
    world.end(life)
    return life


def fill(world: World) -> None:
    """Plain content takes every empty block, so that others need the room."""
    for number in range(world.pool.num_empty):
        plain(world, (1000 + number, 1, 2))  # a block with what the world puts behind it
    assert not world.pool.num_empty


def states(world: World, *wanted: tuple[str, int]) -> list[str]:
    entries = [world.entry_at(scope, eight(start)) for scope, start in wanted]
    return [entry.state if entry else "none" for entry in entries]


def test_idle_leases_keep_to_their_budget_the_least_recently_used_goes_first() -> None:
    world = World(num_blocks=20, lease_share=0.6, idle_lease_share=0.34)
    for start in (10, 20, 30):
        finished(world, "red", eight(start), ttl="1h")
        world.wait(1)
    fill(world)
    world.wait(297)
    assert states(world, ("red", 10), ("red", 20), ("red", 30)) == ["leased"] * 3
    world.wait(10)
    assert states(world, ("red", 10), ("red", 20), ("red", 30)) == ["best_effort"] + ["leased"] * 2
    assert [ended.reason for ended in world.ended] == ["yielded"]
    world.check()


def test_idle_leases_beyond_their_budget_end_for_a_new_one() -> None:
    world = World(num_blocks=20, lease_share=0.2, scope_lease_share=0.0, idle_lease_share=0.5)
    finished(world, "red", eight(10), ttl="1h")
    world.wait(1)
    finished(world, "red", eight(20), ttl="1h")
    world.wait(400)
    finished(world, "blue", eight(30))
    wanted = ("red", 10), ("red", 20), ("blue", 30)
    assert states(world, *wanted) == ["best_effort", "leased", "leased"]
    world.check()


def test_the_scope_whose_idle_leases_hold_the_most_yields() -> None:
    world = World(num_blocks=20, lease_share=0.6, scope_lease_share=1.0, idle_lease_share=0.5)
    finished(world, "blue", eight(10), ttl="1h")
    world.wait(1)
    for start in (10, 20, 30):
        finished(world, "red", eight(start), ttl="1h")
    fill(world)
    world.wait(300)
    assert states(world, ("blue", 10), ("red", 20), ("red", 30)) == ["leased"] * 3
    assert states(world, ("red", 10)) == ["best_effort"]
    world.check()


def test_a_best_effort_entry_is_spared_for_five_minutes_and_then_by_last_use() -> None:
    world = World(num_blocks=6, lease_share=0.0)
    finished(world, "red", eight(10), ttl="1h")
    world.wait(200)
    plain(world, eight(20))
    plain(world, eight(30), (1, 2))
    assert states(world, ("red", 10)) == ["best_effort"], "what was marked is spared"
    world.wait(100)
    plain(world, eight(40))
    assert states(world, ("red", 10)) == ["none"], "all else that is here was used later"
    world.check()


def test_what_a_lease_spared_comes_to_its_place_by_last_use() -> None:
    world = World(num_blocks=6)
    finished(world, "red", eight(10))
    world.wait(200)
    spared = plain(world, eight(20))
    world.wait(100)
    assert world.pool.counts().cached == 4
    plain(world, eight(30), (1, 2))
    digests = spared.query.digests
    found = [world.pool.find(digests.full[i], digests.block_tokens(i)) for i in (0, 1)]
    assert None not in found, "it was used after what the lease held"
    world.check()
