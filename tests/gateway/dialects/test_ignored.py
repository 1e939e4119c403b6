"""Fields that only ask for better never fail a request; `holdfast.ignored` names each one."""

from pathlib import Path
from typing import Any

from gateway.prompt.ignored import MAX_TOLD, Ignored, Notepad
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MESSAGES, MODEL, chat
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, serve, serve_gateway


def told(message: Any) -> list[tuple[str, str]]:
    """The fields that an answer of either dialect says were ignored, with the reasons."""
    extension = message.model_extra["holdfast"]
    return [(one["path"], one["reason"]) for one in extension.get("ignored", [])]


def test_an_ordinary_answer_says_nothing_of_ignored_fields(stack: Stack) -> None:
    message = stack.sdk().messages.create(**body())
    assert message.model_extra is not None and "ignored" not in message.model_extra["holdfast"]
    assert told(chat(stack)) == []


def test_thinking_is_taken_by_a_model_that_thinks_and_told_by_one_that_does_not(
    stack: Stack, tmp_path: Path
) -> None:
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
    assert "thinking" not in dict(told(stack.sdk().messages.create(**body(**enabled))))
    assert stack.engine.requests[-1].thinking
    engine = ScriptedEngine(capabilities=("tools",))
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        plain = Stack(url, engine, tmp_path)
        for thinking in ({"type": "adaptive"}, enabled["thinking"], {"type": "between_tools"}):
            message = plain.sdk(API_KEY).messages.create(**body(**enabled | {"thinking": thinking}))
            assert ("thinking", "this model does not think") in told(message)
        answer = plain.openai().chat.completions.create(
            model=MODEL, messages=MESSAGES, reasoning_effort="high"
        )
        assert told(answer) == [("reasoning_effort", "this model does not think")]
        first = next(
            iter(
                plain.openai().chat.completions.create(
                    model=MODEL, messages=MESSAGES, reasoning_effort="high", stream=True
                )
            )
        )
        assert told(first) == [("reasoning_effort", "this model does not think")]
        assert not any(request.thinking for request in engine.requests)


def test_an_answer_names_at_most_so_many_fields_and_counts_the_others() -> None:
    notepad = Notepad()
    for number in range(10_000):
        notepad.ignore(f"messages.{number}", "no")
        notepad.wish(f"tools.{number}", "no", "thinking")
    notes = notepad.notes()
    assert len(notes.ignored) == len(notes.wishes) == MAX_TOLD
    said = notes.told([])
    assert len(said) == MAX_TOLD + 1
    assert said[-1] == Ignored("", f"{20_000 - MAX_TOLD} more fields were ignored")
