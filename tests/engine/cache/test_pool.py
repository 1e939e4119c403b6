"""The block pool with exact block ids: who is reused when."""

import pytest

from engine.cache.block import Block
from engine.cache.digests import pack
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.protocol import ChainGone
from tests.engine.cache.checks import check_pool

BLOCK_SIZE = 2


def new_pool() -> BlockPool:
    return BlockPool(num_blocks=10, block_size=BLOCK_SIZE)


def filled(pool: BlockPool, number: int) -> Block:
    """An allocated block with content that can be found as `number`."""
    block = pool.allocate()
    pool.append(block, pack([number, number]))
    pool.index(block, digest(number))
    return block


def digest(number: int) -> Digest:
    return Digest(number.to_bytes(16, "big"))


def found(pool: BlockPool, number: int) -> Block | None:
    return pool.find(digest(number), pack([number, number]))


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def allocate_all(pool: BlockPool) -> list[int]:
    return ids([pool.allocate() for _ in range(pool.num_reclaimable)])


def test_fresh_blocks_are_handed_out_in_order() -> None:
    assert allocate_all(new_pool()) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_no_block_is_handed_out_twice() -> None:
    pool = new_pool()
    allocate_all(pool)
    with pytest.raises(NoFreeBlocks):
        pool.allocate()
    check_pool(pool)


def test_a_block_without_content_is_reused_at_once() -> None:
    pool = new_pool()
    blocks = [pool.allocate() for _ in range(3)]
    pool.release(blocks[1])
    assert pool.allocate().block_id == 1


def test_empty_blocks_go_before_cached_ones() -> None:
    pool = new_pool()
    pool.release(filled(pool, 1))
    assert allocate_all(pool) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_cached_blocks_are_reused_by_least_recent_use() -> None:
    pool = new_pool()
    blocks = [filled(pool, number) for number in range(10)]
    for index in (3, 1, 2):
        pool.release(blocks[index])
    again = found(pool, 1)
    assert again is blocks[1]
    pool.acquire(again)
    pool.release(again)
    assert allocate_all(pool) == [3, 2, 1]


def test_a_chain_is_reused_from_its_tail() -> None:
    pool = new_pool()
    pool.release_chain([filled(pool, number) for number in range(10)])
    assert allocate_all(pool) == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_what_was_reused_is_not_found_any_more() -> None:
    pool = new_pool()
    pool.release_chain([filled(pool, number) for number in range(10)])
    pool.allocate()
    assert found(pool, 9) is None
    assert found(pool, 8) is not None
    assert pool.num_evicted == 1
    check_pool(pool)


def test_a_digest_with_other_tokens_is_not_a_hit() -> None:
    pool = new_pool()
    filled(pool, 1)
    assert pool.find(digest(1), pack([1, 2])) is None


def test_of_equal_blocks_the_first_stays_the_one_that_is_found() -> None:
    pool = new_pool()
    first, second = filled(pool, 1), filled(pool, 1)
    assert found(pool, 1) is first
    assert pool.canonical(digest(1), second) is first
    pool.release(second)
    assert found(pool, 1) is first
    assert pool.allocate().block_id == second.block_id
    check_pool(pool)


def test_a_leased_block_is_never_handed_out() -> None:
    pool = new_pool()
    blocks = [filled(pool, number) for number in range(4)]
    pool.lease(blocks[:2])
    pool.release_chain(blocks)
    assert allocate_all(pool) == [4, 5, 6, 7, 8, 9, 3, 2]
    with pytest.raises(NoFreeBlocks):
        pool.allocate()
    assert found(pool, 0) is blocks[0] and found(pool, 1) is blocks[1]


def test_a_lease_that_ends_leaves_the_blocks_cached_tail_first() -> None:
    pool = new_pool()
    blocks = [filled(pool, number) for number in range(3)]
    pool.lease(blocks)
    pool.release_chain(blocks)
    pool.end_lease(blocks)
    assert allocate_all(pool) == [3, 4, 5, 6, 7, 8, 9, 2, 1, 0]


def test_two_leases_on_one_block_count_once_and_hold_until_the_last_ends() -> None:
    pool = new_pool()
    block = filled(pool, 1)
    pool.lease([block])
    pool.lease([block])
    pool.release(block)
    assert pool.num_leased == 1
    pool.end_lease([block])
    assert pool.num_leased == 1 and pool.num_reclaimable == 9
    pool.end_lease([block])
    assert pool.num_leased == 0 and pool.num_reclaimable == 10
    check_pool(pool)


def test_names_leave_with_their_block_and_only_then() -> None:
    pool = new_pool()
    block = filled(pool, 1)
    assert pool.anchor("aa", block, 2)
    assert not pool.anchor("aa", block, 2)
    pool.release(block)
    assert pool.changes.take() == []
    allocate_all(pool)
    assert pool.changes.take() == [ChainGone(seq=0, names=["aa"], reason="evicted")]
    assert pool.changes.take() == []


def test_ending_a_lease_names_what_no_other_lease_holds() -> None:
    pool = new_pool()
    blocks = [filled(pool, number) for number in range(2)]
    pool.anchor("a", blocks[0], 2)
    pool.anchor("b", blocks[1], 4)
    pool.lease(blocks)
    pool.lease(blocks[:1])
    assert pool.end_lease(blocks) == ["b"]
    assert pool.end_lease(blocks[:1]) == ["a"]


def test_a_copy_has_the_first_tokens_and_its_own_life() -> None:
    pool = new_pool()
    block = filled(pool, 7)
    copy = pool.copy_of(block, 1)
    assert copy.block_id == 1
    assert copy.tokens == pack([7]) and copy.digest is None
    pool.append(copy, pack([8]))
    assert block.tokens == pack([7, 7])
    assert pool.num_copied == 1


def test_only_the_one_holder_may_append_and_only_at_the_end() -> None:
    pool = new_pool()
    block = pool.allocate()
    pool.append(block, pack([1]))
    assert pool.can_append(block, 1)
    assert not pool.can_append(block, 0)
    pool.acquire(block)
    assert not pool.can_append(block, 1)


def test_the_counts_add_up_to_the_pool() -> None:
    pool = new_pool()
    blocks = [filled(pool, number) for number in range(6)]
    pool.lease(blocks[:2])
    pool.acquire(blocks[5])
    for block in blocks[:4]:
        pool.release(block)
    counts = pool.counts()
    assert (counts.free, counts.active, counts.leased, counts.cached) == (4, 2, 2, 2)
    assert counts.best_effort == 0
    assert counts.shared == 1
