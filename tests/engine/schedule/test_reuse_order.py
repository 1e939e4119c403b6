"""Requests of one scope that would evict each other's blocks are admitted by what they reuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.digests import ChainHasher, PromptDigests
from engine.cache.pool import BlockPool
from engine.cache.residency import (
    MAX_OVERTAKEN,
    MAX_STEPS,
    Waiting,
    next_by_reuse,
    residency,
    touch,
)
from tests.engine.cache.checks import check_pool
from tests.engine.schedule.harness import Harness, Sent, words

BLOCK = 4


def warmed(engine: Harness, start: int, count: int, scope: str = "a") -> list[int]:
    """A prompt whose blocks are in memory, without a reference."""
    prompt = words(start, count)
    engine.finish(engine.send(prompt, scope=scope, max_tokens=1))
    return prompt


def occupied(engine: Harness, blocks: int) -> Sent:
    """A request of another scope that runs and holds so many blocks."""
    sent = engine.send(words(90_000, BLOCK * blocks - 2), scope="z", max_tokens=60)
    while sent.started is None:
        engine.step()
    return sent


def order_of_starts(engine: Harness, *sents: Sent) -> list[int]:
    order: list[int] = []
    for _ in range(500):
        engine.step()
        order += [i for i, one in enumerate(sents) if one.started is not None and i not in order]
        if len(order) == len(sents):
            return order
    raise AssertionError("not all began")


def test_a_request_whose_blocks_are_there_goes_before_one_that_would_evict_them() -> None:
    engine = Harness(num_blocks=40, max_step_tokens=16)
    warm = warmed(engine, 1000, 100)
    cold = engine.send(words(5000, 120), scope="a", max_tokens=1)
    again = engine.send([*warm, 7, 7, 7], scope="a", max_tokens=1)
    assert order_of_starts(engine, cold, again) == [1, 0]
    assert again.started is not None and again.started.usage.automatic_tokens == 100
    engine.finish(cold, again)
    engine.check_idle()


def test_with_room_for_both_the_order_is_that_of_arrival() -> None:
    engine = Harness(num_blocks=100, max_step_tokens=16)
    warm = warmed(engine, 1000, 100)
    warmed(engine, 3000, 160)  # nothing is empty enough for the cold one
    cold = engine.send(words(5000, 120), scope="a", max_tokens=1)
    again = engine.send([*warm, 7, 7, 7], scope="a", max_tokens=1)
    assert order_of_starts(engine, cold, again) == [0, 1]
    assert again.started is not None and again.started.usage.automatic_tokens == 100
    engine.finish(cold, again)


def test_a_request_that_came_keeps_its_blocks_before_content_that_nobody_asks_for() -> None:
    """It waits, and what is evicted meanwhile is what was used after it last ran."""
    engine = Harness(num_blocks=64, max_step_tokens=16, max_running=1)
    warm = warmed(engine, 1000, 60)
    warmed(engine, 3000, 60)
    warmed(engine, 4000, 60)
    running = occupied(engine, 8)
    waits = engine.send([*warm, 7, 7, 7], scope="a", max_tokens=1)
    second = engine.send([*warm, 8, 8, 8], scope="a", max_tokens=1)
    newer = engine.send(words(5000, 80), scope="a", max_tokens=1)
    engine.finish(running, waits, second, newer)
    for one in (waits, second):
        assert one.started is not None and one.started.usage.automatic_tokens == 60


def test_another_scope_is_never_passed() -> None:
    engine = Harness(num_blocks=40, max_step_tokens=16)
    warm = warmed(engine, 1000, 100, scope="b")
    cold = engine.send(words(5000, 120), scope="a", max_tokens=1)
    again = engine.send([*warm, 7, 7, 7], scope="b", max_tokens=1)
    assert order_of_starts(engine, cold, again) == [0, 1]
    engine.finish(cold, again)


def test_a_cold_request_is_passed_a_bounded_number_of_times() -> None:
    engine = Harness(num_blocks=40, max_step_tokens=16, max_waiting=1000)
    warm = warmed(engine, 1000, 100)
    cold = engine.send(words(5000, 120), scope="a", max_tokens=1)
    passing: list[Sent] = []
    while cold.started is None:
        assert len(passing) < 1000, "the flood kept it out"
        passing.append(engine.send([*warm, len(passing), 7], scope="a", max_tokens=1))
        engine.step()
    ahead = [one for one in passing if one.started is not None]
    assert 0 < len(ahead) <= MAX_OVERTAKEN + 1
    engine.finish(cold, *passing)
    engine.check_idle()


waiting = st.builds(
    Waiting,
    uncached=st.integers(1, 5000),
    num_unheld=st.integers(0, 500),
    num_overtaken=st.integers(0, MAX_OVERTAKEN),
    overtaken=st.integers(0, 20_000),
)


@given(line=st.lists(waiting, min_size=1, max_size=16), step=st.integers(16, 4096))
def test_nobody_is_passed_beyond_its_patience(line: list[Waiting], step: int) -> None:
    chosen = next_by_reuse(line, BlockPool(64, 16), step)
    one = line[chosen]
    for passed in line[:chosen]:
        assert one.uncached < passed.uncached
        assert passed.num_overtaken < MAX_OVERTAKEN
        most = max(passed.uncached, MAX_STEPS * step)
        assert passed.overtaken + one.uncached <= most


@pytest.mark.parametrize("num_here", [0, 1, 5, 12])
@pytest.mark.parametrize("num_held", [0, 1, 5])
def test_what_of_a_prompt_is_on_the_device(num_here: int, num_held: int) -> None:
    hasher = ChainHasher(b"key", BLOCK)
    digests = PromptDigests(hasher, "a", words(0, 12 * BLOCK), BLOCK)
    pool = BlockPool(16, BLOCK)
    blocks = [pool.allocate(index, digests.root) for index in range(num_here)]
    for index, block in enumerate(blocks):
        pool.append(block, digests.block_tokens(index))
        pool.index(block, digests.full[index])
    pool.release_chain(blocks[num_held:])
    assert residency(pool, digests) == (num_here, min(num_held, num_here))
    touch(pool, digests)
    check_pool(pool)
    victims = [pool.allocate(0, digests.root) for _ in range(pool.num_reclaimable)]
    spent = [block for block in victims if block in blocks]
    assert spent == list(reversed(blocks[num_held:])), "a chain is reused from its tail"
