"""A request's id, as an SDK prints it, leads to the turn's row, its errors and its log lines."""

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import structlog
from google.genai import errors as google

from engine.protocol import ErrorReply, Failed, Frame, GenerateRequest, InputUsage, TextDelta
from gateway.base.logs import configure
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import generate
from tests.gateway.leaving import asking
from tests.gateway.openai_bodies import MESSAGES, MODEL, chat
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import API_KEY, eventually, serve, serve_gateway

QUESTION: Any = [{"role": "user", "content": "Hello"}]
_REQUEST_ID = re.compile(r"req_[0-9a-f]{24}")


def breaks(request: GenerateRequest, _: InputUsage) -> list[Frame | float | bytes]:
    return [TextDelta("Hel"), Failed(code="internal", message="a detail of the engine")]


def row(stack: Stack, name: str | None) -> dict[str, Any]:
    """The turn of this id, or of the request with this id."""
    assert name
    eventually(lambda: stack.admin(f"turns/{name}").status_code == 200)
    found: dict[str, Any] = stack.admin(f"turns/{name}").json()
    assert name in (found["id"], found["http_request_id"])
    return found


def test_the_errors_of_every_sdk_have_the_id_and_the_row_has_their_text(stack: Stack) -> None:
    stack.engine.refusal = ErrorReply("prompt_too_long", "prompt is too long: 9 tokens > 8 maximum")
    with pytest.raises(anthropic.BadRequestError) as refused:
        stack.sdk().messages.create(model=MODEL, max_tokens=9, messages=QUESTION)
    assert str(refused.value.request_id) in str(refused.value)
    found = row(stack, refused.value.request_id)
    assert (found["outcome"], found["status"]) == ("invalid_request_error", 400)
    assert found["error"] == "prompt is too long: 9 tokens > 8 maximum"
    with pytest.raises(openai.BadRequestError) as told:
        chat(stack)
    assert told.value.body["request_id"] == told.value.request_id  # type: ignore[index]
    assert row(stack, told.value.request_id)["error"] == found["error"]
    with pytest.raises(openai.BadRequestError) as response:
        stack.openai().responses.create(model=MODEL, input="Hello")
    assert response.value.body["request_id"] == response.value.request_id  # type: ignore[index]
    assert row(stack, response.value.request_id)["dialect"] == "responses"
    stack.engine.refusal = ErrorReply("overloaded", "full")
    with pytest.raises(google.ServerError) as full:
        generate(stack)
    found = row(stack, _REQUEST_ID.findall(str(full.value))[0])
    assert (found["outcome"], found["status"]) == ("overloaded_error", 503)
    with pytest.raises(anthropic.APIStatusError) as busy:
        stack.sdk().messages.create(model=MODEL, max_tokens=9, messages=QUESTION)
    assert row(stack, busy.value.request_id)["status"] == 529


STREAMS = {
    "/v1/messages": body(messages=QUESTION, stream=True),
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "stream": True},
    "/v1/completions": {"model": MODEL, "prompt": "Hello", "stream": True},
    "/v1/responses": {"model": MODEL, "input": "Hello", "stream": True},
    f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse": {
        "contents": [{"role": "user", "parts": [{"text": "Hello"}]}]
    },
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_breaks_says_its_id_and_its_row_has_the_error(
    stack: Stack, path: str
) -> None:
    stack.engine.script = breaks
    with stack.http() as http:
        reply = http.post(path, json=STREAMS[path])
    made = reply.headers.get("request-id") or reply.headers["x-request-id"]
    assert reply.status_code == 200
    assert made in reply.text.strip().splitlines()[-1]
    found = row(stack, made)
    assert (found["outcome"], found["status"]) == ("api_error", 200)
    assert found["error"] and "detail" not in found["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_has_a_status_only_if_its_stream_had_begun(
    stack: Stack, stream: bool
) -> None:
    stack.engine.script = say(*["word "] * 2_000, delay=0.05)
    asked = body(messages=QUESTION, stream=stream)
    with stack.http() as http:
        if stream:
            with http.stream("POST", "/v1/messages", json=asked) as reply:
                next(reply.iter_lines())
        else:
            before = len(stack.engine.requests)
            with asking(stack.url, "/v1/messages", asked):
                eventually(lambda: len(stack.engine.requests) > before)
    found = row(stack, stack.engine.requests[-1].request_id)
    assert found["outcome"] == "client_disconnect"
    assert found["status"] == (200 if stream else None)
    assert found["error"] is None


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[str, ScriptedEngine, ScriptedEngine]]:
    first, second = ScriptedEngine(), ScriptedEngine()
    with serve(first) as one, serve(second) as other, serve_gateway(tmp_path, one, other) as url:
        yield url, first, second


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """The lines that the gateway writes."""
    written = io.StringIO()
    with redirect_stderr(written):
        configure("info")
    yield written
    structlog.reset_defaults()
    logging.basicConfig(force=True)


def test_the_log_lines_of_a_turn_have_the_id(
    logs: io.StringIO, two: tuple[str, ScriptedEngine, ScriptedEngine]
) -> None:
    url, first, second = two
    first.breaks_early = second.breaks_early = True
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
    asked = body(messages=QUESTION)
    reply = httpx.post(f"{url}/v1/messages", json=asked, headers=headers, timeout=120)
    assert reply.status_code == 529
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    failed = [line for line in lines if line["event"] == "attempt_failed"]
    made = reply.headers["request-id"]
    assert made == reply.json()["request_id"]
    assert {line["request_id"] for line in failed} == {made}
    assert len({line["turn"] for line in failed}) == 1


def test_the_access_log_has_a_line_for_each_response_and_for_each_turn(
    logs: io.StringIO, tmp_path: Path
) -> None:
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
    with serve(ScriptedEngine()) as one, serve_gateway(tmp_path, one, access_log=True) as url:
        reply = httpx.post(
            f"{url}/v1/messages", json=body(stream=True), headers=headers, timeout=120
        )
        secret = "a-key-in-the-query"
        httpx.get(f"{url}/v1beta/models?key={secret}", timeout=120)
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    [turn] = [line for line in lines if line["event"] == "turn"]
    answer, refused = [line for line in lines if line["event"] == "response"]
    made = reply.headers["request-id"]
    assert turn["request_id"] == answer["request_id"] == made
    assert (turn["outcome"], turn["status"], turn["output_tokens"]) == ("stop", 200, 2)
    assert (answer["route"], answer["status"]) == ("/v1/messages", 200)
    assert answer["bytes"] == len(reply.content) and answer["workspace"] == "default"
    assert refused["status"] == 401 and secret not in logs.getvalue()
