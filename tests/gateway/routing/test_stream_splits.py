"""A stream's bytes may arrive in any pieces: both official SDKs make the same of them.

A response is recorded from the gateway, then played to the SDK once for many places at which it can
be cut in two (`cuts.py`), and once a byte at a time over a real socket.
"""

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic
from openai import OpenAI

from engine.protocol import (
    Finished,
    Frame,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolUseStart,
)
from tests.gateway.bodies import body, tool
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import LOOK, MESSAGES, MODEL, frames
from tests.gateway.routing.cuts import places

Make = Callable[[httpx2.Client, str], Anthropic | OpenAI]
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


class Responder(OpenAI):
    """The SDK's client, asked through the Responses API."""


def make_responder(http: httpx2.Client, url: str) -> OpenAI:
    return Responder(api_key="x", base_url=url, http_client=http, max_retries=0)


def make_anthropic(http: httpx2.Client, url: str) -> Anthropic:
    return Anthropic(api_key="x", base_url=url, http_client=http, max_retries=0)


def make_openai(http: httpx2.Client, url: str) -> OpenAI:
    return OpenAI(api_key="x", base_url=url, http_client=http, max_retries=0)


def answer(sdk: Anthropic | OpenAI) -> Any:
    if isinstance(sdk, Responder):
        events = list(sdk.responses.create(**RESPONSE))
        return [event.type for event in events], events[-1].model_dump()
    if isinstance(sdk, OpenAI):
        return [chunk.model_dump() for chunk in sdk.chat.completions.create(**CHAT)]
    with sdk.messages.stream(**ASKED) as stream:
        return stream.get_final_message().model_dump()


DIALECTS = pytest.mark.parametrize(
    "path, asked, make",
    [
        ("/v1/messages", {**ASKED, "stream": True}, make_anthropic),
        ("/v1/chat/completions", CHAT, make_openai),
        ("/v1/responses", RESPONSE, make_responder),
    ],
    ids=["anthropic", "openai", "responses"],
)


class Pieces(httpx2.SyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces


class Player(httpx2.BaseTransport):
    """Answers every request with the same bytes, in the pieces that it is told."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        return httpx2.Response(200, headers=headers, stream=Pieces(self.pieces))


def record(stack: Stack, path: str, asked: dict[str, Any]) -> bytes:
    stack.engine.script = frames(*SAID, output_tokens=12)
    stack.engine.num_heartbeats = 2
    with stack.http() as http:
        raw = http.post(path, json=asked).content
    assert raw.startswith(b": \n\n"), "with heartbeats"
    return raw


def check_whole(answer: Any) -> None:
    said = str(answer)
    for part in ("I think.", "🦉", "toolu_a", "ü"):
        assert part in said


@DIALECTS
def test_a_stream_cut_anywhere_is_the_same_answer(
    stack: Stack, path: str, asked: dict[str, Any], make: Make
) -> None:
    raw = record(stack, path, asked)
    player = Player()
    with make(httpx2.Client(transport=player), "http://player") as sdk:
        player.pieces = [raw]
        whole = answer(sdk)
        check_whole(whole)
        for place in places(raw):
            player.pieces = [raw[:place], raw[place:]]
            assert answer(sdk) == whole, place


@DIALECTS
def test_a_stream_a_byte_at_a_time_is_the_same_answer(
    stack: Stack, path: str, asked: dict[str, Any], make: Make
) -> None:
    raw = record(stack, path, asked)
    player = Player()
    player.pieces = [raw]
    with make(httpx2.Client(transport=player), "http://player") as sdk:
        whole = answer(sdk)
    with byte_server(raw) as url, make(httpx2.Client(), url) as sdk:
        assert answer(sdk) == whole


@contextmanager
def byte_server(raw: bytes) -> Iterator[str]:
    """Reads a request, then sends each byte in a chunk of its own."""

    class Handler(socketserver.StreamRequestHandler):
        disable_nagle_algorithm = True

        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.rfile.read(length)
            self.request.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            )
            for byte in raw:
                self.request.sendall(b"1\r\n%c\r\n" % byte)
            self.request.sendall(b"0\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
