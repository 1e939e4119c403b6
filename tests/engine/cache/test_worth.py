"""Content makes way by what it is worth, which is learned from times of reuse."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.block import Block
from engine.cache.digests import TOKEN_BYTES
from engine.cache.ids import BlockId, Digest
from engine.cache.pool import BlockPool
from engine.cache.worth import (
    BUCKET_SECONDS,
    ENDS,
    MAX_SCOPES,
    NUM_AGES,
    NUM_CLASSES,
    RELEARN_AFTER,
    Moment,
    Worth,
    Worths,
    class_of,
)
from scripts.bench.reuse.engine_replay import replay_engine
from scripts.bench.reuse.models import replay_belady, replay_lru
from scripts.bench.reuse.traces import Trace, flooded, starved, talks

OWNER = Digest(b"o" * 16)
COUNTS = st.lists(st.integers(0, 50), min_size=NUM_AGES, max_size=NUM_AGES)


def new_block(number: int) -> Block:
    return Block(BlockId(number), BlockPool(1, 1))


def worth_by_definition(reused: list[int], begun: int, first: int) -> float:
    """The largest ratio over all horizons, each added up anew."""
    ratios = [0.0]
    for last in range(first, NUM_AGES):
        seconds = 0.0
        for age in range(first, last + 1):
            alive = begun - sum(reused[:age]) - reused[age] / 2
            seconds += alive * BUCKET_SECONDS[age]
        if seconds > 0:
            ratios.append(sum(reused[first : last + 1]) / seconds)
    return max(ratios)


@given(reused=COUNTS, num_never=st.integers(0, 100), first=st.integers(0, NUM_AGES - 1))
def test_worth_is_the_largest_ratio_of_uses_to_block_seconds(
    reused: list[int], num_never: int, first: int
) -> None:
    begun = sum(reused) + num_never
    worth = Worth()
    worth._reused[0] = array("d", reused)
    worth._begun[0] = begun
    worth._learn(0)
    expected_worth = worth_by_definition(reused, begun, first)
    assert worth._worth[0][first] == pytest.approx(expected_worth, rel=1e-6, abs=1e-12)


def test_each_use_end_and_distance_has_a_class_within_the_table() -> None:
    classes = {
        class_of(uses, end, distance)
        for uses in range(1, 10)
        for end in ENDS
        for distance in (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 10_000)
    }
    assert classes == set(range(NUM_CLASSES))


def test_what_comes_back_is_worth_more_than_what_nobody_asks_for_again() -> None:
    moment = Moment()
    worth = Worth(moment)
    talk = [new_block(number) for number in range(4)]
    for number in range(RELEARN_AFTER):
        moment.now += 1.0
        for place, block in enumerate(talk):
            worth.use(block, "end_turn", len(talk) - place)
        worth.use(new_block(number), "end_turn", 100)
    stranger = new_block(0)
    worth.use(stranger, "end_turn", 100)
    moment.now += 1.0
    assert worth.at(talk[0]) > 10 * worth.at(stranger)
    # Its time is long over, and nothing of its class ever came back so late.
    moment.now += 10_000.0
    assert worth.at(talk[0]) == 0.0


def full_block(pool: BlockPool, number: int, parent: Digest) -> Block:
    block = pool.allocate(0, OWNER)
    pool.append(block, bytes(pool.block_size * TOKEN_BYTES))
    pool.index(block, Digest(number.to_bytes(16, "big")), parent)
    return block


@pytest.mark.parametrize("num_chains", [3, 60])
def test_no_block_makes_way_before_what_stands_behind_it(num_chains: int) -> None:
    """Chains of 20 blocks, also where there are more leaves than are looked at."""
    draw = random.Random(num_chains)
    pool = BlockPool(20 * num_chains, 1, worths=Worths())
    behind: dict[Digest, Digest] = {}
    for number in range(num_chains):
        parent = OWNER
        chain = []
        for place in range(20):
            block = full_block(pool, 100 * number + place, parent)
            assert block.digest is not None
            behind[parent] = block.digest
            parent = block.digest
            chain.append(block)
        assert pool.worths is not None
        pool.worths.moment.now += draw.choice((0.1, 5.0))
        pool.use(chain, draw.choice(ENDS))
        pool.release_chain(draw.sample(chain, len(chain)))
    present = {block.digest: block for block in pool.blocks}
    for _ in range(20 * num_chains):
        block = pool.allocate(0, OWNER)
        gone = next(digest for digest, candidate in present.items() if candidate is block)
        assert gone is not None
        assert behind.get(gone) not in present
        del present[gone]


TRACES = {
    "starved": (starved, 2048),
    "flooded": (flooded, 2048),
    "parting": (lambda: talks("parting"), 1100),
    "parting, another seed": (lambda: talks("parting", seed=29), 2200),
}


@pytest.mark.parametrize("name", TRACES)
def test_the_learned_order_reads_no_less_than_lru(name: str) -> None:
    make, num_blocks = TRACES[name]
    trace: Trace = make()
    learned = replay_engine(trace, num_blocks, "unmarked").share
    assert replay_lru(trace, num_blocks).share - 0.005 <= learned
    assert learned <= replay_belady(trace, num_blocks).share + 0.005


def test_a_conversation_outlives_a_flood_of_twice_the_memory() -> None:
    """In one workspace, and nobody marked it. Plain LRU reads nothing of it."""
    trace = flooded()
    group = "flood of 2.00"
    assert replay_lru(trace, 2048).share_of(group) == 0.0
    assert replay_engine(trace, 2048, "unmarked").share_of(group) > 0.9


def test_a_neighbours_prompts_teach_nothing_about_a_scopes_own_blocks() -> None:
    worths = Worths()
    mine = [new_block(number) for number in range(4)]
    theirs = Digest(b"p" * 16)
    for number in range(2 * RELEARN_AFTER):
        worths.moment.now += 1.0
        worths.use(OWNER, mine, "end_turn")
        if number % 30 == 0:
            before = [worths.of(OWNER).at(block) for block in mine]
            worths.use(theirs, [new_block(number) for _ in range(50)], "end_turn")
            assert [worths.of(OWNER).at(block) for block in mine] == before
    assert worths.of(OWNER).at(mine[0]) > 0


def test_scopes_beyond_the_bound_are_forgotten_the_least_recent_first() -> None:
    worths = Worths()
    owners = [Digest(number.to_bytes(16, "big")) for number in range(MAX_SCOPES + 1)]
    first = worths.of(owners[0])
    second = worths.of(owners[1])
    for owner in owners[2:MAX_SCOPES]:
        worths.of(owner)
    worths.use(owners[0], [new_block(0)], "other")
    worths.of(owners[MAX_SCOPES])
    assert worths.of(owners[0]) is first
    assert worths.of(owners[1]) is not second
