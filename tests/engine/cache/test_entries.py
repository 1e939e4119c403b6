"""Entries on ten blocks of four tokens: late readers, copy-on-write, and the host tier."""

from engine.cache.prefix_cache import Lookup
from tests.engine.cache.checks import check_entries
from tests.engine.cache.world import World

FIVE = (1, 2, 3, 4, 5)
SIX = (11, 12, 13, 14, 15, 16)
EIGHT = (21, 22, 23, 24, 25, 26, 27, 28)
TWELVE = tuple(range(1, 13))


def finished(world: World, scope: str, *segments: tuple[int, ...], ttl: str = "5m") -> None:
    """A request that wrote its last segment's prefix and is over."""
    world.end(world.run(scope, segments, {len(segments) - 1: ttl}))
    world.check()


def flood(world: World, start: int = 1000, blocks: int = 9) -> None:
    tokens = tuple(range(start, start + blocks * world.block_size))
    world.end(world.run("flood", [tokens], {}))
    world.check()


def late(world: World, now: float, age: float) -> Lookup:
    """What a reader that came `age` seconds ago finds now."""
    world.now = now
    world.entries.expire(now)
    return world.cache.look_up(world.query("red", [EIGHT], {0: "5m"}, age=age))


def test_what_was_readable_when_a_turn_arrived_is_kept_for_it_until_the_grace_is_over() -> None:
    world = World(num_blocks=16, grace_seconds=60)
    finished(world, "red", EIGHT)
    world.entries.expire(300)
    assert [ended.reason for ended in world.entries.leases.take_ended()] == ["expired"]
    assert len(world.entries) == 0 and world.entries.live() == [], "it is told to nobody as there"
    assert world.entries.next_expiry() is None
    prefix = late(world, 305, 10)
    assert prefix.read == 8
    world.cache.let_go(prefix)
    world.cache.take_back(prefix)
    world.entries.expire(306)
    assert len(world.entries) == 0, "who never answered leaves it lapsed"
    check_entries(world.entries)
    world.expected.clear()
    flood(world)
    flood(world, start=2000)
    assert world.pool.counts().best_effort == 2
    world.entries.expire(360)
    assert world.pool.counts().best_effort == 0 and late(world, 360, 61).read == 0
    finished(world, "red", EIGHT)
    world.entries.expire(660)
    assert world.entries.drop("red") == 0


def test_a_prefix_that_only_look_back_finds_begins_its_ttl_anew() -> None:
    world = World()
    finished(world, "red", FIVE)
    for number in (1, 2):
        world.wait(200)
        # A conversation that grew: its one mark stands behind the prefix, at another place.
        grown = world.run("red", [FIVE, (90 + number,)], {1: "5m"})
        assert grown.found is not None and grown.found.read == 5, number
        world.end(grown)
        world.check()
    world.wait(299)
    assert world.entry_at("red", FIVE) is not None
    world.wait(2)
    assert world.entry_at("red", FIVE) is None


def test_a_turn_that_was_held_up_takes_nothing_of_the_time_that_an_earlier_reader_got() -> None:
    world = World()
    finished(world, "red", EIGHT)
    world.wait(200)
    finished(world, "red", EIGHT)
    # It arrived at 100 s, between the other two.
    world.wait(10)
    world.end(world.run("red", [EIGHT], {0: "5m"}, age=110))
    world.check()
    world.wait(289)
    assert world.entry_at("red", EIGHT) is not None
    world.wait(2)
    assert world.entry_at("red", EIGHT) is None


def test_who_goes_on_in_the_midst_of_a_best_effort_tail_leaves_it_as_it_is() -> None:
    world = World(lease_share=0.0)
    world.end(world.run("red", [FIVE, (6,)], {0: "5m", 1: "5m"}))
    turn = world.arrive("red", [FIVE, (96,)], {0: "5m"})
    assert world.begin(turn)
    assert turn.found is not None and turn.found.read == 5
    world.compute(turn, turn.pending)
    world.check()
    longer = world.entry_at("red", FIVE, (6,))
    assert longer is not None and not longer.is_leased
    assert [world.memory[block.block_id][:2] for block in longer.blocks[1:]] == [[5, 6]]


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


def test_a_digest_with_other_tokens_is_no_hit() -> None:
    world = World()
    world.end(world.run("red", [EIGHT], {}))
    digests = world.query("red", [EIGHT], {}).digests
    assert world.pool.find(digests.full[0], digests.block_tokens(0)) is not None
    assert world.pool.find(digests.full[0], digests.block_tokens(1)) is None


def test_what_nobody_references_is_copied_ahead_of_a_flood() -> None:
    world = World(host_blocks=20, max_copies=1)
    world.end(world.run("red", [TWELVE], {}))
    for _ in range(5):
        pairs = world.host.take_demotions()
        assert len(pairs) <= 1
        for source, target in pairs:
            world.host_memory[target] = list(world.memory[source])
    assert world.host.num_demoted == 3
    flood(world)
    assert world.host.num_demoted == 3
    life = world.arrive("red", [TWELVE], {})
    assert world.begin(life)
    assert life.found is not None and life.found.reused == 12
    world.check()


def test_what_comes_back_is_leased_where_the_budget_allows() -> None:
    world = World(host_blocks=20, lease_share=0.2)
    finished(world, "blue", EIGHT)
    finished(world, "red", EIGHT)
    flood(world, blocks=7)
    flood(world, start=2000, blocks=7)
    entry = world.entry_at("red", EIGHT)
    assert entry is not None and entry.blocks[0].is_away and not entry.is_leased
    world.drop("blue")
    finished(world, "red", EIGHT)
    assert entry.is_leased and not any(block.is_away for block in entry.blocks)
