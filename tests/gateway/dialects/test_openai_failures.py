"""OpenAI's envelopes, broken streams, clients that leave."""

from typing import Any

import httpx
import openai
import pytest

from engine.protocol import ErrorReply, Failed, Frame, GenerateRequest, InputUsage, TextDelta
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MESSAGES, MODEL, chat, refused
from tests.gateway.scripted_engine import say
from tests.gateway.serving import eventually


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


def test_a_client_that_leaves_its_stream_ends_the_turn(stack: Stack) -> None:
    stack.engine.script = say(*["word "] * 400, delay=0.05)
    stream = chat(stack, stream=True)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    stream.close()
    request_id = stack.engine.requests[-1].request_id
    eventually(lambda: request_id in stack.engine.cancelled)


def test_heartbeats_of_a_long_prefill_are_comments(stack: Stack) -> None:
    stack.engine.wait_seconds = 0.2
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    with stack.http() as http:
        assert http.post("/v1/chat/completions", json=body).text.startswith(": \n\n")
    assert chat(stack, stream=False).choices[0].message.content == "Hello there"
