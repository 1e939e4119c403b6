"""An engine before a server of llama.cpp's shape: slots, what they reuse, and for whom."""

from collections.abc import Iterator

import pytest

from engine.protocol import Failed
from tests.conformance.engines import Engine, prompt
from tests.engine.backends.upstream.conftest import engine_before
from tests.engine.backends.upstream.scripted import ANSWER, Fault, serving_script
from tests.engine.backends.upstream.scripted_llamacpp import SLOTS, ScriptedLlamaCpp, SlotScript


@pytest.fixture(scope="module")
def script() -> SlotScript:
    return SlotScript()


@pytest.fixture(scope="module")
def running(script: SlotScript) -> Iterator[Engine]:
    with serving_script(script, ScriptedLlamaCpp) as url, engine_before(url) as engine:
        yield engine


def orders(script: SlotScript) -> list[tuple[int, bool]]:
    bodies = [request.body for request in script.seen if request.path == "/completion"]
    return [(body["id_slot"], body["cache_prompt"]) for body in bodies]


def test_it_is_known_by_its_answers_and_says_what_it_keeps(engine: Engine) -> None:
    description = engine.description
    assert (description.upstream, description.max_running) == ("llamacpp", SLOTS)
    assert engine.keeps("exact_read") and engine.keeps("isolation")
    assert not engine.keeps("hold") and not engine.keeps("forced_tools")


def test_a_scope_reads_what_its_slot_kept(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    first = engine.ask(conversation, scope, 0)
    second = engine.ask(conversation, scope, 0)
    (end,) = engine.ends(conversation)
    assert (first.usage.cache_write_5m_tokens, second.usage.cache_read_tokens) == (end, end)
    # The server reuses all but the last token.
    assert second.usage.computed_tokens == 1
    assert second.started.breakpoints[0].reason == "no_hold"


def test_a_turn_that_ends_with_nothing_said_is_an_answer(
    engine: Engine, script: SlotScript
) -> None:
    script.is_mute = True
    try:
        answer = engine.ask(prompt(engine.text(100)), engine.scope(), 0)
    finally:
        script.is_mute = False
    assert answer.finished[0].reason == "stop"
    assert answer.usage.cache_write_5m_tokens > 0


def test_a_slot_another_scope_used_is_computed_anew(engine: Engine, script: SlotScript) -> None:
    conversation = prompt(engine.text(100))
    for _ in range(SLOTS + 1):
        usage = engine.ask(conversation, engine.scope(), 0).usage
        assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 0)
    latest = orders(script)[-SLOTS - 1 :]
    assert {slot for slot, _ in latest} == set(range(SLOTS)), "the least used goes first"
    assert not any(may_reuse for _, may_reuse in latest)


def test_a_slot_that_was_taken_away_gives_no_read(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    engine.ask(conversation, scope, 0)
    for _ in range(SLOTS):
        engine.ask(prompt(engine.text(50)), engine.scope())
    again = engine.ask(conversation, scope, 0)
    assert again.usage.cache_read_tokens == 0
    assert again.started.miss_reason == "best_effort_evicted"


def test_requests_beyond_the_slots_wait_for_one(engine: Engine, script: SlotScript) -> None:
    answer = engine.ask(prompt("Count."), engine.scope(), max_tokens=200, num_choices=5)
    assert [answer.text(choice) for choice in range(5)] == [ANSWER] * 5
    assert answer.finished[0].reason == "stop"
    # A token of a progress event is no output.
    (short,) = engine.ask(prompt("Count."), engine.scope(), max_tokens=3).finished
    assert (short.output_tokens, short.reason) == (3, "length")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(usage={"cache_n": 10**6}), id="more than the prompt"),
        pytest.param(Fault(usage={"cache_n": None}), id="no count"),
        pytest.param(Fault(body=b"data: {\n\n"), id="no json"),
        pytest.param(Fault(body=b'data: {"error": {"code": 500}}\n\n'), id="an error"),
        pytest.param(Fault(status=500), id="a status"),
        pytest.param(Fault(after=0), id="an end without a reason"),
    ],
)
def test_a_wrong_answer_fails_the_request(engine: Engine, script: SlotScript, fault: Fault) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    script.fault = fault
    answer = engine.ask(conversation, scope, 0, max_tokens=8)
    assert isinstance(answer.last, Failed)
    assert (engine.entries(scope), list(engine.unacknowledged().values())[-1].usage) == ([], None)


def test_a_server_that_reuses_wrongly_fails_the_request(engine: Engine, script: SlotScript) -> None:
    conversation = prompt(engine.text(100))
    for _ in range(SLOTS):
        engine.ask(conversation, engine.scope(), 0)
    script.ignores_wish = True
    try:
        answer = engine.ask(conversation, engine.scope(), 0)
        assert isinstance(answer.last, Failed) and "reused" in answer.last.message
    finally:
        script.ignores_wish = False


def test_tokens_are_drawn_in_the_protocols_order(engine: Engine, script: SlotScript) -> None:
    """By its own order the server cuts before it applies the temperature, and has more samplers."""
    engine.ask(prompt("Draw."), engine.scope(), repetition_penalty=1.5, min_p=0.1, top_p=0.5)
    body = script.seen[-1].body
    assert body["samplers"] == ["penalties", "temperature", "min_p", "top_k", "top_p"]
    assert (body["repeat_penalty"], body["min_p"], body["top_p"]) == (1.5, 0.1, 0.5)
    assert body["repeat_last_n"] >= engine.count(prompt("Draw.")).input_tokens
