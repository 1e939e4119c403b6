"""A turn is closed on every way out, with the engine's counts, and the engine stops at once."""

import socket
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest

from engine.protocol import TextDelta
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import say
from tests.gateway.serving import API_KEY, eventually, metric


def on_the_wire(request: dict[str, Any]) -> bytes:
    content = httpx.Request("POST", "http://x", json=request).content
    head = (
        f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {API_KEY}\r\n"
        "anthropic-version: 2023-06-01\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def connect(stack: Stack) -> socket.socket:
    host, port = stack.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


LATER = b"later: "


def hang_up(stack: Stack, request: dict[str, Any], after: bytes, behind: bytes) -> None:
    """Send a request on a raw socket, and what comes behind it; read until `after`, close."""
    is_later = behind.startswith(LATER)
    with connect(stack) as raw:
        raw.sendall(on_the_wire(request) + (b"" if is_later else behind))
        data = b""
        while after not in data:
            data += raw.recv(4096)
        if not after:
            eventually(lambda: stack.engine.running)
        if is_later:
            raw.sendall(behind.removeprefix(LATER))
            time.sleep(0.5)  # else its end may come with it


def input_tokens(stack: Stack) -> float:
    """Of the metrics, whatever the model."""
    return metric(stack.url, 'holdfast_gateway_tokens_total{class="input"')


def turn_of(stack: Stack, turn_id: str) -> dict[str, Any]:
    eventually(lambda: stack.admin(f"turns/{turn_id}").status_code == 200)
    turn: dict[str, Any] = stack.admin(f"turns/{turn_id}").json()
    return turn


@pytest.mark.parametrize(
    "request_body, after, behind",
    [
        pytest.param(body(stream=True), b"word", b"", id="mid-stream"),
        pytest.param(body(stream=True), b"text/event-stream", b"", id="streaming-in-prefill"),
        pytest.param(body(), b"", b"", id="not-streaming"),
        # uvicorn stops reading behind so many bytes, and while another request waits, and tells
        # the request that came last alone.
        pytest.param(body(system="x " * 100_000), b"", b"", id="long body"),
        pytest.param(body(stream=True), b"word", on_the_wire(body()), id="another behind a stream"),
        pytest.param(body(), b"", on_the_wire(body()), id="another behind"),
        pytest.param(body(), b"", LATER + on_the_wire(body()), id="another later"),
    ],
)
def test_a_client_that_hangs_up_frees_the_engine_and_is_billed_by_its_counts(
    stack: Stack, request_body: dict[str, Any], after: bytes, behind: bytes
) -> None:
    is_begun = after == b"word"
    stack.engine.wait_seconds = 0.0 if is_begun else 60.0
    # 100 s of it: what comes to its end within 20 did not end by itself.
    stack.engine.script = say(*["word "] * 500, delay=0.2)
    counted = input_tokens(stack)
    hang_up(stack, request_body, after, behind)
    [turn_id] = [request.request_id for request in stack.engine.requests]
    eventually(lambda: not stack.engine.running)
    eventually(lambda: turn_id in stack.engine.cancelled)
    turn = turn_of(stack, turn_id)
    assert (turn["outcome"], turn["error"]) == ("client_disconnect", None)
    assert turn["status"] == (200 if after else None)
    assert bool(turn["output_tokens"]) is is_begun
    assert turn["input_tokens"] > 0
    assert input_tokens(stack) - counted == turn["input_tokens"]
    eventually(lambda: turn_id in stack.engine.acked)


def test_what_is_sent_behind_a_request_in_progress_is_bounded(stack: Stack) -> None:
    behind = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 50_000
    stack.engine.wait_seconds = 60.0
    with connect(stack) as raw:
        raw.sendall(on_the_wire(body()))
        eventually(lambda: stack.engine.running)
        with suppress(ConnectionError):
            raw.sendall(behind)
            assert raw.recv(4096) == b"", "no answer may come before that of the first"
    eventually(lambda: not stack.engine.running)
    turn_of(stack, stack.engine.requests[-1].request_id)  # or the next test counts its tokens


def test_a_reader_that_stops_reading_does_not_block_the_others(stack: Stack) -> None:
    # More than the sockets' buffers take, which are some MB each.
    stack.engine.script = lambda _request, _usage: [TextDelta("x" * 10_000), 0.001] * 20_000
    with (
        stack.http() as slow,
        slow.stream("POST", "/v1/messages", json=body(stream=True)) as answer,
    ):
        # Only when its first text is here does it certainly not follow the next script.
        pieces = answer.iter_bytes(1000)
        while b"xxx" not in next(pieces):
            pass
        unread = stack.engine.requests[-1].request_id
        stack.engine.script = say("quick")
        with stack.http() as quick:
            for _ in range(5):
                assert quick.post("/v1/messages", json=body()).status_code == 200
        assert unread in stack.engine.running, "the others did not wait for its end"
    turn_of(stack, unread)
