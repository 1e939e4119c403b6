"""Chat Completions: what only asks for better, media, foreign tools, prefill and penalties."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.protocol import TextPart, ToolChoice, ToolResultPart
from tests.gateway.conftest import Stack
from tests.gateway.dialects.test_ignored import told
from tests.gateway.gemini_bodies import generate, post
from tests.gateway.openai_bodies import LOOK, chat, refused
from tests.gateway.prompt.test_media import jpeg
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import serve, serve_gateway

JPEG = "data:image/jpeg;base64," + b64encode(jpeg(1920, 1080)).decode()
MEDIA = [
    (
        {"type": "image_url", "image_url": {"url": JPEG, "detail": "low"}},
        "[image: JPEG, 1920 × 1080, not shown to this model]",
    ),
    (
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        "[image: https://example.com/a.png, not shown to this model]",
    ),
    (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "[audio: WAV, not shown to this model]",
    ),
    (
        {
            "type": "file",
            "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"},
        },
        "[file: PDF, a.pdf, not shown to this model]",
    ),
    ({"type": "file", "file": {"file_id": "file-1"}}, "[file: file-1, not shown to this model]"),
    (
        {"type": "video_url", "video_url": {"url": "https://example.com/v.mp4"}},
        "[video: https://example.com/v.mp4, not shown to this model]",
    ),
]  # fmt: skip


@pytest.mark.parametrize("part, shown", MEDIA)
def test_media_have_a_placeholder_and_are_told(stack: Stack, part: Any, shown: str) -> None:
    answer = chat(stack, messages=[{"role": "user", "content": [part]}])
    assert stack.engine.requests[-1].prompt.messages[0].parts == [TextPart(shown)]
    assert [path for path, _ in told(answer)] == ["messages[0].content[0]"]


def test_an_image_in_a_tools_result_has_a_placeholder(stack: Stack) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    says: list[Any] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [MEDIA[0][0]]},
    ]
    answer = chat(stack, messages=says, tools=[LOOK])
    part = stack.engine.requests[-1].prompt.messages[-1].parts[0]
    assert part == ToolResultPart("c1", MEDIA[0][1])
    assert [path for path, _ in told(answer)] == ["messages[2].content[0]"]


def test_by_the_setting_media_are_refused_by_their_path(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path, engine_url, unreadable="refuse") as url,
    ):
        strict = Stack(url, engine, tmp_path)
        error = refused(strict, messages=[{"role": "user", "content": [MEDIA[0][0]]}])
        assert error["param"] == "messages[0].content[0]"
        assert error["message"].endswith("Could not process image")


@pytest.mark.parametrize(
    "changes, path",
    [
        ({"verbosity": "low"}, "verbosity"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
    ],
)
def test_what_only_asks_for_better_is_told_by_name(stack: Stack, changes: Any, path: str) -> None:
    assert [found for found, _ in told(chat(stack, **changes))] == [path]


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
    ],
)
def test_thinking_is_asked_for_in_several_ways(stack: Stack, changes: Any, thinks: bool) -> None:
    answer = chat(stack, extra_body=changes)
    assert stack.engine.requests[-1].thinking == thinks
    assert told(answer) == []


@pytest.mark.parametrize("tool", [
    {"type": "web_search"},
    {"type": "custom", "custom": {"name": "run", "format": {"type": "text"}}},
    {"type": "namespace", "name": "n", "tools": []},
])  # fmt: skip
def test_tools_that_are_no_functions_are_left_out_and_told(stack: Stack, tool: Any) -> None:
    answer = chat(stack, tools=[tool, LOOK])
    assert [one.name for one in stack.engine.requests[-1].prompt.tools] == ["look"]
    assert [path for path, _ in told(answer)] == ["tools[0]"]
    answer = chat(stack, tools=[tool], tool_choice="required")
    assert stack.engine.requests[-1].tool_choice == ToolChoice()
    assert [path for path, _ in told(answer)] == ["tools[0]", "tool_choice"]


def test_a_trailing_assistant_message_is_continued(stack: Stack) -> None:
    says: list[Any] = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "The colour is"},
    ]
    chat(stack, messages=says)
    last = stack.engine.requests[-1].prompt.messages[-1]
    assert (last.role, last.parts) == ("assistant", [TextPart("The colour is")])


def test_penalties_reach_an_engine_that_can_and_are_refused_by_name_elsewhere(
    stack: Stack, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "logit_bias": {"50256": -100},
    }
    chat(stack, **asked)
    sampling = stack.engine.requests[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert sampling.logit_bias == {50256: -100}
    stack.openai().completions.create(model="holdfast-demo", prompt="x", **asked)
    assert stack.engine.requests[-1].sampling.logit_bias == {50256: -100}
    engine = ScriptedEngine(capabilities=("tools",))
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        plain = Stack(url, engine, tmp_path)
        for name, value in asked.items():
            with pytest.raises(openai.BadRequestError) as caught:
                chat(plain, **{name: value})
            assert caught.value.param == name
        with pytest.raises(openai.BadRequestError, match="logprobs: not supported"):
            chat(plain, logprobs=True)
        reply = post(plain, generationConfig={"responseLogprobs": True})
        assert "generationConfig.responseLogprobs" in reply.json()["error"]["message"]
        included = ["message.output_text.logprobs"]
        response = plain.openai().responses.create(
            model="holdfast-demo", input="x", include=included
        )
        assert [path for path, _ in told(response)] == ["include"]
        assert plain.engine.requests[-1].sampling.logprobs is None
        chat(plain, presence_penalty=0, frequency_penalty=0, logit_bias={})
        reply = post(plain, generationConfig={"frequencyPenalty": 1})
        assert reply.status_code == 400
        assert "generationConfig.frequencyPenalty" in reply.json()["error"]["message"]


def test_googles_penalties_reach_an_engine_that_can(stack: Stack) -> None:
    generate(stack, presence_penalty=0.5, frequency_penalty=-0.25)
    sampling = stack.engine.requests[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
