"""What a request had computed when it ended before its first token is in its final counts."""

from engine.protocol import FinalCounts
from tests.engine.schedule.harness import Harness, Sent, words


def counts_of(engine: Harness, sent: Sent) -> FinalCounts:
    return next(
        counts
        for counts in engine.totals.unacknowledged()
        if counts.request_id == sent.state.request_id
    )


def test_a_request_that_is_cancelled_during_prefill_tells_what_was_computed() -> None:
    engine = Harness(max_step_tokens=16, num_blocks=128)
    sent = engine.send(words(0, 200), max_tokens=4)
    engine.step(5)
    engine.loop.cancel(sent.state.request_id)
    counts = counts_of(engine, sent)
    assert counts.usage is None and counts.prefilled_tokens == 5 * 16
    engine.step()
    assert engine.scheduler.has_work is False, "nothing of it is computed after its end"


def test_what_was_read_or_reused_was_not_computed() -> None:
    engine = Harness(max_step_tokens=16, num_blocks=256)
    first = engine.send(words(0, 80), marks={0: "5m"}, max_tokens=1)
    engine.finish(first)
    sent = engine.send(words(0, 80), words(500, 100), marks={0: "5m"}, max_tokens=1)
    engine.step(2)
    engine.loop.cancel(sent.state.request_id)
    assert counts_of(engine, sent).prefilled_tokens == 32


def test_a_prompt_that_is_computed_again_after_preemption_counts_once() -> None:
    engine = Harness(max_step_tokens=16, num_blocks=64)
    sent = engine.send(words(0, 100), max_tokens=1)
    engine.step(3)
    engine.scheduler._preempt(sent.state.leader)
    engine.step(1)
    engine.loop.cancel(sent.state.request_id)
    assert counts_of(engine, sent).prefilled_tokens == 64
