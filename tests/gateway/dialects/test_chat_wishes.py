"""What only asks for better never fails a request and is told by name; Chat Completions' media,
foreign tools, prefill and penalties."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.protocol import TextPart, ToolResultPart
from gateway.prompt.ignored import MAX_TOLD, Ignored, Notepad
from tests.gateway.bodies import body, told
from tests.gateway.conftest import Stack, stacked
from tests.gateway.gemini_bodies import generate, post
from tests.gateway.openai_bodies import LOOK, MODEL, chat
from tests.gateway.prompt.test_media import jpeg
from tests.gateway.scripted_engine import ScriptedEngine

JPEG = "data:image/jpeg;base64," + b64encode(jpeg(1920, 1080)).decode()
PDF = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"}
MEDIA = [
    ("image_url", {"url": JPEG, "detail": "low"}, "image: JPEG, 1920 × 1080"),
    ("image_url", {"url": "https://example.com/a.png"}, "image: https://example.com/a.png"),
    ("input_audio", {"data": "AAAA", "format": "wav"}, "audio: WAV"),
    ("file", PDF, "file: PDF, a.pdf"),
    ("file", {"file_id": "file-1"}, "file: file-1"),
    ("video_url", {"url": "https://example.com/v.mp4"}, "video: https://example.com/v.mp4"),
]
IMAGE = {"type": "image_url", "image_url": {"url": JPEG}}


@pytest.mark.parametrize("kind, part, placeholder", MEDIA)
def test_media_have_a_placeholder_and_are_told(
    stack: Stack, kind: str, part: Any, placeholder: str
) -> None:
    answer = chat(stack, messages=[{"role": "user", "content": [{"type": kind, kind: part}]}])
    placeholder = f"[{placeholder}, not shown to this model]"
    assert stack.engine.requests[-1].prompt.messages[0].parts == [TextPart(placeholder)]
    assert [path for path, _ in told(answer)] == ["messages[0].content[0]"]


def test_an_image_in_a_tools_result_has_a_placeholder(stack: Stack) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    says: list[Any] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [IMAGE]},
    ]
    answer = chat(stack, messages=says, tools=[LOOK])
    part = stack.engine.requests[-1].prompt.messages[-1].parts[0]
    assert part == ToolResultPart("c1", "[image: JPEG, 1920 × 1080, not shown to this model]")
    assert [path for path, _ in told(answer)] == ["messages[2].content[0]"]


@pytest.mark.parametrize(
    "changes, path",
    [
        ({"verbosity": "low"}, "verbosity"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"extra_body": {"search_parameters": {"mode": "auto"}}}, "search_parameters"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ],
)
def test_what_only_asks_for_better_is_told_by_name(stack: Stack, changes: Any, path: str) -> None:
    assert [ignored for ignored, _ in told(chat(stack, **changes))] == [path]


@pytest.mark.parametrize(
    "changes, thinks",
    [
        ({"reasoning": {"effort": "high"}}, True),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning": {"effort": "high", "enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"max_tokens": 2000, "exclude": True}}, False),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "none"}, False),
        ({"reasoning_effort": "max"}, True),
        ({"reasoning_effort": "a word of next year"}, True),
        ({"thinking": {"type": "enabled", "keep": "all"}}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
    ],
)
def test_thinking_is_asked_for_in_several_ways(stack: Stack, changes: Any, thinks: bool) -> None:
    answer = chat(stack, extra_body=changes)
    assert stack.engine.requests[-1].thinking == thinks
    assert told(answer) == []


@pytest.mark.parametrize("tool", [
    {"type": "web_search"},
    {"type": "namespace", "name": "n", "tools": []},
])  # fmt: skip
def test_tools_that_only_their_vendor_runs_are_left_out_and_told(stack: Stack, tool: Any) -> None:
    answer = chat(stack, tools=[tool, LOOK])
    assert [tool.name for tool in stack.engine.requests[-1].prompt.tools] == ["look"]
    assert [path for path, _ in told(answer)] == ["tools[0]"]
    with pytest.raises(openai.BadRequestError) as refused:
        chat(stack, tools=[tool], tool_choice="required")
    assert refused.value.param == "tool_choice"


def test_a_trailing_assistant_message_is_continued(stack: Stack) -> None:
    begun = {"role": "assistant", "content": "The colour is"}
    chat(stack, messages=[{"role": "user", "content": "Name a colour."}, begun])
    last = stack.engine.requests[-1].prompt.messages[-1]
    assert (last.role, last.parts) == ("assistant", [TextPart("The colour is")])


def test_what_an_engine_cannot_do_is_refused_by_name_or_told(stack: Stack, tmp_path: Path) -> None:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.25}
    wishes: dict[str, Any] = {**penalties, "logit_bias": {"50256": -100}}
    for ask in (
        lambda: chat(stack, **wishes),
        lambda: stack.openai().completions.create(model=MODEL, prompt="x", **wishes),
        lambda: generate(stack, **penalties),
    ):
        ask()
        sampling = stack.engine.requests[-1].sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert stack.engine.requests[0].sampling.logit_bias == {50256: -100}
    with stacked(tmp_path, ScriptedEngine(capabilities=("tools",))) as plain:
        for name, value in {**wishes, "logprobs": True}.items():
            with pytest.raises(openai.BadRequestError) as caught:
                chat(plain, **{name: value})
            assert caught.value.param == name
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids: not supported"):
            chat(plain, extra_body={"allowed_token_ids": [1]})
        for name, value in {"responseLogprobs": True, "frequencyPenalty": 1}.items():
            reply = post(plain, generationConfig={name: value})
            assert reply.status_code == 400
            assert f"generationConfig.{name}" in reply.json()["error"]["message"]
        response = plain.openai().responses.create(
            model=MODEL, input="x", include=["message.output_text.logprobs"]
        )
        assert [path for path, _ in told(response)] == ["include"]
        assert plain.engine.requests[-1].sampling.logprobs is None
        chat(plain, presence_penalty=0, frequency_penalty=0, logit_bias={})
        # Nor does it think, which is no error.
        asking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
        for thinking in ({"type": "adaptive"}, asking["thinking"], {"type": "between_tools"}):
            answer = plain.sdk().messages.create(**body(**asking | {"thinking": thinking}))
            assert ("thinking", "this model does not think") in told(answer)
        whole = chat(plain, reasoning_effort="high")
        first = next(iter(chat(plain, reasoning_effort="high", stream=True)))
        for answer in (whole, first):
            assert told(answer) == [("reasoning_effort", "this model does not think")]
        assert not any(request.thinking for request in plain.engine.requests)


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
    assert len(notepad.ignored) == len(notepad.wishes) == MAX_TOLD
    notes = notepad.ignored_by([])
    assert len(notes) == MAX_TOLD + 1
    assert notes[-1] == Ignored("", f"{20_000 - MAX_TOLD} more fields were ignored")


def test_a_completion_tells_that_nothing_is_retained(stack: Stack) -> None:
    create: Any = stack.openai().completions.create
    for retention, paths in (("24h", ["prompt_cache_retention"]), ("in_memory", [])):
        options = {"prompt_cache_retention": retention}
        answer = create(model=MODEL, prompt="Once", extra_body=options)
        assert [path for path, _ in told(answer)] == paths
