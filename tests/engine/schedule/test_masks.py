"""A grammar's mask is computed beside the step: one that takes long costs nobody else anything."""

import os
import sys
import threading
import time

import pytest
from llguidance import LLParserLimits

from engine.clock import MonotonicClock
from engine.protocol import Finished
from engine.schedule.loop import EngineLoop
from engine.schedule.masks import MAX_THREADS, NICENESS, MaskPool
from tests.engine.schedule.harness import Harness, Sent


class SlowMask:
    """Its thread waits until `is_free` is set, without the interpreter's lock.

    An early one is ready before, as a mask is between its last write and its return.
    """

    def __init__(self, *, is_early: bool = False) -> None:
        self.is_ready = self.is_failed = False
        self.is_begun, self.is_free = threading.Event(), threading.Event()
        self.num_computed = 0
        self.niceness: int | None = None
        self._is_early = is_early

    def compute(self) -> None:
        self.num_computed += 1
        self.niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self.is_ready = self._is_early
        self.is_begun.set()
        self.is_free.wait(60)
        self.is_ready = True


def engine_with(seconds: float = 60) -> Harness:
    engine = Harness()
    masks = MaskPool(MonotonicClock(), seconds=seconds)
    engine.loop = EngineLoop(
        engine.scheduler,
        engine.accounting,
        engine.runner,
        max_waiting=16,
        masks=masks,
    )
    return engine


def bind(sent: Sent, *masks: SlowMask) -> None:
    """From their next tokens on these masks say what may come."""
    for sequence, mask in zip(sent.state.sequences, masks, strict=True):
        sequence.parser.mask = mask  # type: ignore[misc]


def masked(engine: Harness, mask: SlowMask, max_tokens: int = 3) -> Sent:
    """A request whose next token waits for this mask, of which a thread has begun."""
    sent = engine.send([1, 2, 3], max_tokens=max_tokens)
    engine.step()
    bind(sent, mask)
    engine.loop._masks.begin([sent.state.leader])
    return sent


def test_others_decode_while_a_mask_is_computed_and_its_choice_goes_on_with_it() -> None:
    engine, mask = engine_with(), SlowMask()
    slow = masked(engine, mask)
    other = engine.send([4, 5, 6], scope="b", max_tokens=10)
    engine.step(12)
    assert other.is_over and not slow.is_over
    mask.is_free.set()
    engine.finish(slow)
    assert len(slow.answer()) == 3


def test_a_mask_that_overruns_ends_its_own_choice_and_no_other() -> None:
    engine, mask = engine_with(seconds=0.1), SlowMask()
    other = engine.send([4, 5, 6], scope="b", max_tokens=100)
    slow = masked(engine, mask, max_tokens=100)
    deadline = time.monotonic() + 180
    while not slow.is_over and time.monotonic() < deadline:
        engine.step()
    assert [frame.reason for frame in slow.frames if isinstance(frame, Finished)] == ["too_costly"]
    engine.finish(other)
    assert len(other.answer()) == 100
    mask.is_free.set()
    engine.check_idle()


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is the process's elsewhere")
def test_the_threads_of_masks_step_back() -> None:
    engine, mask = engine_with(), SlowMask()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    sent = masked(engine, mask)
    mask.is_free.set()
    engine.finish(sent)
    assert len(sent.answer()) == 3
    assert mask.niceness == min(before + NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_the_librarys_limits_are_those_that_the_engine_relies_on() -> None:
    limits = LLParserLimits()
    assert limits.step_lexer_fuel <= 200_000 and limits.step_max_items <= 50_000
    assert limits.initial_lexer_fuel == 1_000_000


def test_a_mask_that_is_used_before_its_thread_is_done_is_computed_again() -> None:
    engine, mask = engine_with(), SlowMask(is_early=True)
    sent = engine.send([1, 2, 3], max_tokens=4)
    engine.step()
    bind(sent, mask)
    parser = sent.state.leader.parser
    feed = parser.feed

    def feed_and_ask_again(token: int) -> object:
        mask.is_ready = False
        return feed(token)

    parser.feed = feed_and_ask_again  # type: ignore[method-assign, assignment]
    engine.loop._masks.begin([sent.state.leader])
    assert mask.is_begun.wait(60)
    engine.step()  # takes a token while the first thread still runs
    mask.is_free.set()
    engine.finish(sent)
    assert len(sent.answer()) == 4 and mask.num_computed >= 2


def test_the_choices_of_one_request_are_masked_one_after_another_and_others_meanwhile() -> None:
    """They share a state behind a lock, so two threads of a request would wait for each other."""
    engine, masks, its_mask = engine_with(), (SlowMask(), SlowMask()), SlowMask()
    sent = engine.send([1, 2, 3], choices=2, max_tokens=3)
    other = engine.send([4, 5, 6], scope="b", max_tokens=3)
    engine.step(2)
    bind(sent, *masks)
    bind(other, its_mask)
    its_mask.is_free.set()
    engine.loop._masks.begin([*sent.state.sequences, other.state.leader])
    assert masks[0].is_begun.wait(60)
    engine.finish(other)
    assert not masks[1].is_begun.is_set()
    for mask in masks:
        mask.is_free.set()
    engine.finish(sent)
    assert masks[1].is_begun.is_set() and [len(sent.answer(i)) for i in (0, 1)] == [3, 3]


def test_a_grammar_takes_no_token_while_a_thread_has_it_and_others_go_on() -> None:
    engine, masks = engine_with(), (SlowMask(), SlowMask())
    sent = engine.send([1, 2, 3], choices=2, max_tokens=3)
    engine.step(2)
    bind(sent, *masks)
    first, second = sent.state.sequences
    masks[1].is_ready = True
    engine.loop._masks.begin([first])
    num_taken = second.num_output
    other = engine.send([4, 5, 6], scope="b", max_tokens=10)
    engine.step(12)
    assert other.is_over and second.num_output == num_taken
    assert second.num_pending == 0, "sampled, and not taken"
    masks[0].is_free.set()
    engine.finish(sent)
    assert [len(sent.answer(choice)) for choice in (0, 1)] == [3, 3]
    engine.check_idle()


def test_an_engine_ends_while_masks_of_one_request_wait_behind_each_other() -> None:
    engine, pool = engine_with(), MaskPool(MonotonicClock(), seconds=60)
    masks = [SlowMask() for _ in range(MAX_THREADS + 2)]
    sents = [engine.send([n], scope=str(n), max_tokens=50) for n in range(MAX_THREADS)]
    sents.append(engine.send([1, 2, 3], scope="choices", choices=2, max_tokens=50))
    engine.step(MAX_THREADS + 2)
    for sent, own in zip(sents, [*([mask] for mask in masks[:-2]), masks[-2:]], strict=True):
        bind(sent, *own)
    pool.begin([sequence for sent in sents for sequence in sent.state.sequences])
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    for mask in masks:
        mask.is_free.set()
