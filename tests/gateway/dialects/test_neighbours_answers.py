"""An answer that is gathered, or that repeats its request, is bounded in every dialect."""

import json
from typing import Any

import pytest

from gateway.base.bounds import DEFAULT_BOUNDS as BOUNDS
from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.gemini.request import decode_generate
from gateway.dialects.openai.request import decode_chat
from gateway.dialects.responses.request import LOGPROBS, decode_responses
from gateway.dialects.responses.response import MAX_ECHO_BYTES
from tests.gateway.conftest import Stack
from tests.gateway.responses_bodies import asked, refused

SMALL = RequestBounds(max_logprobs=10_000)
HI = {"role": "user", "content": "hi"}


def chat(**body: Any) -> Any:
    given = {"model": "m", "messages": [HI], "logprobs": True, "top_logprobs": 4, "n": 2}
    return decode_chat(json.dumps({**given, **body}).encode(), SMALL)


def responses(**body: Any) -> Any:
    given = {"model": "m", "input": [HI], "include": [LOGPROBS], "top_logprobs": 9}
    return decode_responses(json.dumps({**given, **body}).encode(), SMALL).request


def gemini(*, is_streamed: bool = False, **config: Any) -> Any:
    given = {"responseLogprobs": True, "logprobs": 4, "candidateCount": 2, **config}
    body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": given}
    read = decode_generate(json.dumps(body).encode(), "m", SMALL, is_streamed=is_streamed)
    return read.generation_config


def test_log_probabilities_of_a_gathered_answer_are_bounded() -> None:
    assert chat().max_tokens == responses().max_output_tokens == gemini().max_output_tokens == 1000
    assert chat(max_tokens=1000).max_tokens == 1000
    assert chat(max_completion_tokens=7).max_completion_tokens == 7
    for field, read in (
        ("max_tokens", lambda: chat(max_tokens=1001)),
        ("max_completion_tokens", lambda: chat(max_completion_tokens=1001)),
        ("max_output_tokens", lambda: responses(max_output_tokens=1001, stream=True)),
        ("generationConfig.maxOutputTokens", lambda: gemini(maxOutputTokens=1001)),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field}: must be at most 1000 .* 10000 in all"):
            read()


def test_answers_without_them_and_streams_of_them_have_no_such_bound() -> None:
    assert chat(stream=True, max_tokens=50_000).max_tokens == 50_000
    assert chat(logprobs=False, top_logprobs=0).max_tokens is None
    assert responses(include=[]).max_output_tokens is None
    assert gemini(is_streamed=True).max_output_tokens is None
    assert gemini(responseLogprobs=False, logprobs=None).max_output_tokens is None


@pytest.mark.parametrize(
    "field, value, default",
    [
        ("tools", [{"type": "web_search", "more": "a" * MAX_ECHO_BYTES}], []),
        ("user", "a" * MAX_ECHO_BYTES, None),
        ("safety_identifier", "a" * MAX_ECHO_BYTES, None),
    ],
)
def test_a_very_long_field_is_not_repeated_in_the_answer(
    stack: Stack, field: str, value: Any, default: Any
) -> None:
    """Every event with the response would have it once more."""
    answer = asked(stack, **{field: value})
    assert answer[field] == default
    told = {each["path"]: each["reason"] for each in answer["holdfast"]["ignored"]}
    assert "does not repeat it" in told[field]
    assert asked(stack, user="a" * 1000)["user"] == "a" * 1000


def test_the_tools_that_a_choice_allows_are_no_more_than_the_tools(stack: Stack) -> None:
    one = {"type": "function", "name": "look"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [one] * (BOUNDS.max_tools + 1)}
    error = refused(stack, tools=[{**one, "parameters": {}}], tool_choice=choice)
    assert error["message"] == f"tool_choice.tools: may have at most {BOUNDS.max_tools} items"
    error = refused(stack, tool_choice={"type": "allowed_tools", "mode": "x" * 300_000})
    assert len(error["message"]) < 300
