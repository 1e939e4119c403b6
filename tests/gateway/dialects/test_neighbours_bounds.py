"""What a request may have of everything, and what an answer may gather or repeat of it."""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.base.bounds import DEFAULT_BOUNDS as BOUNDS
from gateway.base.bounds import RequestBounds
from gateway.base.errors import GatewayError, InvalidRequest, TooLarge
from gateway.dialects.anthropic.decode import decode_count_tokens, decode_messages
from gateway.dialects.bodies import check_values
from gateway.dialects.errors import body_of
from gateway.dialects.gemini.request import decode_generate
from gateway.dialects.openai.request import decode_chat, decode_completion
from gateway.dialects.responses.request import LOGPROBS, decode_responses
from gateway.dialects.responses.response import MAX_ECHO_BYTES
from tests.gateway.bodies import body, text, tool
from tests.gateway.conftest import Stack
from tests.gateway.responses_bodies import asked, refused

SMALL = RequestBounds(
    max_json_values=120,
    max_blocks=10,
    max_tools=3,
    max_schema_bytes=256,
    max_schema_depth=8,
    max_schema_values=30,
    max_schema_properties=5,
    max_stop_sequences=3,
    max_stop_characters=8,
    max_choices=2,
    max_name_characters=64,
    max_metadata_bytes=256,
)
LONG = "x" * 65
HI = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": LONG, "name": "n", "input": {}}
DEEP: dict[str, Any] = {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": 1}}}}}}}}
WIDE = {"type": "object", "properties": {f"p{n}": {} for n in range(6)}}
MANY = {"type": "object", "enum": list(range(40))}
VERBOSE = {"type": "object", "description": "x" * 300}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def schema(value: Any) -> dict[str, Any]:
    return {"tools": [{**tool(), "input_schema": value}]}


def result(*blocks: Any, of: str = "t") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": of, "content": list(blocks)}


DOCUMENT = {"type": "document", "source": {"type": "content", "content": [text()] * 11}}
CALLING = {"role": "assistant", "content": [CALL]}
BLOCKS = "messages: more than 10 content blocks"
FORM = {"format": {"type": "json_schema", "schema": WIDE}}
CLEARED = {"type": "clear_thinking_20251015"}
NAME = "String should have at most 64 characters"


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (user(*[text()] * 11), BLOCKS),
        ({"messages": [HI] * 11}, BLOCKS),
        ({"system": [text()] * 11}, BLOCKS),
        (user(result(*[text()] * 10)), BLOCKS),
        (user(result(DOCUMENT)), BLOCKS),
        ({"tools": [tool(f"t{n}") for n in range(4)]}, "tools: List should have at most 3 items"),
        ({"tools": [tool(LONG)]}, f"tools.0.name: {NAME}"),
        (schema(DEEP), "tools.0.input_schema: nested more than 8 levels deep"),
        (schema(WIDE), "tools.0.input_schema: more than 5 properties"),
        (schema(MANY), "tools.0.input_schema: more than 30 values"),
        (schema(VERBOSE), "tools.0.input_schema: longer than 256 bytes"),
        ({"output_config": FORM}, "output_config.format.schema: more than 5 properties"),
        ({"stop_sequences": list("abcd")}, "stop_sequences: List should have at most 3 items"),
        ({"stop_sequences": ["a", "x" * 9]}, "stop_sequences.1: String should have at most 8"),
        ({"metadata": {"user_id": "x" * 300}}, "metadata: should have at most 256 bytes"),
        ({"model": LONG}, f"model: {NAME}"),
        ({"messages": [HI, CALLING]}, f"messages.1.content.0.tool_use.id: {NAME}"),
        (user(result(of=LONG)), f"messages.0.content.0.tool_result.tool_use_id: {NAME}"),
        (
            {"tools": [tool()], "tool_choice": {"type": "tool", "name": LONG}},
            f"tool_choice.name: {NAME}",
        ),
        (
            {"context_management": {"edits": [CLEARED] * 17}},
            "context_management.edits: List should have at most 16 items",
        ),
    ],
)
def test_messages_are_refused_beyond_each_bound(changes: dict[str, Any], refusal: str) -> None:
    request = msgspec.json.encode(body(**changes))
    with pytest.raises(InvalidRequest, match=re.escape(refusal)):
        decode_messages(request, SMALL)


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def calling(call_id: str = "c", name: str = "f") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": WIDE}}


