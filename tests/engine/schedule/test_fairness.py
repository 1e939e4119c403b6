"""Scopes take turns: a flood or a long prompt of one does not keep another waiting."""

import pytest

from engine.schedule import pace
from engine.schedule.scheduler import MAX_OVERTAKEN
from tests.engine.schedule.harness import Harness, Sent, occupied, words


def flood(engine: Harness, scope: str, count: int, length: int = 31) -> list[Sent]:
    base = 1000 * ord(scope)
    return [
        engine.send(words(base + 100 * i, length), scope=scope, max_tokens=1) for i in range(count)
    ]


def order(engine: Harness, sents: list[Sent]) -> list[str]:
    """Step until every response began; the scopes in that order. Then all end."""
    begun: list[Sent] = []
    while len(begun) < len(sents):
        engine.step()
        begun += [turn for turn in sents if turn.started is not None and turn not in begun]
    engine.finish(*sents)
    return [turn.state.query.scope for turn in begun]


def test_a_late_request_of_another_scope_overtakes_a_flood() -> None:
    engine = Harness(max_running=1)
    sents = flood(engine, "a", 10)
    engine.step()
    assert order(engine, sents + flood(engine, "b", 1)).index("b") == 1


def test_turns_are_counted_in_tokens_not_in_requests() -> None:
    engine = Harness(max_running=1, max_waiting=40, num_blocks=128)
    begun = order(engine, flood(engine, "a", 4, length=99) + flood(engine, "b", 16, length=19))
    second = [i for i, scope in enumerate(begun) if scope == "a"][1]
    assert begun[:second].count("b") == 5, "five short ones against one that is five times longer"


def test_a_scope_saves_up_nothing_by_staying_away() -> None:
    engine = Harness(max_running=1, max_waiting=40)
    engine.finish(*flood(engine, "b", 1))
    for _ in range(5):
        engine.finish(*flood(engine, "a", 4))
    sents = flood(engine, "a", 6)
    engine.step()
    assert 2 <= order(engine, sents + flood(engine, "b", 6))[:6].count("a") <= 4


def warm_flood(engine: Harness, scope: str, count: int) -> list[Sent]:
    """Requests of which all but the last tokens are in memory: 10 blocks each."""
    prompt = words(50_000, 40)
    engine.done(prompt, scope=scope, max_tokens=1)
    return [engine.send([*prompt, i], scope=scope, max_tokens=1) for i in range(count)]


@pytest.mark.parametrize("has_neighbour", [True, False])
def test_admitting_cached_prompts_takes_a_share_of_a_shared_step(
    monkeypatch: pytest.MonkeyPatch, has_neighbour: bool
) -> None:
    """Looking up their blocks takes time. All in one step, they held up every other scope."""
    monkeypatch.setattr(pace, "ADMITTED_BLOCKS", 20)
    engine = Harness(num_blocks=256, max_running=16, max_waiting=20, max_step_tokens=64)
    neighbours = [engine.send(words(0, 3), scope="b", max_tokens=60)] if has_neighbour else []
    engine.step(2)
    sents = warm_flood(engine, "a", 12)
    most = 0
    while waiting := [turn for turn in sents if turn.state.began_at is None]:
        engine.step()
        most = max(most, sum(turn.state.began_at is not None for turn in waiting))
    assert most <= 2 if has_neighbour else most == 12
    engine.finish(*neighbours, *sents)
    engine.check_idle()


def test_a_scope_pays_for_the_admission_of_cached_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute next to nothing, and would be the next in order again and again."""
    monkeypatch.setattr(pace, "ADMITTED_BLOCKS", 10)
    engine = Harness(num_blocks=256, max_running=16, max_waiting=40, max_step_tokens=16)
    engine.done(words(0, 3), scope="b", max_tokens=1)
    sents = warm_flood(engine, "a", 30)
    sents += [engine.send(words(900 * i, 100), scope="b", max_tokens=1) for i in range(2)]
    assert [place for place, scope in enumerate(order(engine, sents)) if scope == "b"][1] < 20


def test_a_short_prompt_runs_while_a_long_one_of_another_scope_does_not_fit() -> None:
    engine = Harness(num_blocks=64, max_step_tokens=64)
    running = occupied(engine, 40)
    long = engine.send(words(1000, 158), scope="b", max_tokens=1)
    short = engine.send(words(2000, 10), scope="c", max_tokens=1)
    engine.step(5)
    assert short.is_over, "22 blocks were free, and it needs 3"
    assert long.started is None and not running.is_over
    engine.finish(running, long)
    engine.check_idle()


def test_a_long_prompt_is_overtaken_a_bounded_number_of_times() -> None:
    engine = Harness(num_blocks=64, max_step_tokens=64, max_waiting=1000, max_running=4)
    running = occupied(engine, 20, max_tokens=10)
    long = engine.send(words(1000, 240), scope="b", max_tokens=1)
    passing: list[Sent] = []
    while long.started is None:
        # A flood that never ends: there is always one that would fit.
        number = len(passing)
        assert number < 400, "the flood kept it out"
        start = 3000 + 40 * number
        passing.append(engine.send(words(start, 30), scope="c", max_tokens=12, seed=number))
        engine.step()
    assert sum(turn.started is not None for turn in passing) <= MAX_OVERTAKEN + 1
    engine.finish(running, long, *passing)
    engine.check_idle()


def test_what_does_not_fit_is_not_looked_through_again_while_nothing_was_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's cost must not grow with what waits: each try walks over its whole prompt."""
    engine = Harness(num_blocks=64, max_step_tokens=64, max_waiting=1000)
    running = occupied(engine, 40, max_tokens=100)
    sents = [engine.send(words(1000 * i, 120 + i), scope=f"s{i}", max_tokens=1) for i in range(20)]
    engine.step(8)
    tried = list[object]()
    begin = engine.cache.begin
    with monkeypatch.context() as counting:
        counting.setattr(engine.cache, "begin", lambda *of: (tried.append(of), begin(*of))[1])
        engine.step(10)
    assert len(tried) <= 10, "the first in order alone, once a step"
    engine.finish(running, *sents)
