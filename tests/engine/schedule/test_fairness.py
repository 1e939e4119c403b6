"""Scopes take turns: a flood or a long prompt of one does not keep another waiting."""

import pytest

from engine.schedule import pace
from tests.engine.schedule.harness import Harness, Sent, words


def flood(engine: Harness, scope: str, count: int, length: int = 31) -> list[Sent]:
    base = 1000 * ord(scope)
    return [
        engine.send(words(base + 100 * i, length), scope=scope, max_tokens=1) for i in range(count)
    ]


def begin_all(engine: Harness, sents: list[Sent]) -> list[Sent]:
    """Step until every response began; the requests in that order."""
    begun: list[Sent] = []
    while len(begun) < len(sents):
        engine.step()
        begun += [sent for sent in sents if sent.started is not None and sent not in begun]
    return begun


def order(engine: Harness, sents: list[Sent]) -> list[str]:
    """The scopes in the order in which their responses began."""
    return [sent.state.query.scope for sent in begin_all(engine, sents)]


def test_a_late_request_of_another_scope_overtakes_a_flood() -> None:
    engine = Harness(max_running=1)
    sents = flood(engine, "a", 10)
    engine.step()
    sents += flood(engine, "b", 1)
    assert order(engine, sents).index("b") == 1
    engine.finish(*sents)


def test_turns_are_counted_in_tokens_not_in_requests() -> None:
    engine = Harness(max_running=1, max_waiting=40, num_blocks=128)
    sents = flood(engine, "a", 4, length=99) + flood(engine, "b", 16, length=19)
    begun = order(engine, sents)
    second = [i for i, scope in enumerate(begun) if scope == "a"][1]
    assert begun[:second].count("b") == 5, "five short ones against one that is five times longer"
    engine.finish(*sents)


def test_a_long_prompt_does_not_keep_another_scopes_short_one_waiting() -> None:
    engine = Harness(max_step_tokens=16, num_blocks=256)
    long = engine.send(words(0, 800), scope="a", max_tokens=1)
    engine.step(3)
    short = engine.send(words(2000, 20), scope="b", max_tokens=1)
    engine.step(4)
    assert short.started is not None and long.started is None
    engine.finish(long, short)


def test_a_scope_saves_up_nothing_by_staying_away() -> None:
    engine = Harness(max_running=1, max_waiting=40)
    engine.finish(*flood(engine, "b", 1))
    for _ in range(5):
        engine.finish(*flood(engine, "a", 4))
    sents = flood(engine, "a", 6)
    engine.step()
    sents += flood(engine, "b", 6)
    begun = order(engine, sents)
    assert 2 <= begun[:6].count("a") <= 4
    engine.finish(*sents)


def warm_flood(engine: Harness, scope: str, count: int) -> list[Sent]:
    """Requests of which all but the last tokens are in memory: 10 blocks each."""
    prompt = words(50_000, 40)
    engine.finish(engine.send(prompt, scope=scope, max_tokens=1))
    return [engine.send([*prompt, i], scope=scope, max_tokens=1) for i in range(count)]


def most_begun_in_a_step(engine: Harness, sents: list[Sent]) -> int:
    most = 0
    while waiting := [sent for sent in sents if sent.state.began_at is None]:
        engine.step()
        most = max(most, sum(sent.state.began_at is not None for sent in waiting))
    return most


def test_admitting_cached_prompts_takes_a_share_of_a_shared_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looking up their blocks takes time. All in one step, they held up every other scope."""
    monkeypatch.setattr(pace, "ADMITTED_BLOCKS", 20)
    engine = Harness(num_blocks=256, max_running=16, max_waiting=20, max_step_tokens=64)
    neighbour = engine.send(words(0, 3), scope="b", max_tokens=60)
    engine.step(2)
    sents = warm_flood(engine, "a", 12)
    assert most_begun_in_a_step(engine, sents) <= 2
    engine.finish(neighbour, *sents)
    engine.check_idle()


def test_a_scope_alone_has_its_cached_prompts_admitted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "ADMITTED_BLOCKS", 20)
    engine = Harness(num_blocks=256, max_running=16, max_waiting=20, max_step_tokens=64)
    sents = warm_flood(engine, "a", 12)
    assert most_begun_in_a_step(engine, sents) == 12
    engine.finish(*sents)


def test_a_scope_pays_for_the_admission_of_cached_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute next to nothing, and would be the next in order again and again."""
    monkeypatch.setattr(pace, "ADMITTED_BLOCKS", 10)
    engine = Harness(num_blocks=256, max_running=16, max_waiting=40, max_step_tokens=16)
    first = engine.send(words(0, 3), scope="b", max_tokens=1)
    engine.finish(first)
    sents = warm_flood(engine, "a", 30)
    others = [engine.send(words(900 * i, 100), scope="b", max_tokens=1) for i in range(2)]
    begun = order(engine, [*sents, *others])
    assert [place for place, scope in enumerate(begun) if scope == "b"][1] < 20
    engine.finish(*sents, *others)
