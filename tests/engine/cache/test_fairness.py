"""Who makes way for whom among several scopes, at a cost that hardly grows."""

import random
import time
from itertools import count

import pytest

from engine.cache.block import Block, Entry
from engine.cache.device_leases import Leases
from engine.cache.digests import pack
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
from tests.engine.cache.checks import check_leases, check_pool
from tests.engine.cache.world import WatchedPool, World

EIGHT = (21, 22, 23, 24, 25, 26, 27, 28)
_numbers = count(1000)


def flood(world: World, scope: str, num_requests: int) -> None:
    """Unmarked prompts of four blocks, of which three stay cached, each its own."""
    for _ in range(num_requests):
        text = tuple(next(_numbers) for _ in range(12))
        world.end(world.run(scope, [text], {}))
    world.check()


def cached_tokens(world: World, scope: str, text: tuple[int, ...]) -> int:
    """How many of the text's tokens are in full blocks of the pool."""
    digests = world.query(scope, [text], {}).digests
    blocks = [
        world.pool.find(digest, digests.block_tokens(i)) for i, digest in enumerate(digests.full)
    ]
    return world.block_size * sum(block is not None for block in blocks)


def test_a_flood_evicts_its_own_content_and_not_anothers() -> None:
    world = World(num_blocks=12, lease_share=0.0)
    world.end(world.run("red", [EIGHT], {}))
    flood(world, "blue", 50)
    assert cached_tokens(world, "red", EIGHT) == 8


def test_a_last_block_that_is_computed_again_counts_as_used() -> None:
    """A prompt of whole blocks: the last one is in memory, and computed all the same."""
    world = World(num_blocks=8, lease_share=0.0)
    second = (41, 42, 43, 44, 45, 46, 47, 48)
    for text in (EIGHT, second, EIGHT, tuple(range(50, 74))):  # the last one takes six blocks
        world.end(world.run("red", [text], {}, scaffold=()))
    assert cached_tokens(world, "red", EIGHT) == 8
    assert cached_tokens(world, "red", second) == 0
    world.check()


def test_a_flood_on_the_host_evicts_its_own_content_too() -> None:
    world = World(num_blocks=12, lease_share=0.0, host_blocks=24)
    world.end(world.run("red", [EIGHT], {}))
    flood(world, "red", 2)
    flood(world, "blue", 50)
    life = world.arrive("red", [EIGHT], {})
    assert world.begin(life) and life.found is not None
    world.bring_back(life)
    assert life.found.reused == 8
    world.end(life)
    world.check()


@pytest.mark.parametrize("seed", range(20))
def test_of_many_scopes_none_loses_an_equal_part(seed: int) -> None:
    """Scopes come, fill and go; `WatchedPool` checks each allocation by counting."""
    rng = random.Random(seed)
    pool = WatchedPool(num_blocks=60, block_size=2)
    referenced: list[Block] = []
    for number in range(2000):
        owner = Digest(bytes([rng.randrange(rng.choice([2, 5, 40]))]))
        if pool.num_reclaimable and len(referenced) < 20:
            block = pool.allocate(0, owner)
            if rng.random() < 0.9:
                pool.append(block, pack([number, number]))
                pool.index(block, Digest(number.to_bytes(16, "big")))
            referenced.append(block)
        while referenced and rng.random() < 0.6:
            pool.release(referenced.pop(rng.randrange(len(referenced))))
        if number % 50 == 0:
            check_pool(pool)
    assert pool.num_evicted > 500


def test_room_for_a_lease_costs_as_much_among_many_leases_as_among_few() -> None:
    few = seconds_a_lease(500)
    many = seconds_a_lease(16_000)
    # 32 times the entries: a look at each of them would be 32 times the work.
    assert many < 8 * few, (few, many)


def seconds_a_lease(count: int) -> float:
    """CPU seconds to lease an entry where all room is leased, and to end the lease of another."""
    pool = BlockPool(2 * count, 4)
    leases = Leases(pool, lease_share=0.5, scope_lease_share=1.0)

    def lease(index: int) -> None:
        entry = new_entry(index)
        entry.blocks = [pool.allocate(0, Digest(b"o" * 16))]
        entry.stored = entry.blocks
        assert leases.take(entry)

    for index in range(count):
        lease(index)
    times = []
    for turn in range(50):
        began = time.thread_time()
        lease(count + turn)
        assert leases.sacrifice() and leases.sacrifice()
        times.append(time.thread_time() - began)
        for place in range(2):
            lease(2 * count + 2 * turn + place)
    check_leases(leases)
    return sorted(times)[len(times) // 2]


def new_entry(index: int) -> Entry:
    key = Digest(index.to_bytes(16, "big"))
    return Entry("s", key, 4, "1h", [], 0.0, 1e9 + index, used_at=1000.0 * index)
