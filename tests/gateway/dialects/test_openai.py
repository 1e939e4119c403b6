"""Chat Completions and Completions through the official SDK, over a scripted engine."""

import json
from typing import Any

import httpx
import openai
import pytest

from engine.protocol import (
    Breakpoint,
    ErrorReply,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    InputUsage,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ToolChoice,
    ToolInputDelta,
    ToolResultPart,
    ToolUsePart,
    ToolUseStart,
)
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import (
    EPHEMERAL,
    LOOK,
    MESSAGES,
    MODEL,
    chat,
    frames,
    refused,
)


def test_an_answer_has_text_reason_and_inclusive_usage(stack: Stack) -> None:
    answer = chat(stack, user="u", metadata={"a": "b"}, store=False, service_tier="auto")
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello there")
    assert choice.finish_reason == "stop"
    prompt_tokens = len("What is a lease?") // 4 + 1 + 4
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 2
    assert answer.usage.total_tokens == prompt_tokens + 2
    (automatic,) = answer.model_extra["holdfast"]["breakpoints"]
    assert automatic["path"] == "messages[0].content"
    assert answer.model_extra["holdfast"]["auto_cache"] == {"mode": "conversation", "ttl": "5m"}


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_has_usage_only_where_it_was_asked_for(stack: Stack, include_usage: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "stream": True}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    with stack.http() as http:
        lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    lines = [line for line in lines if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    last = chunks.pop() if include_usage else None
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " there"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]
    if last is None:
        assert not any("usage" in chunk for chunk in chunks)
    else:
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 2


def test_tool_calls_arrive_as_deltas_and_whole(stack: Stack) -> None:
    stack.engine.script = frames(
        TextDelta("Looking."),
        ToolUseStart("call_1", "look"),
        ToolInputDelta('{"where"'),
        ToolInputDelta(': "here"}'),
        ToolUseStart("call_2", "look"),
        Finished(reason="tool_use", output_tokens=9),
    )
    [choice] = chat(stack, tools=[LOOK]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Looking."
    calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert calls == [("call_1", "look", '{"where": "here"}'), ("call_2", "look", "")]
    client = stack.openai()
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[LOOK]) as events:
        for _ in events:
            pass
        [streamed] = events.get_final_completion().choices
    assert [(c.id, c.function.arguments) for c in streamed.message.tool_calls or []] == [
        ("call_1", '{"where": "here"}'),
        ("call_2", ""),
    ]


def test_an_answers_calls_can_be_sent_back_with_their_results(stack: Stack) -> None:
    stack.engine.script = frames(
        ThinkingDelta("I shall look."),
        ToolUseStart("call_1", "look"),
        ToolInputDelta('{"where": "here"}'),
        Finished(reason="tool_use", output_tokens=9, thinking_tokens=4),
    )
    answer = chat(stack, tools=[LOOK], reasoning_effort="low")
    assert stack.engine.requests[-1].thinking
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    message = answer.choices[0].message
    assert message.content is None
    assert message.model_extra == {
        "reasoning": "I shall look.",
        "reasoning_content": "I shall look.",
    }
    history = [
        *MESSAGES,
        message.model_dump(),
        {"role": "tool", "tool_call_id": "call_1", "content": "A hold."},
        {"role": "user", "content": "Go on."},
    ]
    chat(stack, messages=history, tools=[LOOK])
    sent = stack.engine.requests[-1].prompt.messages
    assert [m.role for m in sent] == ["user", "assistant", "user"]
    assert sent[1].parts[-1] == ToolUsePart("call_1", "look", {"where": "here"})
    assert sent[2].parts == [ToolResultPart("call_1", "A hold."), TextPart("Go on.")]


@pytest.mark.parametrize(
    "choice, expected",
    [
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("any")),
        ({"type": "function", "function": {"name": "look"}}, ToolChoice("tool", "look")),
    ],
)
def test_tool_choices(stack: Stack, choice: Any, expected: ToolChoice) -> None:
    chat(stack, tools=[LOOK], tool_choice=choice)
    assert stack.engine.requests[-1].tool_choice == expected
    chat(stack, tools=[LOOK], tool_choice="auto", parallel_tool_calls=False)
    assert stack.engine.requests[-1].tool_choice == ToolChoice("auto", parallel=False)


def test_choices_are_kept_apart(stack: Stack) -> None:
    stack.engine.script = frames(
        TextDelta("one", choice=0),
        TextDelta("two", choice=1),
        TextDelta(" more", choice=0),
        Finished(reason="stop_sequence", stop_sequence="END", output_tokens=4, choice=1),
        Finished(reason="length", output_tokens=5, choice=0),
    )
    first, second = chat(stack, n=2, stop="END").choices
    assert (first.index, first.message.content, first.finish_reason) == (0, "one more", "length")
    assert (second.index, second.message.content, second.finish_reason) == (1, "two", "stop")
    assert second.model_extra["stop_reason"] == "END"
    sampling = stack.engine.requests[-1].sampling
    assert (sampling.num_choices, sampling.stop_sequences) == (2, ["END"])


