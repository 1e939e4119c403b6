"""Fields that only ask for better never fail a request; `holdfast.ignored` names each one."""

from typing import Any

from gateway.prompt.ignored import MAX_TOLD, Ignored, Notepad
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import chat


def told(message: Any) -> list[tuple[str, str]]:
    """The fields that an answer of either dialect says were ignored, with the reasons."""
    extension = message.model_extra["holdfast"]
    return [(one["path"], one["reason"]) for one in extension.get("ignored", [])]


def test_an_ordinary_answer_says_nothing_of_ignored_fields(stack: Stack) -> None:
    message = stack.sdk().messages.create(**body())
    assert message.model_extra is not None and "ignored" not in message.model_extra["holdfast"]
    assert told(chat(stack)) == []
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
    assert "thinking" not in dict(told(stack.sdk().messages.create(**body(**thinking))))
    assert stack.engine.requests[-1].thinking


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
