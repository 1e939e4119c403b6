"""The host tier: what the device has no room for, and how it comes back."""

from engine.cache.block import Block
from tests.engine.cache.world import World

EIGHT = tuple(range(1, 9))


def flood(world: World, start: int = 1000, blocks: int = 9) -> None:
    tokens = tuple(range(start, start + blocks * world.block_size))
    world.end(world.run("flood", [tokens], {}))
    world.check()


def cached(world: World, tokens: tuple[int, ...] = EIGHT) -> list[Block]:
    life = world.run("red", [tokens], {})
    blocks = life.table.blocks[: len(tokens) // world.block_size]
    world.end(life)
    return blocks


def test_what_nobody_references_is_copied_ahead_of_a_flood() -> None:
    world = World(host_blocks=20, max_copies=1)
    chain = cached(world, tuple(range(1, 13)))
    for _ in range(5):
        pairs = world.host.take_demotions()
        assert len(pairs) <= 1
        for source, target in pairs:
            world.host_memory[target] = list(world.memory[source])
    assert world.host.num_demoted == 3
    flood(world)
    assert world.host.num_demoted == 3 and len(chain) == 3
    life = world.arrive("red", [tuple(range(1, 13))], {})
    assert world.begin(life)
    assert life.found is not None and life.found.reused == 12
    world.check()


def test_no_more_is_copied_in_one_step_than_allowed() -> None:
    world = World(host_blocks=8, max_copies=1)
    cached(world)
    flood(world)
    assert world.host.num_demoted == 1
    world.check()


def test_what_comes_back_is_leased_where_the_budget_allows() -> None:
    world = World(host_blocks=20, lease_share=0.2)
    world.end(world.run("blue", [EIGHT], {0: "5m"}))
    world.end(world.run("red", [EIGHT], {0: "5m"}))
    flood(world, blocks=7)
    flood(world, start=2000, blocks=7)
    entry = world.entry_at("red", EIGHT)
    assert entry is not None and entry.blocks[0].is_away and not entry.is_leased
    world.drop("blue")
    world.end(world.run("red", [EIGHT], {0: "5m"}))
    assert entry.is_leased and not any(block.is_away for block in entry.blocks)
    world.check()
