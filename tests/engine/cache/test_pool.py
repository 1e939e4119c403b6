"""The block pool with exact block ids: who is reused when."""

from engine.cache.block import Block
from engine.cache.digests import pack
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
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


def test_a_lease_that_ends_leaves_the_blocks_cached_tail_first() -> None:
    pool = new_pool()
    blocks = [filled(pool, number) for number in range(3)]
    pool.lease(blocks)
    pool.release_chain(blocks)
    pool.end_lease(blocks)
    assert allocate_all(pool) == [3, 4, 5, 6, 7, 8, 9, 2, 1, 0]


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
