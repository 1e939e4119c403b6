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
from engine.schedule.token_masks import MAX_THREADS, NICENESS, TokenMaskPool
from tests.engine.schedule.harness import Harness, Sent


class SlowConstraint:
    """Its thread waits until `is_free` is set, without the interpreter's lock.

    An early one is ready before, as a mask is between its last write and its return.
    """

    def __init__(self, *, is_early: bool = False) -> None:
        self.is_ready = self.is_failed = False
        self.is_begun = threading.Event()
        self.is_free = threading.Event()
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
    masks = TokenMaskPool(MonotonicClock(), seconds=seconds)
    engine.loop = EngineLoop(
        engine.scheduler,
        engine.accounting,
        engine.runner,
        max_waiting=16,
        token_masks=masks,
    )
    return engine


def constrain(turn: Sent, *constraints: SlowConstraint) -> None:
    """From their next tokens on these constraints say what may come."""
    for sequence, constraint in zip(turn.state.sequences, constraints, strict=True):
        sequence.parser.constraint = constraint  # type: ignore[misc]


def constrained(engine: Harness, constraint: SlowConstraint, max_tokens: int = 3) -> Sent:
    """A request whose next token waits for this mask, of which a thread has begun."""
    turn = engine.send([1, 2, 3], max_tokens=max_tokens)
    engine.step()
    constrain(turn, constraint)
    engine.loop._token_masks.begin([turn.state.leader])
    return turn


def test_others_decode_while_a_mask_is_computed_and_its_choice_goes_on_with_it() -> None:
    engine = engine_with()
    constraint = SlowConstraint()
    slow = constrained(engine, constraint)
    unconstrained = engine.send([4, 5, 6], scope="b", max_tokens=10)
    engine.step(12)
    assert unconstrained.is_over and not slow.is_over
    constraint.is_free.set()
    engine.finish(slow)
    assert len(slow.answer()) == 3


def test_a_mask_that_overruns_ends_its_own_choice_and_no_other() -> None:
    engine = engine_with(seconds=0.1)
    constraint = SlowConstraint()
    unconstrained = engine.send([4, 5, 6], scope="b", max_tokens=100)
    slow = constrained(engine, constraint, max_tokens=100)
    deadline = time.monotonic() + 180
    while not slow.is_over and time.monotonic() < deadline:
        engine.step()
    assert [frame.reason for frame in slow.frames if isinstance(frame, Finished)] == ["too_costly"]
    engine.finish(unconstrained)
    assert len(unconstrained.answer()) == 100
    constraint.is_free.set()
    engine.check_idle()


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is the process's elsewhere")
def test_the_threads_of_masks_step_back() -> None:
    engine = engine_with()
    constraint = SlowConstraint()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    turn = constrained(engine, constraint)
    constraint.is_free.set()
    engine.finish(turn)
    assert len(turn.answer()) == 3
    assert constraint.niceness == min(before + NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_the_librarys_limits_are_those_that_the_engine_relies_on() -> None:
    limits = LLParserLimits()
    assert limits.step_lexer_fuel <= 200_000 and limits.step_max_items <= 50_000
    assert limits.initial_lexer_fuel == 1_000_000


def test_a_mask_that_is_used_before_its_thread_is_done_is_computed_again() -> None:
    engine = engine_with()
    constraint = SlowConstraint(is_early=True)
    turn = engine.send([1, 2, 3], max_tokens=4)
    engine.step()
    constrain(turn, constraint)
    parser = turn.state.leader.parser
    feed = parser.feed

    def feed_and_ask_again(token: int) -> object:
        constraint.is_ready = False
        return feed(token)

    parser.feed = feed_and_ask_again  # type: ignore[method-assign, assignment]
    engine.loop._token_masks.begin([turn.state.leader])
    assert constraint.is_begun.wait(60)
    engine.step()  # takes a token while the first thread still runs
    constraint.is_free.set()
    engine.finish(turn)
    assert len(turn.answer()) == 4 and constraint.num_computed >= 2


def test_the_choices_of_one_request_are_masked_one_after_another_and_others_meanwhile() -> None:
    """They share a state behind a lock, so two threads of a request would wait for each other."""
    engine = engine_with()
    constraints = (SlowConstraint(), SlowConstraint())
    its_constraint = SlowConstraint()
    turn = engine.send([1, 2, 3], choices=2, max_tokens=3)
    unrelated = engine.send([4, 5, 6], scope="b", max_tokens=3)
    engine.step(2)
    constrain(turn, *constraints)
    constrain(unrelated, its_constraint)
    its_constraint.is_free.set()
    engine.loop._token_masks.begin([*turn.state.sequences, unrelated.state.leader])
    assert constraints[0].is_begun.wait(60)
    engine.finish(unrelated)
    assert not constraints[1].is_begun.is_set()
    for constraint in constraints:
        constraint.is_free.set()
    engine.finish(turn)
    assert constraints[1].is_begun.is_set() and [len(turn.answer(i)) for i in (0, 1)] == [3, 3]


def test_a_grammar_takes_no_token_while_a_thread_has_it_and_others_go_on() -> None:
    engine = engine_with()
    constraints = (SlowConstraint(), SlowConstraint())
    turn = engine.send([1, 2, 3], choices=2, max_tokens=3)
    engine.step(2)
    constrain(turn, *constraints)
    first, second = turn.state.sequences
    constraints[1].is_ready = True
    engine.loop._token_masks.begin([first])
    num_taken = second.num_output
    unconstrained = engine.send([4, 5, 6], scope="b", max_tokens=10)
    engine.step(12)
    assert unconstrained.is_over and second.num_output == num_taken
    assert second.num_pending == 0, "sampled, and not taken"
    constraints[0].is_free.set()
    engine.finish(turn)
    assert [len(turn.answer(choice)) for choice in (0, 1)] == [3, 3]
    engine.check_idle()


def test_an_engine_ends_while_masks_of_one_request_wait_behind_each_other() -> None:
    engine = engine_with()
    pool = TokenMaskPool(MonotonicClock(), seconds=60)
    constraints = [SlowConstraint() for _ in range(MAX_THREADS + 2)]
    sents = [engine.send([n], scope=str(n), max_tokens=50) for n in range(MAX_THREADS)]
    sents.append(engine.send([1, 2, 3], scope="choices", choices=2, max_tokens=50))
    engine.step(MAX_THREADS + 2)
    groups = [*([constraint] for constraint in constraints[:-2]), constraints[-2:]]
    for turn, group in zip(sents, groups, strict=True):
        constrain(turn, *group)
    pool.begin([sequence for turn in sents for sequence in turn.state.sequences])
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    for constraint in constraints:
        constraint.is_free.set()
