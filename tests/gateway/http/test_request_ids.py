"""A request's id, as an SDK prints it, leads to the turn's row and its errors."""

import re
from typing import Any

import anthropic
import openai
import pytest
from google.genai import errors as google

from engine.protocol import ErrorReply, Failed, Frame, GenerateRequest, InputUsage, TextDelta
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import generate, user
from tests.gateway.openai_bodies import MESSAGES, MODEL, chat
from tests.gateway.serving import eventually

_REQUEST_ID = re.compile(r"req_[0-9a-f]{24}")


def breaks(request: GenerateRequest, _: InputUsage) -> list[Frame | float | bytes]:
    return [TextDelta("Hel"), Failed(code="internal", message="a detail of the engine")]


def row(stack: Stack, name: str | None) -> dict[str, Any]:
    """The turn of this id, or of the request with this id."""
    assert name
    eventually(lambda: stack.admin(f"turns/{name}").status_code == 200)
    turn: dict[str, Any] = stack.admin(f"turns/{name}").json()
    assert name in (turn["id"], turn["http_request_id"])
    return turn


def test_the_errors_of_every_sdk_have_the_id_and_the_row_has_their_text(stack: Stack) -> None:
    too_long = "prompt is too long: 9 tokens > 8 maximum"
    stack.engine.refusal = ErrorReply("prompt_too_long", too_long)
    with pytest.raises(anthropic.BadRequestError) as refused:
        stack.sdk().messages.create(**body())
    assert str(refused.value.request_id) in str(refused.value)
    turn = row(stack, refused.value.request_id)
    assert (turn["outcome"], turn["status"]) == ("invalid_request_error", 400)
    assert turn["error"] == too_long
    for dialect, ask in (
        ("openai", lambda: chat(stack)),
        ("responses", lambda: stack.openai().responses.create(model=MODEL, input="Hello")),
    ):
        with pytest.raises(openai.BadRequestError) as failure:
            ask()
        assert failure.value.body["request_id"] == failure.value.request_id  # type: ignore[index]
        turn = row(stack, failure.value.request_id)
        assert (turn["dialect"], turn["error"]) == (dialect, too_long)
    stack.engine.refusal = ErrorReply("internal", "broken")
    with pytest.raises(google.ServerError) as failed:
        generate(stack)
    turn = row(stack, _REQUEST_ID.findall(str(failed.value))[0])
    assert (turn["outcome"], turn["status"]) == ("api_error", 500)
    assert turn["cost_nano"] == 0
    with pytest.raises(anthropic.APIStatusError) as broken:
        stack.sdk().messages.create(**body())
    assert row(stack, broken.value.request_id)["status"] == 500
    # What no engine took is counted (test_refusals.py) and has no row.
    stack.engine.refusal = ErrorReply("overloaded", "full")
    with pytest.raises(google.ServerError) as full:
        generate(stack)
    assert full.value.code == 503
    assert _REQUEST_ID.findall(str(full.value))
    with pytest.raises(anthropic.APIStatusError) as busy:
        stack.sdk().messages.create(**body())
    assert busy.value.status_code == 529
    assert str(busy.value.request_id) in str(busy.value)


STREAMS = {
    "/v1/messages": body(stream=True),
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "stream": True},
    "/v1/completions": {"model": MODEL, "prompt": "Hello", "stream": True},
    "/v1/responses": {"model": MODEL, "input": "Hello", "stream": True},
    f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse": {
        "contents": [user({"text": "Hello"})]
    },
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_breaks_says_its_id_and_its_row_has_the_error(
    stack: Stack, path: str
) -> None:
    stack.engine.script = breaks
    reply = stack.post(path, json=STREAMS[path])
    request_id = reply.headers.get("request-id") or reply.headers["x-request-id"]
    assert reply.status_code == 200
    assert request_id in reply.text.strip().splitlines()[-1]
    assert "a detail" not in reply.text and "[DONE]" not in reply.text
    turn = row(stack, request_id)
    assert (turn["outcome"], turn["status"]) == ("api_error", 200)
    assert turn["error"] and "detail" not in turn["error"]
