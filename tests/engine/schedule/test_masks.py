"""A grammar's mask is computed beside the step: one that takes long costs nobody else anything."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from llguidance import LLParserLimits

from engine.cache.ids import TokenId
from engine.clock import MonotonicClock
from engine.protocol import Finished
from engine.schedule.loop import EngineLoop
from engine.schedule.masks import MAX_THREADS, NICENESS, MaskPool
from tests.engine.schedule.harness import Harness, Sent


class SlowMask:
    """Ready when `is_free` is set; its thread waits for that without the interpreter's lock."""

    def __init__(self) -> None:
        self.is_ready = False
        self.is_failed = False
        self.is_free = threading.Event()
        self.ahead: list[bytes] = []

    def foresee(self, draft: Sequence[TokenId]) -> None:
        """Nothing is asked ahead here."""

    def compute(self) -> None:
        self.is_free.wait(60)
        self.is_ready = True


def engine_with(seconds: float) -> Harness:
    engine = Harness()
    engine.loop = EngineLoop(
        engine.scheduler,
        engine.accounting,
        engine.runner,
        engine.clock,
        max_waiting=16,
        masks=MaskPool(MonotonicClock(), seconds=seconds),
    )
    return engine


def bind(sent: Sent, mask: SlowMask) -> None:
    """From its next token on this mask says what may come."""
    sent.state.leader.parser.mask = mask  # type: ignore[misc]


def test_others_decode_while_a_mask_is_computed_and_its_choice_goes_on_with_it() -> None:
    engine, mask = engine_with(seconds=60), SlowMask()
    slow = engine.send([1, 2, 3], max_tokens=3)
    engine.step()
    bind(slow, mask)
    engine.loop._masks.begin([slow.state.leader])
    other = engine.send([4, 5, 6], scope="b", max_tokens=10)
    engine.step(12)
    assert other.is_over and not slow.is_over
    mask.is_free.set()
    engine.finish(slow)
    assert len(slow.answer()) == 3


def test_a_mask_that_overruns_ends_its_own_choice_and_no_other() -> None:
    engine, mask = engine_with(seconds=0.1), SlowMask()
    slow = engine.send([1, 2, 3], max_tokens=100)
    other = engine.send([4, 5, 6], scope="b", max_tokens=100)
    engine.step()
    bind(slow, mask)
    engine.loop._masks.begin([slow.state.leader])
    deadline = time.monotonic() + 180
    while not slow.is_over and time.monotonic() < deadline:
        engine.step()
    assert [frame.reason for frame in slow.frames if isinstance(frame, Finished)] == ["failed"]
    engine.finish(other)
    assert len(other.answer()) == 100
    mask.is_free.set()
    engine.check_idle()


def test_a_mask_that_only_waits_for_a_processor_does_not_end_its_choice() -> None:
    engine, mask = engine_with(seconds=0.5), SlowMask()
    sent = engine.send([1, 2, 3], max_tokens=3)
    engine.step()
    bind(sent, mask)
    engine.loop._masks.begin([sent.state.leader])
    timer = threading.Timer(1.0, mask.is_free.set)
    timer.start()
    engine.finish(sent)
    timer.join()
    assert len(sent.answer()) == 3


class Niceness(SlowMask):
    """Notes the niceness of the thread that computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: int | None = None

    def compute(self) -> None:
        self.seen = os.getpriority(os.PRIO_PROCESS, 0)
        self.is_ready = True


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is the process's elsewhere")
def test_threads_of_masks_step_back_and_no_other_does() -> None:
    engine, mask = engine_with(seconds=60), Niceness()
    sent = engine.send([1, 2, 3], max_tokens=3)
    engine.step()
    bind(sent, mask)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    engine.loop._masks.begin([sent.state.leader])
    engine.finish(sent)
    assert mask.seen == min(before + NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_the_librarys_limits_are_those_that_the_engine_relies_on() -> None:
    limits = LLParserLimits()
    assert limits.step_lexer_fuel <= 200_000 and limits.step_max_items <= 50_000
    assert json.dumps({"fuel": limits.initial_lexer_fuel}) == '{"fuel": 1000000}'


class EarlyMask(SlowMask):
    """Ready before its thread is done, as a mask is between its last write and its return."""

    def __init__(self) -> None:
        super().__init__()
        self.num_computed = 0

    def compute(self) -> None:
        self.num_computed += 1
        self.is_ready = True
        self.is_free.wait(60)


def test_a_mask_that_is_used_before_its_thread_is_done_is_computed_again() -> None:
    engine, mask = engine_with(seconds=60), EarlyMask()
    sent = engine.send([1, 2, 3], max_tokens=4)
    engine.step()
    bind(sent, mask)
    leader, parser = sent.state.leader, sent.state.leader.parser
    feed = parser.feed

    def feed_and_ask_again(token: int) -> object:
        mask.is_ready = False
        return feed(token)

    parser.feed = feed_and_ask_again  # type: ignore[method-assign, assignment]
    engine.loop._masks.begin([leader])
    while mask.num_computed < 1:
        time.sleep(0.001)
    engine.step()  # takes a token while the first thread still runs
    mask.is_free.set()
    engine.finish(sent)
    assert len(sent.answer()) == 4 and mask.num_computed >= 2


def test_the_choices_of_one_request_are_masked_one_after_another_and_others_meanwhile() -> None:
    """They share a state behind a lock, so two threads of a request would wait for each other."""
    engine, masks = engine_with(seconds=60), [SlowMask(), SlowMask()]
    sent = engine.send([1, 2, 3], choices=2, max_tokens=3)
    other, its_mask = engine.send([4, 5, 6], scope="b", max_tokens=3), SlowMask()
    engine.step(2)
    begun = [threading.Event(), threading.Event()]
    for sequence, mask, event in zip(sent.state.sequences, masks, begun, strict=True):
        sequence.parser.mask = mask  # type: ignore[misc]
        mask.compute = partial(_tell, event, mask.compute)  # type: ignore[method-assign]
    bind(other, its_mask)
    its_mask.is_free.set()
    engine.loop._masks.begin([*sent.state.sequences, other.state.leader])
    assert begun[0].wait(60)
    engine.finish(other)
    assert not begun[1].is_set()
    for mask in masks:
        mask.is_free.set()
    engine.finish(sent)
    assert begun[1].is_set() and [len(sent.answer(choice)) for choice in (0, 1)] == [3, 3]


def _tell(event: threading.Event, compute: Callable[[], None]) -> None:
    event.set()
    compute()


def test_a_grammar_takes_no_token_while_a_thread_has_it_and_others_go_on() -> None:
    engine, masks = engine_with(seconds=60), [SlowMask(), SlowMask()]
    sent = engine.send([1, 2, 3], choices=2, max_tokens=3)
    engine.step(2)
    first, second = sent.state.sequences
    first.parser.mask, second.parser.mask = masks  # type: ignore[misc]
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
    engine, pool = engine_with(seconds=60), MaskPool(MonotonicClock(), seconds=60)
    masks = [SlowMask() for _ in range(MAX_THREADS + 2)]
    busy = [
        engine.send([number], scope=str(number), max_tokens=50) for number in range(MAX_THREADS)
    ]
    choices = engine.send([1, 2, 3], scope="choices", choices=2, max_tokens=50)
    engine.step(MAX_THREADS + 2)
    sequences = [*(sent.state.leader for sent in busy), *choices.state.sequences]
    for sequence, mask in zip(sequences, masks, strict=True):
        sequence.parser.mask = mask  # type: ignore[misc]
    pool.begin(sequences)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    for mask in masks:
        mask.is_free.set()
