"""Recurrent states: what is read, kept, forked and given back, under pressure and in every tier."""

import random

import pytest

from engine.protocol import Ttl
from tests.engine.schedule.harness import Harness, Sent, words

ENDS: tuple[Ttl, ...] = ("5m", "1h")


def test_a_second_turn_goes_on_from_the_state_at_the_mark() -> None:
    engine = Harness(state_blocks=2)
    engine.done(words(0, 10), words(100, 9), marks={0: "5m"})
    second = engine.done(words(0, 10), words(200, 9), marks={0: "5m"})
    assert second.usage.cache_read_tokens == 10
    engine.check_idle()


def test_nothing_is_reused_without_a_state() -> None:
    """The first turn's other blocks are in memory, but no state that goes with them."""
    engine = Harness(state_blocks=1)
    engine.done(words(0, 30), words(100, 9), marks={1: "5m"})
    second = engine.done(words(0, 30), words(200, 9), marks={0: "5m"})
    usage = second.usage
    assert (usage.cache_read_tokens, usage.automatic_tokens, usage.computed_tokens) == (0, 0, 40)


def test_a_mark_in_front_of_what_is_read_writes_no_entry() -> None:
    engine = Harness(state_blocks=1)
    engine.done(words(0, 12), words(100, 12), marks={1: "5m"})
    second = engine.done(words(0, 12), words(100, 12), marks={0: "5m", 1: "5m"})
    assert second.usage.cache_read_tokens == 24
    reports = second.begun.breakpoints
    assert [report.state for report in reports] == ["none", "leased"]
    assert reports[0].reason == "no_boundary"


def test_a_leased_state_is_held_against_a_flood() -> None:
    """The flood leaves states of its own, in the same scope: without the lease it takes the blocks.

    A prompt without a mark keeps no state and no content that could be read, so it takes nothing.
    """
    engine = Harness(state_blocks=3, num_blocks=48)
    engine.done(words(0, 20), words(100, 4), marks={0: "1h"})
    (entry,) = engine.entries.live()
    assert entry.is_leased and len(entry.blocks) == 5 + 3
    for number in range(8):
        engine.done(words(1000 * (number + 1), 60), marks={0: "1h"}, hold=False)
    again = engine.done(words(0, 20), words(200, 4), marks={0: "1h"})
    assert again.usage.cache_read_tokens == 20


def test_a_state_that_nobody_asked_to_hold_is_read_until_others_need_its_blocks() -> None:
    engine = Harness(state_blocks=3, num_blocks=48)
    engine.done(words(0, 20), words(100, 4), marks={0: "1h"}, hold=False)
    (entry,) = engine.entries.live()
    assert (entry.state, entry.why_unleased) == ("best_effort", "automatic")
    assert len(entry.blocks) == 5 + 3 and not engine.pool.num_leased
    again = engine.done(words(0, 20), words(200, 4), marks={0: "1h"}, hold=False)
    assert again.usage.cache_read_tokens == 20
    assert [point.reason for point in again.begun.breakpoints] == ["automatic"]
    for number in range(8):
        engine.done(words(1000 * (number + 1), 60), marks={0: "1h"}, hold=False)
    assert entry not in engine.entries.live()
    late = engine.done(words(0, 20), words(200, 4), marks={0: "1h"}, hold=False)
    assert (late.usage.cache_read_tokens, late.usage.automatic_tokens) == (0, 0)
    engine.check_idle()


def test_a_mark_leases_a_state_that_nobody_asked_to_hold() -> None:
    engine = Harness(state_blocks=3, num_blocks=48)
    engine.done(words(0, 20), words(100, 4), marks={0: "1h"}, hold=False)
    engine.done(words(0, 20), words(200, 4), marks={0: "1h"})
    (entry,) = engine.entries.live()
    assert entry.is_leased and engine.pool.num_leased == 5 + 3
    engine.check_idle()


@pytest.mark.parametrize("host_blocks", [0, 96])
def test_random_turns_find_the_states_of_exactly_their_tokens(host_blocks: int) -> None:
    """Every step checks every reference, and the runner every state that it is told to read."""
    assert sum(read_in_a_random_life(seed, host_blocks) for seed in range(60)) > 1000


def read_in_a_random_life(seed: int, host_blocks: int) -> int:
    rng = random.Random(seed)
    engine = Harness(
        num_blocks=rng.choice([40, 80]),
        state_blocks=rng.choice([1, 3]),
        host_blocks=host_blocks,
        max_step_tokens=rng.choice([8, 16, 64]),
        max_running=rng.choice([2, 4]),
        max_waiting=100,
        lease_share=rng.choice([0.2, 0.5]),
    )
    texts = [words(1000 * number, rng.randint(1, 14)) for number in range(5)]
    turns: list[Sent] = []
    for _ in range(25):
        segments = [rng.choice(texts[:3]), *(rng.choice(texts) for _ in range(rng.randint(0, 3)))]
        marked = rng.sample(range(len(segments)), rng.randint(0, len(segments)))
        turns.append(
            engine.send(
                *segments,
                marks={index: rng.choice(ENDS) for index in sorted(marked)},
                max_tokens=rng.randint(1, 6),
                choices=rng.choice([1, 1, 1, 3]),
                scope=rng.choice("ab"),
                service_class=rng.choice(["interactive", "interactive", "batch"]),
                has_names=True,
            )
        )
        engine.step(rng.randint(0, 6))
        if rng.random() < 0.15:
            engine.loop.cancel(turns[-1].state.request_id)
            turns.pop()
        if rng.random() < 0.1:
            engine.clock.advance(rng.choice([20, 301]))  # type: ignore[attr-defined]
    engine.finish(*turns)
    engine.check_idle()
    return sum(turn.started.usage.cache_read_tokens for turn in turns if turn.started)


def test_choices_of_a_prompt_of_one_token_begin_without_a_state() -> None:
    engine = Harness(state_blocks=1)
    engine.done(max_tokens=3, choices=3)


def test_a_mark_at_a_prompts_very_end_has_the_state_one_token_before() -> None:
    engine = Harness(state_blocks=1, scaffold=None)
    for read_tokens in (0, 11):
        turn = engine.done(words(0, 12), marks={0: "5m"})
        assert turn.usage.cache_read_tokens == read_tokens
    longer = engine.done(words(0, 12), words(100, 5), marks={1: "5m"})
    assert longer.usage.cache_read_tokens == 11


def test_a_state_that_has_taken_in_the_prompts_last_token_is_not_read() -> None:
    """The last token's logits are asked for. Nobody overtook the second turn."""
    engine = Harness(state_blocks=1, scaffold=None)
    engine.done(words(0, 12), words(100, 5), marks={0: "5m"})
    turn = engine.done(words(0, 12), marks={0: "5m"})
    assert turn.usage.cache_read_tokens == 0
    assert turn.begun.miss_reason == "no_boundary"
