"""A block in the middle of a chain is gone: only that part is computed again."""

from engine.cache.block import Block
from tests.engine.cache.lives import Life
from tests.engine.cache.world import World

TWENTY = tuple(range(1, 21))


def cached_chain(world: World, scope: str = "red") -> list[Block]:
    """Five full blocks that nobody references."""
    life = world.run(scope, [TWENTY], {})
    blocks = life.table.blocks[:5]
    world.end(life)
    return blocks


def gaps(life: Life) -> list[tuple[int, int]]:
    return list(life.table.gaps(len(life.tokens)))


def test_only_the_hole_and_the_tail_are_computed() -> None:
    world = World()
    chain = cached_chain(world)
    world.lose(chain[1])
    life = world.arrive("red", [TWENTY], {})
    assert world.begin(life)
    assert life.found is not None
    assert life.found.reused == 16
    assert gaps(life) == [(4, 8), (20, 21)]
    assert [life.table.blocks[i] for i in (0, 2, 3, 4)] == [chain[i] for i in (0, 2, 3, 4)]
    world.check()
    world.compute(life, 4)
    assert life.table.num_tokens == 20, "the frontier passes over what is there"
    world.compute(life, 1)
    world.start(life)
    world.check()


def test_an_entry_that_lost_a_block_is_not_read_but_what_is_left_is_reused() -> None:
    world = World(lease_share=0.0)
    world.end(world.run("red", [TWENTY], {0: "5m"}))
    entry = world.entry_at("red", TWENTY)
    assert entry is not None
    world.lose(entry.blocks[1])
    life = world.arrive("red", [TWENTY], {0: "5m"})
    assert world.begin(life)
    world.compute(life, life.pending)
    assert life.found is not None
    written = world.cache.write(life.query, life.found, life.table, world.now)
    assert written.miss_reason == "best_effort_evicted"
    usage = written.usage
    assert (usage.cache_read_tokens, usage.cache_write_5m_tokens) == (0, 20)
    assert (usage.automatic_tokens, usage.computed_tokens) == (16, 5)


def test_an_entry_is_read_and_a_hole_behind_it_computed() -> None:
    world = World(num_blocks=12)
    life = world.run("red", [(1, 2, 3, 4, 5, 6), tuple(range(7, 21))], {0: "5m"})
    blocks = list(life.table.blocks)
    world.end(life)
    world.lose(blocks[2])
    life = world.arrive("red", [(1, 2, 3, 4, 5, 6), tuple(range(7, 21))], {0: "5m"})
    assert world.begin(life)
    assert life.found is not None
    assert (life.found.read, life.found.reused) == (6, 16)
    assert gaps(life) == [(8, 12), (20, 21)]
    world.compute(life, life.pending)
    world.start(life)
    world.check()
