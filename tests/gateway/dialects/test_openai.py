"""Chat Completions and Completions through the official SDK, over a scripted engine."""

import json
from typing import Any

import httpx
import openai
import pytest

from engine import protocol
from tests.gateway.bodies import text
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import EPHEMERAL, LOOK, MESSAGES, MODEL, chat, frames, refused

LONG = {**EPHEMERAL, "ttl": "1h"}
CALLS = (
    protocol.ToolUseStart("call_1", "look"),
    protocol.ToolInputDelta('{"where"'),
    protocol.ToolInputDelta(': "here"}'),
)


def test_an_answer_has_text_reason_and_inclusive_usage(stack: Stack) -> None:
    answer = chat(stack, user="u", metadata={"a": "b"}, store=False, service_tier="auto")
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello there")
    assert choice.finish_reason == "stop"
    prompt_tokens = len("What is a lease?") // 4 + 1 + 4
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, 2)
    assert usage.total_tokens == prompt_tokens + 2
    (automatic,) = answer.model_extra["holdfast"]["breakpoints"]
    assert automatic["path"] == "messages[0].content"
    assert answer.model_extra["holdfast"]["auto_cache"] == {"mode": "conversation", "ttl": "5m"}


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_has_usage_only_where_it_was_asked_for(stack: Stack, include_usage: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "stream": True}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    lines = stack.post("/v1/chat/completions", json=body).text.split("\n\n")
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
    end = protocol.Finished(reason="tool_use", output_tokens=9)
    second = protocol.ToolUseStart("call_2", "look")
    stack.engine.script = frames(protocol.TextDelta("Looking."), *CALLS, second, end)
    [choice] = chat(stack, tools=[LOOK]).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Looking.")
    calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert calls == [("call_1", "look", '{"where": "here"}'), ("call_2", "look", "")]
    client = stack.openai()
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[LOOK]) as events:
        [streamed] = events.get_final_completion().choices
    assert [(c.id, c.function.arguments) for c in streamed.message.tool_calls or []] == [
        ("call_1", '{"where": "here"}'),
        ("call_2", ""),
    ]


def test_an_answers_calls_can_be_sent_back_with_their_results(stack: Stack) -> None:
    end = protocol.Finished(reason="tool_use", output_tokens=9, thinking_tokens=4)
    stack.engine.script = frames(protocol.ThinkingDelta("I shall look."), *CALLS, end)
    answer = chat(stack, tools=[LOOK], reasoning_effort="low")
    assert stack.engine.requests[-1].thinking
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    message = answer.choices[0].message
    assert message.content is None
    thought = "I shall look."
    assert message.model_extra == {"reasoning": thought, "reasoning_content": thought}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "A hold."}
    go_on = {"role": "user", "content": "Go on."}
    chat(stack, messages=[*MESSAGES, message.model_dump(), result, go_on], tools=[LOOK])
    sent = stack.engine.requests[-1].prompt.messages
    assert [m.role for m in sent] == ["user", "assistant", "user"]
    assert sent[1].parts[-1] == protocol.ToolUsePart("call_1", "look", {"where": "here"})
    assert sent[2].parts == [
        protocol.ToolResultPart("call_1", "A hold."),
        protocol.TextPart("Go on."),
    ]


@pytest.mark.parametrize(
    "choice, expected",
    [
        ("auto", protocol.ToolChoice("auto", parallel=False)),
        ("none", protocol.ToolChoice("none", parallel=False)),
        ("required", protocol.ToolChoice("any", parallel=False)),
        (
            {"type": "function", "function": {"name": "look"}},
            protocol.ToolChoice("tool", "look", parallel=False),
        ),
    ],
)
def test_tool_choices(stack: Stack, choice: Any, expected: protocol.ToolChoice) -> None:
    chat(stack, tools=[LOOK], tool_choice=choice, parallel_tool_calls=False)
    assert stack.engine.requests[-1].tool_choice == expected


