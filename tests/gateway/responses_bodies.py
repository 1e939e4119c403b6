"""What the tests of the Responses API start from."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MODEL

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FINAL = ("response.completed", "response.incomplete", "response.failed")
LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    "strict": False,
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Patches."}


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text} for text in texts]}


def asked(stack: Stack, **body: Any) -> dict[str, Any]:
    """The answer without a stream. It has the shape of the SDK's own type."""
    with stack.http() as http:
        reply = http.post("/v1/responses", json={"model": MODEL, "input": "Hi", **body})
    assert reply.status_code == 200, reply.text
    Response.model_validate_json(reply.content)
    answer: dict[str, Any] = reply.json()
    return answer


def refused(stack: Stack, **body: Any) -> dict[str, Any]:
    with stack.http() as http:
        reply = http.post("/v1/responses", json={"model": MODEL, "input": "Hi", **body})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    return error


def events_of(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, each checked against the SDK's own type and its place."""
    blocks = [piece for piece in reply.text.split("\n\n") if piece and not piece.startswith(":")]
    for number, block in enumerate(blocks):
        head, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        yield event


def streamed(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    asking = {"model": MODEL, "input": "Hi", "stream": True, **body}
    with stack.http() as http:
        reply = http.post("/v1/responses", json=asking)
    assert reply.status_code == 200, reply.text
    return list(events_of(reply))
