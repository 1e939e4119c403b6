"""Entries and leases on ten blocks of four tokens: time, budget, sacrifice, copy-on-write."""

from tests.engine.cache.world import World

FIVE = (1, 2, 3, 4, 5)
SIX = (11, 12, 13, 14, 15, 16)
EIGHT = (21, 22, 23, 24, 25, 26, 27, 28)


def finished(world: World, scope: str, *segments: tuple[int, ...], ttl: str = "5m") -> None:
    """A request that wrote its last segment's prefix and is over."""
    world.end(world.run(scope, segments, {len(segments) - 1: ttl}))
    world.check()


def test_who_goes_on_in_the_midst_of_a_best_effort_tail_leaves_it_as_it_is() -> None:
    world = World(lease_share=0.0)
    world.end(world.run("red", [FIVE, (6,)], {0: "5m", 1: "5m"}))
    other = world.arrive("red", [FIVE, (96,)], {0: "5m"})
    assert world.begin(other)
    assert other.found is not None and other.found.read == 5
    world.compute(other, other.pending)
    world.check()
    longer = world.entry_at("red", FIVE, (6,))
    assert longer is not None and not longer.is_leased
    assert [world.memory[block.block_id][:2] for block in longer.blocks[1:]] == [[5, 6]]


def test_blocks_of_a_best_effort_entry_are_reused_last_and_take_it_along() -> None:
    world = World(lease_share=0.0)
    finished(world, "red", EIGHT)
    world.end(world.run("red", (SIX, EIGHT), {}))
    taken = [world.pool.allocate().block_id for _ in range(8)]
    assert set(taken) == set(range(10)) - {0, 1}
    assert world.entry_at("red", EIGHT) is not None
    assert world.pool.allocate().block_id == 1
    assert world.entry_at("red", EIGHT) is None
    digests = world.query("red", [EIGHT], {0: "5m"}).digests
    assert world.entries.why_missing(digests.at(8), world.now) == "best_effort_evicted"


def test_who_holds_more_than_its_share_yields_what_ends_first() -> None:
    world = World(lease_share=0.6)
    for start, ttl in ((10, "1h"), (20, "5m"), (30, "1h")):
        finished(world, "red", tuple(range(start, start + 8)), ttl=ttl)
    finished(world, "blue", EIGHT)
    assert world.entry_at("blue", EIGHT).is_leased
    states = [world.entry_at("red", tuple(range(start, start + 8))).state for start in (10, 20, 30)]
    assert states == ["leased", "best_effort", "leased"]
    world.check()


def test_a_scope_with_a_share_of_its_own_claims_that() -> None:
    world = World(lease_share=0.6, lease_shares={"blue": 0.8, "red": 0.3})
    for start in (10, 20, 30):
        finished(world, "red", tuple(range(start, start + 8)))
    finished(world, "blue", tuple(range(13)))
    assert world.entry_at("blue", tuple(range(13))).is_leased
    assert len(world.entries.leases) == 2, "four of the six blocks are blue's"
    world.check()


def test_a_share_of_zero_claims_nothing_and_keeps_nothing_that_others_claim() -> None:
    world = World(lease_share=0.6, lease_shares={"red": 0.0})
    finished(world, "red", EIGHT)
    assert world.entry_at("red", EIGHT).is_leased, "nobody else needs it"
    for start in (10, 20):
        finished(world, "blue", tuple(range(start, start + 8)))
    finished(world, "green", FIVE)
    assert not world.entry_at("red", EIGHT).is_leased
    finished(world, "red", SIX)
    assert not world.entry_at("red", SIX).is_leased
    world.check()


def test_the_latest_request_says_what_the_share_is() -> None:
    world = World(lease_share=0.6, lease_shares={"red": 1.0})
    for start in (10, 20, 30):
        finished(world, "red", tuple(range(start, start + 8)))
    finished(world, "blue", FIVE)
    assert not world.entry_at("blue", FIVE).is_leased
    world.lease_shares = {}
    finished(world, "red", tuple(range(30, 38)))
    finished(world, "blue", FIVE)
    assert world.entry_at("blue", FIVE).is_leased
    world.check()


def test_nobody_yields_below_its_share_and_nobody_in_vain() -> None:
    world = World(num_blocks=12, lease_share=0.5)
    for start in (10, 20):
        finished(world, "red", tuple(range(start, start + 8)))
    finished(world, "blue", FIVE)
    finished(world, "green", tuple(range(50, 62)))
    assert len(world.entries.leases) == 3, "one block above its share is not enough for three"
    finished(world, "green", tuple(range(70, 74)))
    assert world.entry_at("green", tuple(range(70, 74))).is_leased
    assert len(world.entries.leases) == 3, "one of two blocks was above the share: it yielded"
    world.check()


def test_what_became_readable_after_the_arrival_is_not_read() -> None:
    world = World()
    early = world.query("red", [EIGHT], {0: "5m"})
    world.now = 10.0
    finished(world, "red", EIGHT)
    found = world.cache.look_up(early)
    assert (found.hit, found.read, found.miss_reason) == (None, 0, "in_progress_race")


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