def test_choices_are_kept_apart(stack: Stack) -> None:
    stack.engine.script = frames(
        protocol.TextDelta("one", choice=0),
        protocol.TextDelta("two", choice=1),
        protocol.TextDelta(" more", choice=0),
        protocol.Finished(reason="stop_sequence", stop_sequence="END", output_tokens=4, choice=1),
        protocol.Finished(reason="length", output_tokens=5, choice=0),
    )
    first, second = chat(stack, n=2, stop="END").choices
    assert (first.index, first.message.content, first.finish_reason) == (0, "one more", "length")
    assert (second.index, second.message.content, second.finish_reason) == (1, "two", "stop")
    assert second.model_extra["stop_reason"] == "END"
    sampling = stack.engine.requests[-1].sampling
    assert (sampling.num_choices, sampling.stop_sequences) == (2, ["END"])


def test_sampling_fields_reach_the_engine(stack: Stack) -> None:
    more = {"top_k": -1, "ignore_eos": True, "min_tokens": 7, "repetition_penalty": 1.0}
    asked = {"max_completion_tokens": 7, "temperature": 2, "top_p": 0.5, "seed": 3}
    chat(stack, **asked, stop=["a", "b"], extra_body=more)
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


RULES = {"role": "developer", "content": "Rules."}
PARTS = {"role": "user", "content": [text("a"), text("b"), text("c")]}
FUNCTION = {**LOOK, "function": {**LOOK["function"], "cache_control": EPHEMERAL}}


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"cache_control": LONG}, [protocol.Breakpoint(4, "1h")]),
        ({"prompt_cache_options": {}}, [protocol.Breakpoint(4, "30m")]),
        ({"prompt_cache_options": {"mode": "explicit"}}, []),
        ({"tools": [{**LOOK, "cache_control": EPHEMERAL}]}, [protocol.Breakpoint(0)]),
        ({"tools": [FUNCTION]}, [protocol.Breakpoint(0)]),
        (
            {"messages": [{**RULES, "cache_control": LONG}, {**PARTS, "cache_control": EPHEMERAL}]},
            [protocol.Breakpoint(1, "1h"), protocol.Breakpoint(4, "5m")],
        ),
    ],
)
def test_markers_count_wherever_clients_put_them(
    stack: Stack, changes: dict[str, Any], expected: list[protocol.Breakpoint]
) -> None:
    """Segments: the tool, one system block, three parts."""
    body = {"model": MODEL, "tools": [LOOK], "messages": [RULES, PARTS], **changes}
    assert stack.post("/v1/chat/completions", json=body).status_code == 200
    assert stack.engine.requests[-1].breakpoints == expected


def test_marker_rules_are_those_of_the_other_dialect(stack: Stack) -> None:
    part = text("x", EPHEMERAL)
    error = refused(stack, messages=[{"role": "user", "content": [part] * 5}])
    assert error["message"] == (
        "A maximum of 4 blocks with cache_control may be provided. Found 5."
    )
    error = refused(stack, messages=[{"role": "user", "content": [part, text("x", LONG)]}])
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
    stack.engine.refusal = protocol.ErrorReply(
        "prompt_too_long", "prompt is too long: 9 tokens > 8 maximum"
    )
    error = refused(stack)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 8 tokens" in error["message"]
    stack.engine.refusal = protocol.ErrorReply("overloaded", "full")
    with pytest.raises(openai.InternalServerError) as caught:
        chat(stack)
    assert (caught.value.status_code, caught.value.code) == (503, "overloaded")


def test_a_completion_is_a_raw_prompt(stack: Stack) -> None:
    create: Any = stack.openai().completions.create
    answer = create(model=MODEL, prompt=["Once upon"], stop=None)
    assert (answer.object, answer.choices[0].text) == ("text_completion", "Hello there")
    assert answer.usage.completion_tokens == 2
    request = stack.engine.requests[-1]
    assert (request.prompt.text, request.prompt.messages) == ("Once upon", [])
    assert request.sampling.max_tokens == 16
    options = {"include_usage": True}
    *chunks, last = create(model=MODEL, prompt="Once upon", stream=True, stream_options=options)
    assert "".join(c.choices[0].text for c in chunks) == "Hello there"
    assert (last.choices, last.usage) == ([], answer.usage)


@pytest.mark.parametrize(
    "field, value",
    [("echo", True), ("logprobs", 1), ("suffix", "x"), ("best_of", 2), ("prompt", [[1, 2]])],
)
def test_what_a_completion_cannot_do_is_named(stack: Stack, field: str, value: Any) -> None:
    reply = stack.post("/v1/completions", json={"model": MODEL, "prompt": "x", field: value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
