"""An engine before a server of OpenAI's shape: conversations out, deltas in, and its usage."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.protocol import (
    Failed,
    Message,
    Prompt,
    PurgeReply,
    TextDelta,
    TextPart,
    ThinkingDelta,
    Tool,
    ToolInputDelta,
    ToolUsePart,
    ToolUseStart,
)
from tests.conformance.engines import Engine, Refused, prompt
from tests.engine.backends.upstream.conftest import engine_before
from tests.engine.backends.upstream.scripted import ANSWER, Fault, Script, serving_script
from tests.engine.backends.upstream.scripted_openai import ScriptedOpenAi

PAINT = Tool("paint", {"type": "object", "properties": {"colour": {"type": "string"}}})


@pytest.fixture(scope="module")
def running(script: Script) -> Iterator[Engine]:
    with serving_script(script, ScriptedOpenAi) as url, engine_before(url) as engine:
        yield engine


def test_it_says_that_scopes_are_not_kept_apart(engine: Engine) -> None:
    assert engine.description.upstream == "openai"
    assert engine.keeps("exact_read") and not engine.keeps("isolation")
    assert not engine.keeps("hold") and not engine.has("forced_tools")


def test_a_scope_reads_its_own_entries_and_is_told_of_no_others(engine: Engine) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    assert (
        engine.ask(conversation, scope, 0).usage.cache_write_5m_tokens
        == engine.ends(conversation)[0]
    )
    assert (
        engine.ask(conversation, scope, 0).usage.cache_read_tokens == engine.ends(conversation)[0]
    )
    usage = engine.ask(conversation, engine.scope(), 0).usage
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 0)


def test_text_is_told_as_it_comes_and_counted_by_the_server(engine: Engine) -> None:
    answer = engine.ask(prompt("Count."), engine.scope(), max_tokens=200)
    assert answer.text() == ANSWER + " "
    assert (answer.finished[0].reason, answer.finished[0].output_tokens) == ("stop", 12)
    short = engine.ask(prompt("Count."), engine.scope(), max_tokens=3)
    assert (short.finished[0].reason, short.finished[0].output_tokens) == ("length", 3)


def test_a_stop_string_is_found_here(engine: Engine) -> None:
    answer = engine.ask(
        prompt("Count."), engine.scope(), max_tokens=200, stop_sequences=["four five"]
    )
    assert answer.text() == "One two three "
    (finished,) = answer.finished
    assert (finished.reason, finished.stop_sequence) == ("stop_sequence", "four five")
    assert 0 < finished.output_tokens < 20


def test_calls_and_thoughts_are_the_servers(engine: Engine, script: Script) -> None:
    conversation = Prompt(
        messages=[
            Message("user", [TextPart("Paint.")]),
            Message("assistant", [ToolUsePart("t1", "paint", {"colour": "red"})]),
            Message("user", [TextPart("Again.")]),
        ],
        tools=[PAINT],
        system=[TextPart("One."), TextPart("Two.")],
    )
    answer = engine.ask(conversation, engine.scope(), max_tokens=50)
    deltas = [f for f in answer.frames if not isinstance(f, TextDelta)][1:-2]
    assert isinstance(deltas[0], ThinkingDelta) and deltas[0].text == "Hm."
    assert isinstance(deltas[1], ToolUseStart) and deltas[1].name == "paint"
    inputs = [delta.partial_json for delta in deltas if isinstance(delta, ToolInputDelta)]
    assert "".join(inputs) == '{"colour": "blue"}'
    assert answer.finished[0].reason == "tool_use"
    messages = next(request.body for request in reversed(script.seen) if "chat" in request.path)[
        "messages"
    ]
    assert messages[0] == {"role": "system", "content": "One.\n\nTwo."}
    assert messages[2]["tool_calls"][0]["function"] == {
        "name": "paint",
        "arguments": '{"colour": "red"}',
    }


def test_a_prompt_the_server_counts_otherwise_is_no_read(engine: Engine, script: Script) -> None:
    scope = engine.scope()
    conversation = prompt(engine.text(100))
    engine.ask(conversation, scope, 0)
    script.fault = Fault(usage={"prompt_tokens": 5})
    counted = engine.ask(conversation, scope, 0).started
    assert counted.usage.cache_read_tokens == 0
    assert counted.breakpoints[0].missed == counted.miss_reason is not None


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(body=b"data: {\n\n"), id="no json"),
        pytest.param(Fault(status=500), id="a status"),
        pytest.param(Fault(usage={"prompt_tokens_details": {"cached_tokens": 10**6}}), id="reuse"),
        pytest.param(Fault(after=2), id="an end without a reason"),
    ],
)
def test_a_wrong_answer_is_no_right_one(engine: Engine, script: Script, fault: Fault) -> None:
    script.fault = fault
    answer = engine.ask(prompt(engine.text(100)), engine.scope(), 0, max_tokens=8)
    is_failed = isinstance(answer.last, Failed)
    assert is_failed or answer.finished[0].reason == "failed"


@pytest.mark.parametrize(("reason", "code"), [("abort", "not_ready"), ("error", "internal")])
def test_an_answer_that_the_server_gives_up_is_no_whole_one(
    engine: Engine, script: Script, reason: str, code: str
) -> None:
    """As vLLM and SGLang do when they are paused: what came by then is counted."""
    script.fault = Fault(after=3, reason=reason)
    answer = engine.ask(prompt("Count."), engine.scope(), max_tokens=200)
    (finished,) = answer.finished
    assert answer.text() and ANSWER.startswith(answer.text().strip())
    assert (finished.reason, finished.code, finished.output_tokens) == ("failed", code, 4)


@pytest.mark.parametrize(
    ("conversation", "sampling", "named"),
    [
        (Prompt(messages=[], text="Once upon"), {}, "prompt.text"),
        (prompt("Once upon"), {"ignore_eos": True}, "ignore_eos"),
        (prompt("Once upon"), {"top_k": 5}, "top_k"),
        (
            Prompt(
                [Message("user", [TextPart("Begin.")]), Message("assistant", [TextPart("Once")])]
            ),
            {},
            "messages",
        ),
    ],
)
def test_what_the_servers_own_template_rules_is_refused_by_name(
    engine: Engine, conversation: Prompt, sampling: dict[str, Any], named: str
) -> None:
    with pytest.raises(Refused) as refused:
        engine.ask(conversation, engine.scope(), max_tokens=8, **sampling)
    assert refused.value.reply["code"] == "unsupported"
    assert refused.value.reply["message"].startswith(named)


def test_a_server_that_tells_nothing_is_found_and_read_from_by_nobody() -> None:
    script = Script(tells=False)
    with serving_script(script, ScriptedOpenAi) as url, engine_before(url) as engine:
        assert engine.description.upstream == "openai"
        assert not engine.keeps("exact_read") and not engine.keeps("isolation")
        scope = engine.scope()
        conversation = prompt(engine.text(100))
        first = engine.ask(conversation, scope, 0)
        again = engine.ask(conversation, scope, 0)
        assert first.started.breakpoints[0].reason == "no_hold"
        assert again.usage.cache_read_tokens == 0
        assert again.started.miss_reason == "not_told"
        assert [first.started.breakpoints[0].missed, again.started.breakpoints[0].missed] == [
            "cold",
            "not_told",
        ]


def test_a_purge_says_what_the_server_keeps(engine: Engine) -> None:
    purged = engine.post("purge", {"scope": engine.scope()}, PurgeReply)
    assert (purged.entries, purged.device_blocks, purged.busy_blocks) == (0, 0, 0)
    assert purged.unpurged == [
        "what the server behind this engine keeps: it has its own ways to be reset"
    ]