@pytest.mark.parametrize(
    ("changes", "field", "bound"),
    [
        (user(*[text()] * 11), "messages", "more than 10 content parts"),
        ({"messages": [HI] * 11}, "messages", "more than 10 content"),
        ({"tools": [function(name=f"f{n}") for n in range(4)]}, "tools", "at most 3 items"),
        ({"tools": [function(name=LONG)]}, "tools[0].function.name", "at most 64 characters"),
        ({"tools": [function(parameters=WIDE)]}, "tools[0].function.parameters", "5 properties"),
        ({"tools": [function(parameters=DEEP)]}, "tools[0].function.parameters", "8 levels"),
        ({"response_format": FORMAT}, "response_format.json_schema.schema", "5 properties"),
        ({"stop": ["a"] * 5}, "stop", "<= 4"),
        ({"stop": "x" * 9}, "stop", "at most 8 characters"),
        ({"n": 3}, "n", "at most 2"),
        ({"metadata": {"k": "x" * 300}}, "metadata", "at most 256 bytes"),
        ({"model": LONG}, "model", "at most 64 characters"),
        (calling(LONG), "messages[0].tool_calls[0].id", "at most 64 characters"),
        (calling(name=LONG), "messages[0].tool_calls[0].function.name", "at most 64"),
    ],
)
def test_chat_completions_are_refused_beyond_each_bound(
    changes: dict[str, Any], field: str, bound: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_chat(msgspec.json.encode({"model": "m", "messages": [HI], **changes}), SMALL)
    error = body_of(refused.value, "req_x", "openai").error
    assert error.param == field and bound in error.message


@pytest.mark.parametrize(
    "decode", [decode_messages, decode_count_tokens, decode_chat, decode_completion]
)
@pytest.mark.parametrize("space", [b"", b" "])
def test_json_values_are_counted_before_they_are_made(
    decode: Callable[[bytes, RequestBounds], object], space: bytes
) -> None:
    pairs = b",".join(b'"k%d":%b"v"' % (n, space) for n in range(121))
    with pytest.raises(TooLarge, match="more than 120 JSON values"):
        decode(b"{" + pairs + b"}", SMALL)


@pytest.mark.parametrize(
    "value", [",[{" * 400, '"' * 400, "\\" * 401, '","' * 300, '\\","', '":"' * 30, "é,\n," * 200]
)
def test_what_is_inside_a_string_is_no_value(value: str) -> None:
    check_values(msgspec.json.encode({"a": [value, value * 3]}), 4, 1)
    with pytest.raises(TooLarge):
        check_values(msgspec.json.encode([value] + [1] * 400), 400, 1)


@pytest.mark.parametrize("broken", [b'"' + b"\\" * 999, b'["' + b"a" * 999, b'"\\', b'\\"' * 500])
def test_a_body_that_is_no_json_is_counted_to_its_end(broken: bytes) -> None:
    check_values(broken, 2, 1)


def nested(num_keys: int) -> dict[str, object]:
    """Objects in objects, of which one has so many keys."""
    return {"a": [{"b": {f"k{n}": {"x": {}} for n in range(num_keys)}}], "c": 1}


@pytest.mark.parametrize("noise", ["", "{:" * 400, '"}' * 400, "\\{"])
def test_the_keys_of_one_object_are_counted_wherever_it_stands(noise: str) -> None:
    """Objects beside it, inside it and in strings do not count for it."""
    most = 500
    body = {"noise": noise * 100, "many": [nested(2) for _ in range(most)], "it": nested(most)}
    check_values(msgspec.json.encode(body), 1_000_000, most)
    with pytest.raises(TooLarge, match="more than 500 keys"):
        check_values(msgspec.json.encode(body | {"it": nested(most + 1)}), 1_000_000, most)


@pytest.mark.parametrize("size", [2000, 70_000, 600_000])
def test_the_input_of_a_call_has_a_bound_of_bytes_and_of_keys(size: int) -> None:
    bounds = RequestBounds(max_call_bytes=size, max_object_keys=size // 20)
    fits = {"a": "b" * (size - 8)}
    long = {"a": "b" * (size - 7)}
    wide = {f"k{n}": n for n in range(bounds.max_object_keys + 1)}
    decode_messages(msgspec.json.encode(called(fits)), bounds)
    decode_chat(msgspec.json.encode(called_function(fits)), bounds)
    with pytest.raises(InvalidRequest, match=f"tool_use.input: may have at most {size} bytes"):
        decode_messages(msgspec.json.encode(called(long)), bounds)
    with pytest.raises(InvalidRequest, match=f"arguments: may have at most {size} bytes"):
        decode_chat(msgspec.json.encode(called_function(long)), bounds)
    for decode, item in ((decode_messages, called), (decode_chat, called_function)):
        with pytest.raises(TooLarge, match="keys"):
            decode(msgspec.json.encode(item(wide)), bounds)


def called(value: dict[str, object]) -> dict[str, object]:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": value}
    return body(
        messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}]
    )


