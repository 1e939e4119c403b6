"""What POST /v1/responses refuses, and how it says so."""

from typing import Any

import openai
import pytest

from engine.protocol import ErrorReply
from gateway.dialects.responses.lower import seal, unseal
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MODEL
from tests.gateway.responses_bodies import LOOK, PATCH, refused, user


def test_the_engines_refusals_name_this_apis_fields(stack: Stack) -> None:
    stack.engine.refusal = ErrorReply("prompt_too_long", "prompt is too long: 9 tokens > 8 maximum")
    error = refused(stack)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    stack.engine.refusal = ErrorReply("invalid_request", "tools[1].input_schema: too deep", True)
    nested = {"type": "namespace", "name": "n", "tools": [LOOK]}
    error = refused(stack, tools=[PATCH, nested])
    assert error["param"] == "tools[1].tools[0].parameters"


@pytest.mark.parametrize(("body", "param", "words"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "with `store` set to false"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"background": True}, "background", "not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"input": []}, "input", "at least one message"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "item references"),
    ({"input": [{"id": "msg_1"}]}, "input[0]", "item references"),
    ({"input": [{"type": "nonsense"}]}, "input[0].type", "Invalid value: 'nonsense'"),
    ({"input": [{"type": 3}]}, "input[0].type", "Expected 'str'"),
    ({"input": [[]]}, "input[0]", "must be an object"),
    ({"input": [{"role": "user"}]}, "input[0].content", "Missing required"),
    ({"input": [user("x"), {"role": "user", "content": [{"type": "audio"}]}]},
     "input[1].content[0].type", "Invalid value: 'audio'"),
    ({"input": [user("x"), {"role": "assistant", "content": "y"}]}, "input", "must not end"),
    ({"input": [user("x"), {"type": "function_call_output", "call_id": "c", "output": ""}]},
     "input", "No tool call found"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"},
                user("x")]}, "input", "No tool output found for function call c"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": "[]"},
                {"type": "function_call_output", "call_id": "c", "output": "x"}]},
     "input[0].arguments", "must be a JSON object"),
    ({"tools": [LOOK, LOOK]}, "tools[1].name", "unique"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing required"),
    ({"tools": [{}]}, "tools[0].type", "Missing required"),
    ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "no"}},
     "tool_choice", "not in tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
     "tool_choice", "not in tools"),
    ({"tool_choice": {"name": "x"}}, "tool_choice", "missing required"),
    ({"metadata": {"a": "b" * 513}}, "metadata[...]", "length <= 512"),
    ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    ({"nonsense": 1}, "nonsense", "Unrecognized"),
])  # fmt: skip
def test_what_is_wrong_is_named(stack: Stack, body: Any, param: str, words: str) -> None:
    error = refused(stack, **body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert not stack.engine.requests


def test_no_response_is_kept(stack: Stack) -> None:
    client = stack.openai()
    answer = client.responses.create(model=MODEL, input="Hi", store=True)
    assert answer.model_extra is not None
    assert answer.model_extra["store"] is False
    assert answer.model_extra["holdfast"]["ignored"][0]["path"] == "store"
    with pytest.raises(openai.NotFoundError, match="not kept"):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError, match="not kept"):
        client.responses.delete(answer.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"


def test_thoughts_of_another_workspace_or_server_are_not_read() -> None:
    sealed = seal("Hm.", "a" * 32)
    assert unseal(sealed, "a" * 32) == "Hm."
    assert unseal(sealed, "b" * 32) is None
    for damaged in ("", "gAAAA", "hf1.", "hf1.%%%", sealed[:-4] + "AAAA", sealed + "é"):
        assert unseal(damaged, "a" * 32) is None
