"""Requests of one scope that would evict each other's blocks are admitted by what they reuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.pool import BlockPool
from engine.schedule.waiting import (
    MAX_OVERTAKEN,
    MAX_STEPS,
    Waiting,
    next_by_reuse,
)
from tests.engine.schedule.harness import Harness, Sent, occupied, words

BLOCK = 4


def warmed(engine: Harness, start: int, count: int, scope: str = "a") -> list[int]:
    """A prompt whose blocks are in memory, without a reference."""
    prompt = words(start, count)
    engine.done(prompt, scope=scope, max_tokens=1)
    return prompt


def order_of_starts(engine: Harness, *sents: Sent) -> list[int]:
    order: list[int] = []
    for _ in range(500):
        engine.step()
        order += [i for i, one in enumerate(sents) if one.started is not None and i not in order]
        if len(order) == len(sents):
            return order
    raise AssertionError("not all began")


@pytest.mark.parametrize(
    ("num_blocks", "scopes", "order"),
    [
        pytest.param(40, "aa", [1, 0], id="it-goes-before-one-that-would-evict-them"),
        pytest.param(100, "aa", [0, 1], id="with-room-for-both-as-they-came"),
        pytest.param(40, "ab", [0, 1], id="another-scope-is-never-passed"),
    ],
)
def test_a_request_whose_blocks_are_there(num_blocks: int, scopes: str, order: list[int]) -> None:
    engine = Harness(num_blocks=num_blocks, max_step_tokens=16)
    warm = warmed(engine, 1000, 100, scope=scopes[1])
    if num_blocks == 100:
        warmed(engine, 3000, 160)  # nothing is empty enough for the cold one
    cold = engine.send(words(5000, 120), scope=scopes[0], max_tokens=1)
    again = engine.send([*warm, 7, 7, 7], scope=scopes[1], max_tokens=1)
    assert order_of_starts(engine, cold, again) == order
    if scopes == "aa":
        assert again.usage.automatic_tokens == 100
    engine.finish(cold, again)
    engine.check_idle()


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
        assert one.usage.automatic_tokens == 60


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
