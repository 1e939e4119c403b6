"""Chat Completions and Completions through the official SDK, over a scripted engine."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from engine import protocol
from gateway.base.errors import InvalidRequest
from gateway.dialects.errors import body_of
from gateway.prompt.ask import Ask
from tests.gateway.bodies import lowered_chat, text
from tests.gateway.conftest import Stack, stacked
from tests.gateway.openai_bodies import (
    EPHEMERAL,
    LONG_TEXT,
    LOOK,
    MESSAGES,
    MODEL,
    chat,
    frames,
    refused,
)
from tests.gateway.scripted_engine import ScriptedEngine

LONG = {**EPHEMERAL, "ttl": "1h"}
CALL_FRAMES = (
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
    stack.engine.script = frames(protocol.TextDelta("Looking."), *CALL_FRAMES, second, end)
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
    stack.engine.script = frames(protocol.ThinkingDelta("I shall look."), *CALL_FRAMES, end)
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
    messages = stack.engine.requests[-1].prompt.messages
    assert [m.role for m in messages] == ["user", "assistant", "user"]
    assert messages[1].parts[-1] == protocol.ToolUsePart("call_1", "look", {"where": "here"})
    assert messages[2].parts == [
        protocol.ToolResultPart("call_1", "A hold."),
        protocol.TextPart("Go on."),
    ]


@pytest.mark.parametrize(
    "choice, mode, name",
    [
        ("auto", "auto", None),
        ("none", "none", None),
        ("required", "any", None),
        ({"type": "function", "function": {"name": "look"}}, "tool", "look"),
    ],
)
def test_tool_choices(stack: Stack, choice: Any, mode: Any, name: str | None) -> None:
    chat(stack, tools=[LOOK], tool_choice=choice, parallel_tool_calls=False)
    assert stack.engine.requests[-1].tool_choice == protocol.ToolChoice(mode, name, parallel=False)


PATCH: Any = {"type": "function", "function": {"name": "patch", "parameters": {}}}


def listed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (listed("auto", "look"), protocol.ToolChoice("auto", names=["look"])),
        (listed("auto", "look", "patch"), protocol.ToolChoice("auto")),
        (listed("auto"), protocol.ToolChoice("none")),
        (listed("required", "look"), protocol.ToolChoice("any", names=["look"])),
    ],
)
def test_a_choice_of_tools_leaves_all_in_the_prompt(
    stack: Stack, choice: Any, expected: protocol.ToolChoice
) -> None:
    """A prefix that was cached with all tools is read under any choice."""
    answer = chat(stack, tools=[LOOK, PATCH], tool_choice=choice)
    request = stack.engine.requests[-1]
    assert request.tool_choice == expected
    assert [tool.name for tool in request.prompt.tools] == ["look", "patch"]
    assert "ignored" not in answer.model_extra["holdfast"]


def test_a_model_that_calls_freely_is_told(tmp_path: Path) -> None:
    with stacked(tmp_path, ScriptedEngine(capabilities=("tools",))) as stack:
        answer = chat(stack, tools=[LOOK, PATCH], tool_choice=listed("auto", "look"))
        assert stack.engine.requests[-1].tool_choice == protocol.ToolChoice("auto")
        (ignored,) = answer.model_extra["holdfast"]["ignored"]
        assert ignored["path"] == "tool_choice"


def test_an_engine_that_keeps_no_salts_apart_is_asked_for_none(tmp_path: Path) -> None:
    with stacked(tmp_path, ScriptedEngine(capabilities=("tools",))) as stack:
        error = refused(stack, extra_body={"cache_salt": "one"})
        assert "cache_salt: not supported by this model's engine" in error["message"]
        assert not stack.engine.requests


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
    options = {"temperature": 2, "top_p": 0.5, "seed": 3, "presence_penalty": 1.5}
    extra_fields: dict[str, Any] = {
        "top_k": 20,
        "min_p": 0.05,
        "min_tokens": 2,
        "repetition_penalty": 1.05,
    }
    extra_fields |= {"stop_token_ids": [3], "allowed_token_ids": [3, 4]}
    chat(stack, **options, max_completion_tokens=7, stop=["a", "b"], extra_body=extra_fields)
    sampling = stack.engine.requests[-1].sampling
    for name, value in {
        **options,
        **extra_fields,
        "max_tokens": 7,
        "stop_sequences": ["a", "b"],
    }.items():
        assert getattr(sampling, name) == value
    chat(stack, extra_body={"top_k": -1, "ignore_eos": True, "min_tokens": 7})
    sampling = stack.engine.requests[-1].sampling
    # Where nothing ends a turn early there is nothing to hold back.
    assert (sampling.top_k, sampling.ignore_eos, sampling.min_tokens) == (0, True, 0)
    assert sampling.max_tokens is None


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


def test_usage_says_for_how_long_at_least_writes_are_held(stack: Stack) -> None:
    """As Responses does: the split is there where every write is held for 30 minutes or more."""
    for options, is_split in (({}, True), (None, False)):
        wish = {} if options is None else {"prompt_cache_options": options}
        user_message = {"role": "user", "content": f"{is_split}: {LONG_TEXT}"}
        body = {"model": MODEL, "messages": [user_message], **wish}
        details = stack.post("/v1/chat/completions", json=body).json()["usage"][
            "prompt_tokens_details"
        ]
        written_tokens = details["cache_write_tokens"]
        assert written_tokens > 0
        split = {"ttl_30m_tokens": written_tokens, "ttl_12h_tokens": 0}
        assert details.get("cache_write_tokens_details") == (split if is_split else None)


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


@pytest.mark.parametrize(
    "field, value",
    [("echo", True), ("logprobs", 1), ("suffix", "x"), ("best_of", 2), ("prompt", [[1, 2]])],
)
def test_what_a_completion_cannot_do_is_named(stack: Stack, field: str, value: Any) -> None:
    reply = stack.post("/v1/completions", json={"model": MODEL, "prompt": "x", field: value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "found"}
TOOL = {"type": "function", "function": {"name": "f"}}


def ask(**changes: Any) -> Ask:
    return lowered_chat({"model": "m", "messages": [USER], **changes})


def test_an_engine_is_sent_no_field_that_it_may_not_know() -> None:
    neutral = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "min_tokens": 0, "n": 1}
    turn = ask(**neutral, temperature=0.5, max_tokens=5)
    assert not turn.sampling.needs
    fields = msgspec.json.decode(msgspec.json.encode(turn.generate_request("r", 0.0, [])))
    assert fields["sampling"] == {"max_tokens": 5, "temperature": 0.5}
    able = turn.generate_request("r", 0.0, ["min_p", "penalties"]).sampling
    assert (able.min_p, able.presence_penalty, able.repetition_penalty) == (0, 0, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"user": "u", "store": True, "prompt_cache_retention": "24h"},
        {"logprobs": False, "logit_bias": {}, "presence_penalty": 0},
        {"response_format": {"type": "text"}, "n": 1, "best_of": 1},
        {"temperature": None, "tools": None, "functions": None},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"seed": -(2**63), "temperature": 0},
        {"tool_choice": "none"},
        {"messages": [USER, CALLS, RESULT]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [USER, {"role": "system", "content": "Be short."}]},
    ],
)
def test_accepted(changes: dict[str, Any]) -> None:
    assert ask(**changes).plan.prompt.num_segments >= 1


SCHEMA = {"type": "json_schema"}
REFUSED = [
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": SCHEMA}, "response_format.json_schema"),
    (
        {"response_format": {**SCHEMA, "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    ({"response_format": {"type": "json_object"}, "max_tokens": 0}, "response_format"),
    ({"tools": [TOOL], "tool_choice": "required", "max_tokens": 0}, "tool_choice"),
    ({"logit_bias": {"word": -100}}, "logit_bias"),
    ({"logit_bias": {"-1": -100}}, "logit_bias"),
    ({"logit_bias": {"1": -101}}, "logit_bias[...]"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.5}, "min_p"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1], "response_format": {"type": "json_object"}}, "allowed_token_ids"),
    ({"allowed_token_ids": [1], "tools": [TOOL], "tool_choice": "required"}, "allowed_token_ids"),
    ({"min_tokens": 5, "response_format": {"type": "json_object"}}, "min_tokens"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
    ({"guided_regex": "a", "structured_outputs": {"json": {}}}, "guided_regex"),
    ({"guided_choice": ["a"], "max_tokens": 0}, "response_format"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 2, "max_tokens": 0}, "n"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"prompt_cache_options": {"ttl": "24h"}}, "prompt_cache_options.ttl"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        "messages[0].content[0].type",
    ),
    ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].function"),
    ({"messages": [{**USER, "id": "x"}], "cache_contol": {}}, "cache_contol"),
    (
        {"messages": [{**USER, "content": "", "cache_control": {"type": "ephemeral"}}]},
        "messages[0].content",
    ),
    ({"messages": [USER, {"role": "assistant"}, USER]}, "messages[1].content"),
    ({"messages": [USER, RESULT]}, "messages[1].tool_call_id"),
    ({"messages": [USER, CALLS, USER]}, "messages[2]"),
    ({"messages": [USER, CALLS, RESULT, RESULT]}, "messages[3].tool_call_id"),
    ({"tools": [TOOL] * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
]


@pytest.mark.parametrize("changes, param", REFUSED)
def test_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(**changes)
    detail = body_of(caught.value, "req_x", "openai").error
    assert detail.param == param
    assert detail.type == "invalid_request_error"


def test_a_clients_own_note_in_a_message_is_left_out() -> None:
    """Copilot CLI sends such a one in a session that goes on, also beside tools of the vendor's."""
    noted = {**USER, "__copilotMessageSource": {"kind": "user"}}
    search = {"type": "web_search"}
    messages = [noted, CALLS, RESULT, {"role": "assistant", "content": "ok"}, noted]
    for tools in ([TOOL], [TOOL, search]):
        plain = ask(messages=[USER, *messages[1:4], USER], tools=tools)
        assert ask(messages=messages, tools=tools).plan.prompt == plain.plan.prompt
    with pytest.raises(InvalidRequest, match="Unrecognized") as refused:
        ask(messages=[noted], copilot=1)
    assert refused.value.param == "copilot"


def test_what_binds_a_text_has_vllms_names_too() -> None:
    schema = {"type": "object"}
    for name, value, pattern in (
        ("json", schema, None),
        ("json_object", True, None),
        ("regex", "[ab]/c", "[ab]/c"),
        ("choice", ["yes", "n.o\n"], r"(yes|n\x{2e}o\x{a})"),
    ):
        for constraint in ({f"guided_{name}": value}, {"structured_outputs": {name: value}}):
            request = ask(**constraint)
            assert request.output_pattern == pattern
            assert request.output_schema == (None if pattern else schema)
    assert ask(response_format={"type": "json_object"}).output_schema == schema


def test_values_are_not_echoed_at_length() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(messages=[{"role": "x" * 5000, "content": "x"}])
    assert len(str(caught.value)) < 300
