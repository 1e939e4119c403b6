"""Copies in the store that share blocks: what makes way gives the room that was asked for."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.block import Block, Entry
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
from engine.cache.store_copies import StoreCopies

MAX_BLOCKS = 12


def new_copy(
    copies: StoreCopies, scope: str, number: int, blocks: Sequence[Block], *, is_asked: bool = True
) -> Entry:
    key = Digest(number.to_bytes(16, "big"))
    entry = Entry(scope, key, 4 * len(blocks), "1h", [], 0.0, 1000.0 + number)
    entry.is_asked_for = is_asked
    copies.add(entry, list(blocks))
    return entry


def test_a_shared_block_is_free_when_the_last_of_its_copies_has_made_way() -> None:
    pool = BlockPool(20, 4, tier="disk")
    copies = StoreCopies(pool, MAX_BLOCKS)
    chain = [pool.allocate() for _ in range(12)]
    shorter = new_copy(copies, "a", 0, chain[:10])
    longer = new_copy(copies, "a", 1, chain)
    pool.release_chain(chain)
    assert copies.room_for("b", 4) == [shorter, longer]


@pytest.mark.parametrize("is_asked", [False, True])
@given(
    prefixes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=8),
    num_known=st.integers(0, 4),
    num_new=st.integers(0, 12),
)
def test_copies_never_have_more_blocks_than_they_may(
    is_asked: bool, prefixes: list[tuple[int, int]], num_known: int, num_new: int
) -> None:
    """`prefixes` are of three chains, by index and number of blocks."""
    pool = BlockPool(60, 4, tier="disk")
    copies = StoreCopies(pool, MAX_BLOCKS)
    chains = [[pool.allocate() for _ in range(12)] for _ in range(3)]
    for number, (index, length) in enumerate(prefixes):
        blocks = chains[index][:length]
        if pool.num_leased + pool.num_unleased(blocks) <= MAX_BLOCKS:
            new_copy(copies, "a", number, blocks, is_asked=is_asked)
    # A scope's new copy may begin as its others do.
    begin = [] if is_asked else chains[0][:num_known]
    for block in begin:
        pool.acquire(block)
    for chain in chains:
        pool.release_chain(chain)
    blocks = [*begin, *(pool.allocate() for _ in range(num_new))]
    needy = "b" if is_asked else "a"
    doomed = copies.room_for(needy, pool.num_unleased(blocks))
    for entry in doomed or ():
        copies.end(entry)
    if blocks and doomed is not None:
        new_copy(copies, needy, 99, blocks)
    assert pool.num_leased <= MAX_BLOCKS