def called_function(value: dict[str, object]) -> dict[str, object]:
    function = {"name": "f", "arguments": msgspec.json.encode(value).decode()}
    call = {"type": "function", "id": "t1", "function": function}
    return body(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])


def test_an_error_shows_no_more_than_the_beginning_of_an_unknown_field() -> None:
    for decode in (decode_messages, decode_chat):
        with pytest.raises(GatewayError) as refused:
            decode(msgspec.json.encode(body(**{"y" * 1_000_000: 1})))
        assert len(str(refused.value)) < 200


FEW = RequestBounds(max_logprobs=10_000)


def chat(**body: Any) -> Any:
    fields = {"model": "m", "messages": [HI], "logprobs": True, "top_logprobs": 4, "n": 2}
    return decode_chat(json.dumps({**fields, **body}).encode(), FEW)


def responses(**body: Any) -> Any:
    fields = {"model": "m", "input": [HI], "include": [LOGPROBS], "top_logprobs": 9}
    return decode_responses(json.dumps({**fields, **body}).encode(), FEW).request


def gemini(*, is_streamed: bool = False, **config: Any) -> Any:
    fields = {"responseLogprobs": True, "logprobs": 4, "candidateCount": 2, **config}
    body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": fields}
    request = decode_generate(json.dumps(body).encode(), "m", FEW, is_streamed=is_streamed)
    return request.generation_config


def test_log_probabilities_of_a_gathered_answer_are_bounded() -> None:
    assert chat().max_tokens == responses().max_output_tokens == gemini().max_output_tokens == 1000
    assert chat(max_tokens=1000).max_tokens == 1000
    assert chat(max_completion_tokens=7).max_completion_tokens == 7
    for field, decode in (
        ("max_tokens", lambda: chat(max_tokens=1001)),
        ("max_completion_tokens", lambda: chat(max_completion_tokens=1001)),
        ("max_output_tokens", lambda: responses(max_output_tokens=1001, stream=True)),
        ("generationConfig.maxOutputTokens", lambda: gemini(maxOutputTokens=1001)),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field}: must be at most 1000 .* 10000 in all"):
            decode()


def test_answers_without_them_and_streams_of_them_have_no_such_bound() -> None:
    assert chat(stream=True, max_tokens=50_000).max_tokens == 50_000
    assert chat(logprobs=False, top_logprobs=0).max_tokens is None
    assert responses(include=[]).max_output_tokens is None
    assert gemini(is_streamed=True).max_output_tokens is None
    assert gemini(responseLogprobs=False, logprobs=None).max_output_tokens is None


def test_a_very_long_field_is_not_repeated_in_the_answer(stack: Stack) -> None:
    """Every event with the response would have it once more."""
    long = "a" * MAX_ECHO_BYTES
    answer = asked(
        stack, tools=[{"type": "web_search", "more": long}], user=long, safety_identifier=long
    )
    reasons = {entry["path"]: entry["reason"] for entry in answer["holdfast"]["ignored"]}
    for field in ("tools", "user", "safety_identifier"):
        assert not answer[field] and "does not repeat it" in reasons[field]
    assert asked(stack, user="a" * 1000)["user"] == "a" * 1000


def test_the_tools_that_a_choice_allows_are_no_more_than_the_tools(stack: Stack) -> None:
    look = {"type": "function", "name": "look"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [look] * (BOUNDS.max_tools + 1)}
    error = refused(stack, tools=[{**look, "parameters": {}}], tool_choice=choice)
    assert error["message"] == f"tool_choice.tools: may have at most {BOUNDS.max_tools} items"
    error = refused(stack, tool_choice={"type": "allowed_tools", "mode": "x" * 300_000})
    assert len(error["message"]) < 300
