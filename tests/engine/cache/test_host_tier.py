"""The host tier: what the device has no room for, and how it comes back."""

from engine.cache.block import Block
from engine.protocol import ChainHeld, HeldName
from tests.engine.cache.world import World

EIGHT = tuple(range(1, 9))
SIX = (11, 12, 13, 14, 15, 16)


def flood(world: World, start: int = 1000, blocks: int = 9) -> None:
    tokens = tuple(range(start, start + blocks * world.block_size))
    world.end(world.run("flood", [tokens], {}))
    world.check()


def cached(world: World, tokens: tuple[int, ...] = EIGHT) -> list[Block]:
    life = world.run("red", [tokens], {})
    blocks = life.table.blocks[: len(tokens) // world.block_size]
    world.end(life)
    return blocks


def test_what_is_reused_on_the_device_is_brought_back_when_it_is_wanted() -> None:
    world = World(host_blocks=20)
    cached(world)
    flood(world)
    assert world.host.num_demoted == 2
    life = world.arrive("red", [EIGHT], {})
    assert world.begin(life)
    assert life.found is not None and life.found.reused == 8
    assert list(life.table.incoming) == [0, 1] and life.table.num_tokens == 0
    assert life.table.reachable(9) == 0, "nothing can be computed before the first has come"
    world.check()
    world.bring_back(life, 1)
    assert life.table.num_tokens == 4
    world.check()
    world.bring_back(life)
    assert life.table.num_tokens == 8
    world.compute(life, life.pending)
    world.start(life)
    world.check()
    assert world.host.num_promoted == 2


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


def test_a_best_effort_entry_moves_to_the_host_and_is_read_from_there() -> None:
    world = World(host_blocks=20, lease_share=0.0)
    world.end(world.run("red", [SIX], {0: "5m"}))
    flood(world, blocks=9)
    flood(world, start=2000, blocks=9)
    entry = world.entry_at("red", SIX)
    assert entry is not None and all(block.is_away for block in entry.blocks)
    life = world.run("red", [SIX], {0: "5m"})
    assert life.found is not None
    assert (life.found.read, life.found.miss_reason) == (6, None)
    assert world.entry_at("red", SIX) is entry
    assert not any(block.is_away for block in entry.blocks), "the reader brought it back"
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


def test_names_move_with_their_block_and_are_told() -> None:
    world = World(host_blocks=20)
    chain = cached(world)
    world.pool.anchor("aa", chain[1], 8)
    flood(world)
    assert world.pool.changes.take() == [ChainHeld(seq=0, names=[HeldName("aa", 8)], tier="host")]
    life = world.arrive("red", [EIGHT], {})
    assert world.begin(life)
    world.bring_back(life)
    assert world.pool.changes.take() == [ChainHeld(seq=0, names=[HeldName("aa", 8)], tier="device")]
    assert life.table.blocks[1].names == {"aa": 8}


def test_a_block_that_comes_back_may_be_beyond_a_hole() -> None:
    world = World(host_blocks=20)
    twelve = tuple(range(1, 13))
    cached(world, twelve)
    flood(world)
    host = world.host.pool
    for block in host.blocks:
        if block.index == 1 and block.digest is not None:
            others = [b for b in host.blocks if b.ref_count == 0 and b is not block]
            for other in others:
                host.acquire(other)
            host.release(host.allocate())
            host.release_chain(others)
    life = world.arrive("red", [twelve], {})
    assert world.begin(life)
    assert list(life.table.incoming) == [0, 2]
    world.bring_back(life, 1)
    assert list(life.table.gaps(life.table.reachable(13))) == [(4, 8)]
    world.compute(life, 4)
    assert life.table.num_tokens == 8
    world.bring_back(life)
    assert life.table.num_tokens == 12
    world.compute(life, 1)
    world.start(life)
    world.check()
