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


FILE = {"filename": "a.txt", "file_data": "data:text/plain;base64,aGVsbG8="}
MARKED = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
CALL = {"call_id": "c1", "name": "look", "arguments": '{"a": [1]}'}
SHELL = {"call_id": "c3", "action": {"type": "exec", "command": ["ls"], "env": {}}}
SPOKE = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
# What agents send, of every kind.
EVERYTHING: dict[str, Any] = {
    "model": MODEL,
    "max_output_tokens": 5,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread-1",
    "prompt_cache_options": {"mode": "implicit", "comparison_response_id": "resp_1"},
    "client_metadata": {"x": "y"},
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "s",
    "user": "u",
    "max_tool_calls": 3,
    "truncation": "auto",
    "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {}}},
    "reasoning": {"effort": "high", "summary": "auto"},
    "stream_options": None,
    "tools": [
        {**LOOK, "strict": True},
        {"type": "image_generation", "size": "1x1"},
        {**PATCH, "format": {"type": "text"}},
        {"type": "namespace", "name": "n", "description": "Files.", "tools": [LOOK]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [LOOK, PATCH]},
    "input": [
        {"type": "message", "role": "developer", "content": "Rules. " * 30},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "See:"},
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
                {"type": "input_file", **FILE},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {**SPOKE, "content": [{"type": "output_text", "text": "I see.", "annotations": []}]},
        {"type": "function_call", **CALL},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "ok", **MARKED}],
        },
        {"type": "local_shell_call", "id": "lsh_1", "status": "completed", **SHELL},
        {"type": "local_shell_call_output", "id": "c3", "output": "{}"},
        {"type": "message", "role": "developer", "content": "Go on."},
    ],
}


def asked(stack: Stack, **body: Any) -> dict[str, Any]:
    """The answer without a stream. It has the shape of the SDK's own type."""
    reply = stack.post("/v1/responses", json={"model": MODEL, "input": "Hi", **body})
    assert reply.status_code == 200, reply.text
    Response.model_validate_json(reply.content)
    answer: dict[str, Any] = reply.json()
    return answer


def refused(stack: Stack, **body: Any) -> dict[str, Any]:
    reply = stack.post("/v1/responses", json={"model": MODEL, "input": "Hi", **body})
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
    reply = stack.post("/v1/responses", json=asking)
    assert reply.status_code == 200, reply.text
    return list(events_of(reply))
