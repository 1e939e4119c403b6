"""A stream's bytes may arrive in any pieces: the official SDKs make the same of them.

A response is recorded from the gateway, then played to the SDK once for many places at which it can
be cut in two (`places`), and once a byte at a time.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import httpx2
import pytest
from anthropic import Anthropic
from google import genai
from google.genai import types
from openai import OpenAI

from engine.protocol import Finished, Frame, TextDelta, ThinkingDelta, ToolInputDelta, ToolUseStart
from tests.gateway import gemini_bodies
from tests.gateway.bodies import body, tool
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import QUESTION, user
from tests.gateway.openai_bodies import LOOK, MESSAGES, MODEL, frames

# 1 for every byte (`scripts/long_tests cuts`).
EVERY = int(os.environ.get("CUT_EVERY", "15"))
Sdk = Anthropic | OpenAI | genai.Client
Make = Callable[[Any, str], Sdk]
SAID: list[Frame] = [
    ThinkingDelta("I think.\u2029"),
    TextDelta("data: é\n\n🦉\u2028"),
    ToolUseStart("toolu_a", "look"),
    ToolInputDelta('{"what": "ü"}'),
    Finished(reason="tool_use", output_tokens=12, thinking_tokens=3),
]


ASKED = body(tools=[tool("look")], thinking={"type": "adaptive"})
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "tools": [LOOK],
    "stream": True,
    "stream_options": {"include_usage": True},
}


RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "input": "What is a lease?",
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
    "stream": True,
}


GEMINI = f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse"
GENERATE: dict[str, Any] = {
    "contents": [user({"text": QUESTION})],
    "tools": [{"functionDeclarations": [gemini_bodies.LOOK]}],
    "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
}


class Responder(OpenAI):
    """The SDK's client, asked through the Responses API."""


def make_vendors(kind: type[Any]) -> Make:
    return lambda http, url: kind(api_key="x", base_url=url, http_client=http, max_retries=0)


def make_gemini(http: httpx.Client, url: str) -> genai.Client:
    retries = types.HttpRetryOptions(attempts=1)
    options = types.HttpOptions(base_url=url, httpx_client=http, retry_options=retries)
    return genai.Client(api_key="x", http_options=options)


def answer(sdk: Sdk) -> Any:
    if isinstance(sdk, genai.Client):
        chunks = sdk.models.generate_content_stream(model=MODEL, contents=QUESTION)
        return [chunk.model_dump(exclude={"sdk_http_response"}) for chunk in chunks]
    if isinstance(sdk, Responder):
        events = list(sdk.responses.create(**RESPONSE))
        return [event.type for event in events], events[-1].model_dump()
    if isinstance(sdk, OpenAI):
        return [chunk.model_dump() for chunk in sdk.chat.completions.create(**CHAT)]
    with sdk.messages.stream(**ASKED) as stream:
        return stream.get_final_message().model_dump()


DIALECTS = pytest.mark.parametrize(
    "path, body, make, library",
    [
        ("/v1/messages", {**ASKED, "stream": True}, make_vendors(Anthropic), httpx2),
        ("/v1/chat/completions", CHAT, make_vendors(OpenAI), httpx2),
        ("/v1/responses", RESPONSE, make_vendors(Responder), httpx2),
        (GEMINI, GENERATE, make_gemini, httpx),
    ],
    ids=["anthropic", "openai", "responses", "gemini"],
)


def places(raw: bytes) -> list[int]:
    """Each end of a line, each character of several bytes, and every EVERY-th byte between them."""
    special = {
        at + offset
        for at, byte in enumerate(raw)
        if byte == 0x0A or byte >= 0x80
        for offset in range(3)
    }
    return [at for at in range(1, len(raw)) if at in special or at % EVERY == 0]


def playing(library: Any, pieces: list[bytes]) -> Any:
    """A client of `httpx` or `httpx2` whose every request is answered with these pieces."""

    class Pieces(library.SyncByteStream):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            yield from pieces

    class Player(library.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            return library.Response(200, headers=headers, stream=Pieces())

    return library.Client(transport=Player())


def record(stack: Stack, path: str, body: dict[str, Any]) -> bytes:
    stack.engine.script = frames(*SAID, output_tokens=12)
    stack.engine.num_heartbeats = 2
    with stack.http() as http:
        raw = http.post(path, json=body).content
    assert raw.startswith(b": \n\n") or path == GEMINI, "with heartbeats"
    return raw


@DIALECTS
def test_a_stream_cut_anywhere_is_the_same_answer(
    stack: Stack, path: str, body: dict[str, Any], make: Make, library: Any
) -> None:
    raw = record(stack, path, body)
    pieces = [raw]
    with playing(library, pieces) as http, make(http, "http://player") as sdk:
        whole = answer(sdk)
        for part in ("I think.", "🦉", "toolu_a", "ü"):
            assert part in str(whole)
        for place in places(raw):
            pieces[:] = [raw[:place], raw[place:]]
            assert answer(sdk) == whole, place
        pieces[:] = [bytes([byte]) for byte in raw]
        assert answer(sdk) == whole, "a byte at a time"
