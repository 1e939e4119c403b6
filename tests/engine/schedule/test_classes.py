"""Batch sequences are computed behind interactive requests, lose nothing by it, and end."""

import random
from functools import partial
from typing import Any

import pytest

from engine.schedule.batch_share import FLOOR_SECONDS
from tests.engine.schedule.harness import Harness, Sent, words


def batch(engine: Harness, start: int, count: int = 40, **changes: Any) -> Sent:
    return engine.send(words(start, count), service_class="batch", **changes)


def tokens_of(engine: Harness, turn: Sent, step: int) -> int:
    """How many tokens of this request a step computed."""
    tables = [sequence.table.block_ids for sequence in turn.state.sequences]
    works = engine.runner.steps[step]
    return sum(len(work.token_ids) for work in works if work.block_table in tables)


def test_a_batch_sequence_pauses_while_an_interactive_one_waits_for_its_text() -> None:
    engine = Harness(max_step_tokens=16, num_blocks=256)
    row = batch(engine, 0, max_tokens=50)
    engine.step(6)
    assert row.started is not None
    before = row.state.leader.num_output
    interactive = engine.send(words(5000, 100), max_tokens=10)
    while interactive.state.leader.num_output < 3:
        engine.step()
        assert tokens_of(engine, row, -1) == 0
    assert row.state.leader.num_output == before
    # Then both decode, and the row takes part in every second step.
    engine.step(4)
    assert row.state.leader.num_output == before + 2
    assert engine.scheduler.num_preempted == 0, "it kept its blocks"
    engine.finish(row, interactive)
    engine.check_idle()


def test_a_batch_goes_on_while_interactive_requests_never_end() -> None:
    engine = Harness(max_step_tokens=16, num_blocks=512, max_running=4)
    row = batch(engine, 0, max_tokens=10)
    turns: list[Sent] = []
    for number in range(2000):
        if row.is_over:
            break
        if number % 2 == 0:
            turns.append(engine.send(words(1000 + 100 * number, 20), max_tokens=2))
        engine.clock.advance(0.02)  # type: ignore[attr-defined]
        engine.step()
    assert row.is_over, "the floor lets it end"
    # 13 steps of its own at least, one in FLOOR_SECONDS.
    assert number * 0.02 <= 20 * FLOOR_SECONDS
    engine.finish(row, *turns)


def test_an_interactive_request_takes_the_memory_and_the_place_of_a_batch() -> None:
    engine = Harness(num_blocks=32, max_running=2)
    rows = [batch(engine, 1000 * number, 40, max_tokens=30) for number in range(2)]
    engine.step(8)
    assert all(row.started is not None for row in rows)
    interactive = engine.send(words(9000, 100), max_tokens=2)
    engine.step(12)
    assert interactive.started is not None
    assert engine.scheduler.num_preempted > 0
    engine.finish(interactive, *rows)
    engine.check_idle()


def test_an_interactive_request_does_not_wait_for_the_prompt_of_a_batch() -> None:
    """Both begin alike. The batch's is paused, so waiting for it would never end."""
    engine = Harness(max_step_tokens=8, num_blocks=256)
    row = batch(engine, 0, 100)
    engine.step(3)
    interactive = engine.send(words(0, 100), max_tokens=2)
    engine.step()
    assert interactive.state.twin is None
    while interactive.started is None:
        engine.step()
    assert row.started is None
    engine.finish(row, interactive)
    # A batch does wait for an interactive request's prompt.
    first = engine.send(words(5000, 100), max_tokens=2)
    engine.step(2)
    second = batch(engine, 5000, 100)
    engine.step()
    assert second.state.twin is not None
    engine.finish(first, second)
    engine.check_idle()


def test_what_a_scopes_batches_computed_does_not_delay_its_interactive_requests() -> None:
    engine = Harness(max_running=1, num_blocks=256)
    for number in (1, 2):
        engine.done(words(9000 + 50 * number, 31), scope="b", max_tokens=1)
    engine.finish(*(batch(engine, 1000 * n, 100, scope="a", max_tokens=1) for n in range(8)))
    last = engine.send(words(50_000, 31), scope="b", max_tokens=1)
    first = engine.send(words(50_050, 31), scope="a", max_tokens=1)
    while first.started is None:
        engine.step()
    assert last.started is None
    engine.finish(first, last)


@pytest.mark.parametrize("seed", range(12))
def test_batches_beside_interactive_requests_change_no_answer_and_no_count(seed: int) -> None:
    """The harness proves each answer, each usage and the cache's invariants."""
    rng = random.Random(seed)
    engine = Harness(num_blocks=48, max_step_tokens=16, max_running=4, max_waiting=100)
    batch_of = partial(engine.send, service_class="batch")
    sents: list[Sent] = []
    for _ in range(60):
        start = 1000 * rng.randrange(4)
        count = rng.randrange(1, 60)
        marks: Any = {0: rng.choice(["5m", "1h"])} if rng.random() < 0.5 else {}
        segments = words(start, count), words(rng.randrange(5000), rng.randrange(1, 20))
        send = batch_of if rng.random() < 0.6 else engine.send
        sents.append(
            send(*segments, marks=marks, max_tokens=rng.randrange(8), scope=rng.choice("ab"))
        )
        if rng.random() < 0.1:
            engine.loop.cancel(rng.choice(sents).state.request_id)
        engine.clock.advance(rng.random() / 10)  # type: ignore[attr-defined]
        engine.step(rng.randrange(6))
    engine.finish(*(turn for turn in sents if not turn.is_over))
    engine.check_idle()
