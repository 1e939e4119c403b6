"""The id of a stream that breaks leads to the turn's row and its error."""

from typing import Any

import pytest

from engine.protocol import Failed, Frame, GenerateRequest, InputUsage, TextDelta
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import user
from tests.gateway.openai_bodies import MESSAGES, MODEL
from tests.gateway.serving import eventually


def breaks(request: GenerateRequest, _: InputUsage) -> list[Frame | float | bytes]:
    return [TextDelta("Hel"), Failed(code="internal", message="a detail of the engine")]


def row(stack: Stack, name: str | None) -> dict[str, Any]:
    """The turn of this id, or of the request with this id."""
    assert name
    eventually(lambda: stack.admin(f"turns/{name}").status_code == 200)
    found: dict[str, Any] = stack.admin(f"turns/{name}").json()
    assert name in (found["id"], found["http_request_id"])
    return found


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
def test_a_broken_stream_says_its_id_and_its_row_has_the_error(stack: Stack, path: str) -> None:
    stack.engine.script = breaks
    reply = stack.post(path, json=STREAMS[path])
    made = reply.headers.get("request-id") or reply.headers["x-request-id"]
    assert reply.status_code == 200
    assert made in reply.text.strip().splitlines()[-1]
    assert "a detail" not in reply.text and "[DONE]" not in reply.text
    found = row(stack, made)
    assert (found["outcome"], found["status"]) == ("api_error", 200)
    assert found["error"] and "detail" not in found["error"]
