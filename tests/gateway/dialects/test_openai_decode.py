"""Bodies of the OpenAI dialect: what is accepted, and what is refused by name."""

from typing import Any

import pytest

from gateway.base.errors import InvalidRequest
from gateway.dialects.errors import body_of
from gateway.prompt.ask import Ask
from tests.gateway.bodies import lowered_chat

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "found"}
TOOL = {"type": "function", "function": {"name": "f"}}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **changes}


def ask(request: dict[str, Any]) -> Ask:
    return lowered_chat(request)


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
    assert ask(body(**changes)).plan.prompt.num_segments >= 1


SCHEMA = {"type": "json_schema"}
BROKEN_CALL = {**CALL, "function": {"name": "f", "arguments": "["}}
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
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"cache_salt": "x"}, "cache_salt"),
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
    ({"messages": [{**USER, "cache_contol": {}}]}, "messages[0].cache_contol"),
    (
        {"messages": [{**USER, "content": "", "cache_control": {"type": "ephemeral"}}]},
        "messages[0].content",
    ),
    ({"messages": [USER, {"role": "assistant"}, USER]}, "messages[1].content"),
    ({"messages": [USER, RESULT]}, "messages[1].tool_call_id"),
    ({"messages": [USER, CALLS, USER]}, "messages[2]"),
    ({"messages": [USER, CALLS, RESULT, RESULT]}, "messages[3].tool_call_id"),
    (
        {"messages": [USER, {**CALLS, "tool_calls": [BROKEN_CALL]}, RESULT]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"tools": [TOOL] * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
]


@pytest.mark.parametrize("changes, param", REFUSED)
def test_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(body(**changes))
    detail = body_of(caught.value, "req_x", "openai").error
    assert detail.param == param
    assert detail.type == "invalid_request_error"


def test_a_clients_own_note_in_a_message_is_left_out() -> None:
    """Copilot CLI sends such a one in a session that goes on, also beside tools of the vendor's."""
    noted = {**USER, "__copilotMessageSource": {"kind": "user"}}
    search = {"type": "web_search"}
    messages = [noted, CALLS, RESULT, {"role": "assistant", "content": "ok"}, noted]
    for tools in ([TOOL], [TOOL, search]):
        plain = ask(body(messages=[USER, *messages[1:4], USER], tools=tools))
        assert ask(body(messages=messages, tools=tools)).plan.prompt == plain.plan.prompt
    with pytest.raises(InvalidRequest, match="Unrecognized") as refused:
        ask(body(messages=[{**noted, "copilot": 1}]))
    assert refused.value.param == "messages[0].copilot"


def test_no_probability_mass_is_greedy() -> None:
    sampling = ask(body(top_p=0, temperature=1.5)).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, None)


def test_values_are_not_echoed_at_length() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(body(messages=[{"role": "x" * 5000, "content": "x"}]))
    assert len(str(caught.value)) < 300
