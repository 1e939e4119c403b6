"""A stream of Google's dialect may come in any pieces: the official SDK makes the same of them."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import types

from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import LOOK, MODEL, QUESTION, user
from tests.gateway.openai_bodies import frames
from tests.gateway.routing.cuts import places
from tests.gateway.routing.test_stream_splits import SAID, byte_server

BODY: dict[str, Any] = {
    "contents": [user({"text": QUESTION})],
    "tools": [{"functionDeclarations": [LOOK]}],
    "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
}


class Pieces(httpx.SyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces


class Player(httpx.BaseTransport):
    """Answers every request with the same bytes, in the pieces that it is told."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, headers={"content-type": "text/event-stream"}, stream=Pieces(self.pieces)
        )


def sdk_on(http: httpx.Client, url: str) -> genai.Client:
    options = types.HttpOptions(
        base_url=url,
        httpx_client=http,
        retry_options=types.HttpRetryOptions(attempts=1),
    )
    return genai.Client(api_key="x", http_options=options)


def answer(sdk: genai.Client) -> list[Any]:
    chunks = sdk.models.generate_content_stream(model=MODEL, contents=QUESTION)
    return [chunk.model_dump(exclude={"sdk_http_response"}) for chunk in chunks]


@pytest.fixture
def raw(stack: Stack) -> bytes:
    stack.engine.script = frames(*SAID, output_tokens=12)
    stack.engine.num_heartbeats = 2
    with stack.http() as http:
        path = f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse"
        return http.post(path, json=BODY).content


def test_a_stream_cut_anywhere_is_the_same_answer(raw: bytes) -> None:
    player = Player()
    with httpx.Client(transport=player) as http, sdk_on(http, "http://player") as sdk:
        player.pieces = [raw]
        whole = answer(sdk)
        for part in ("I think.", "🦉", "toolu_a", "ü"):
            assert part in str(whole)
        for place in places(raw):
            player.pieces = [raw[:place], raw[place:]]
            assert answer(sdk) == whole, place


def test_a_stream_a_byte_at_a_time_is_the_same_answer(raw: bytes) -> None:
    player = Player()
    player.pieces = [raw]
    with httpx.Client(transport=player) as http, sdk_on(http, "http://player") as sdk:
        whole = answer(sdk)
    with (
        byte_server(raw) as url,
        httpx.Client(trust_env=False, timeout=120) as http,
        sdk_on(http, url) as sdk,
    ):
        assert answer(sdk) == whole