def test_sampling_fields_reach_the_engine(stack: Stack) -> None:
    chat(
        stack,
        max_completion_tokens=7,
        temperature=2,
        top_p=0.5,
        seed=3,
        stop=["a", "b"],
        extra_body={"top_k": -1, "ignore_eos": True, "min_tokens": 7, "repetition_penalty": 1.0},
    )
    sampling = stack.engine.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 2.0, 0.5)
    assert (sampling.seed, sampling.top_k, sampling.ignore_eos) == (3, 0, True)
    assert sampling.stop_sequences == ["a", "b"]
    chat(stack)
    assert stack.engine.requests[-1].sampling.max_tokens is None


def test_models_are_listed_for_both_sdks(stack: Stack) -> None:
    ids = [model.id for model in stack.openai().models.list()]
    assert ids == [model.id for model in stack.sdk().models.list()]
    assert MODEL in ids
    model = stack.openai().models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "holdfast")
    assert stack.sdk().models.retrieve(MODEL).type == "model"


MARKED_PLACES = [
    pytest.param({"cache_control": {**EPHEMERAL, "ttl": "1h"}}, [Breakpoint(4, "1h")], id="top"),
    pytest.param({"prompt_cache_options": {}}, [Breakpoint(4, "30m")], id="native-implicit"),
    pytest.param({"prompt_cache_options": {"mode": "explicit"}}, [], id="native-explicit"),
    pytest.param({"tools": [{**LOOK, "cache_control": EPHEMERAL}]}, [Breakpoint(0)], id="tool"),
    pytest.param(
        {"tools": [{**LOOK, "function": {**LOOK["function"], "cache_control": EPHEMERAL}}]},
        [Breakpoint(0)],
        id="function",
    ),
]


@pytest.mark.parametrize("changes, expected", MARKED_PLACES)
def test_markers_count_wherever_clients_put_them(
    stack: Stack, changes: dict[str, Any], expected: list[Breakpoint]
) -> None:
    """Segments: the tool, one system block, three parts."""
    body = {
        "tools": [LOOK],
        "messages": [
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b", "c")]},
        ],
        **changes,
    }
    chat(stack, messages=body.pop("messages"), tools=body.pop("tools"), extra_body=body)
    assert stack.engine.requests[-1].breakpoints == expected


def test_a_messages_marker_stands_on_its_last_part(stack: Stack) -> None:
    messages = [
        {"role": "system", "content": "Rules.", "cache_control": {**EPHEMERAL, "ttl": "1h"}},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "cache_control": EPHEMERAL,
        },
    ]
    chat(stack, messages=messages)
    assert stack.engine.requests[-1].breakpoints == [Breakpoint(0, "1h"), Breakpoint(2, "5m")]


def test_marker_rules_are_those_of_the_other_dialect(stack: Stack) -> None:
    part = {"type": "text", "text": "x", "cache_control": EPHEMERAL}
    error = refused(stack, messages=[{"role": "user", "content": [part] * 5}])
    assert error["message"] == (
        "A maximum of 4 blocks with cache_control may be provided. Found 5."
    )
    long = {**part, "cache_control": {**EPHEMERAL, "ttl": "1h"}}
    error = refused(stack, messages=[{"role": "user", "content": [part, long]}])
    assert error["param"] == "messages[0].content[1].cache_control.ttl"


def test_what_is_wrong_around_a_turn_has_openais_envelope(stack: Stack) -> None:
    def error(reply: httpx.Response, status: int) -> dict[str, Any]:
        assert reply.status_code == status
        assert reply.headers["x-request-id"].startswith("req_")
        detail: dict[str, Any] = reply.json()["error"]
        assert set(detail) == {"message", "type", "param", "code", "request_id"}
        assert detail["request_id"] == reply.headers["x-request-id"]
        return detail

    body = {"model": MODEL, "messages": MESSAGES}
    url = f"{stack.url}/v1/chat/completions"
    assert "API key" in error(httpx.post(url, json=body, timeout=120), 401)["message"]
    with pytest.raises(openai.AuthenticationError):
        stack.openai("wrong").models.list()
    with stack.http() as http:
        assert error(http.get("/v1/chat/completions"), 405)["type"] == "invalid_request_error"
        error(http.get("/v1/chat/nowhere"), 404)
        error(http.post("/v1/completions", content=b"x"), 415)
        unknown = error(http.post("/v1/chat/completions", json={**body, "model": "no"}), 404)
    assert (unknown["param"], unknown["code"]) == ("model", "model_not_found")


def test_the_engines_refusals_have_openais_codes(stack: Stack) -> None:
    stack.engine.refusal = ErrorReply("prompt_too_long", "prompt is too long: 9 tokens > 8 maximum")
    error = refused(stack)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 8 tokens" in error["message"]
    stack.engine.refusal = ErrorReply("overloaded", "full")
    with pytest.raises(openai.InternalServerError) as caught:
        chat(stack)
    assert caught.value.status_code == 503
    assert caught.value.code == "overloaded"


def test_a_failure_in_the_midst_is_the_streams_last_event(stack: Stack) -> None:
    def script(request: GenerateRequest, _: InputUsage) -> list[Frame | float | bytes]:
        return [TextDelta("Hel"), Failed(code="internal", message="secret detail")]

    stack.engine.script = script
    texts = []
    with pytest.raises(openai.APIError) as caught:
        for chunk in chat(stack, stream=True):
            texts.append(chunk.choices[0].delta.content)
    assert texts == ["", "Hel"]
    assert "secret" not in str(caught.value)
    with stack.http() as http:
        body = {"model": MODEL, "messages": MESSAGES, "stream": True}
        assert "[DONE]" not in http.post("/v1/chat/completions", json=body).text
