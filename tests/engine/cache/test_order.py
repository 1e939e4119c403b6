"""The order of entries by a key that changes: always the least, at a cost that hardly grows."""

import time

from engine.cache.block import Entry
from engine.cache.ids import Digest
from engine.cache.leases import Leases
from engine.cache.pool import BlockPool
from tests.engine.cache.checks import check_leases


def test_room_for_a_lease_costs_as_much_among_many_leases_as_among_few() -> None:
    few, many = seconds_a_lease(500), seconds_a_lease(16_000)
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
        for more in range(2):
            lease(2 * count + 2 * turn + more)
    check_leases(leases)
    return sorted(times)[len(times) // 2]


def new_entry(index: int) -> Entry:
    key = Digest(index.to_bytes(16, "big"))
    return Entry("s", key, 4, "1h", [], 0.0, 1e9 + index, used_at=1000.0 * index)
