"""A turn is closed on every way out, with the engine's counts, and the engine stops at once."""

import socket
from contextlib import suppress
from typing import Any

import httpx
import pytest

from engine.protocol import ErrorReply, TextDelta
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import say
from tests.gateway.serving import API_KEY, eventually


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


def hang_up(stack: Stack, request: dict[str, Any], after: bytes, behind: bytes = b"") -> None:
    """Send a request on a raw socket, and what comes behind it; read until `after`, close."""
    with connect(stack) as raw:
        raw.sendall(on_the_wire(request) + behind)
        seen = b""
        while after not in seen:
            seen += raw.recv(4096)
        if not after:
            eventually(lambda: stack.engine.running)


def turn_of(stack: Stack, turn_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def is_there() -> bool:
        for turn in stack.admin("turns?limit=1000").json():
            if turn["id"] == turn_id:
                found.update(turn)
        return bool(found)

    eventually(is_there)
    return found


@pytest.mark.parametrize(
    "request_body, after, tokens",
    [
        pytest.param(body(stream=True), b"word", True, id="mid-stream"),
        pytest.param(body(stream=True), b"text/event-stream", False, id="streaming-in-prefill"),
        pytest.param(body(), b"", False, id="not-streaming"),
        # uvicorn stops reading behind so many bytes.
        pytest.param(body(system="x " * 100_000), b"", False, id="long body"),
    ],
)
def test_a_client_that_hangs_up_frees_the_engine_and_is_billed_by_its_counts(
    stack: Stack, request_body: dict[str, Any], after: bytes, tokens: bool
) -> None:
    stack.engine.wait_seconds = 0.0 if tokens else 60.0
    # 100 s of it: what comes to its end within 20 did not end by itself.
    stack.engine.script = say(*["word "] * 500, delay=0.2)
    hang_up(stack, request_body, after)
    turn_id = stack.engine.requests[-1].request_id
    eventually(lambda: not stack.engine.running)
    eventually(lambda: turn_id in stack.engine.cancelled)
    turn = turn_of(stack, turn_id)
    assert turn["outcome"] == "client_disconnect"
    assert bool(turn["output_tokens"]) is tokens
    assert turn["input_tokens"] > 0
    eventually(lambda: turn_id in stack.engine.acked)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_hangs_up_with_another_request_behind_is_noticed_as_well(
    stack: Stack, is_stream: bool
) -> None:
    """uvicorn tells the request that came last alone, and stops reading while one waits."""
    stack.engine.wait_seconds = 0.0 if is_stream else 60.0
    stack.engine.script = say(*["word "] * 500, delay=0.2)
    after = b"word" if is_stream else b""
    hang_up(stack, body(stream=is_stream), after, behind=on_the_wire(body()))
    [turn_id] = [request.request_id for request in stack.engine.requests]
    eventually(lambda: turn_id in stack.engine.cancelled)
    eventually(lambda: not stack.engine.running)
    assert turn_of(stack, turn_id)["outcome"] == "client_disconnect"


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


def test_a_finished_turn_is_in_the_ledger_and_acknowledged_once(stack: Stack) -> None:
    with stack.http() as http:
        answer = http.post("/v1/messages", json=body()).json()
    turn = turn_of(stack, answer["id"])
    assert turn["outcome"] == "stop" and turn["output_tokens"] == 2
    assert turn["price"].startswith("reference@2026-01-01#")
    expected = turn["input_tokens"] * 1000 + turn["output_tokens"] * 5000
    assert turn["cost_nano"] == expected and turn["saved_nano"] == 0
    eventually(lambda: stack.engine.acked.count(answer["id"]) == 1)


def test_a_refused_turn_is_closed_at_once_and_costs_nothing(stack: Stack) -> None:
    stack.engine.refusal = ErrorReply("overloaded", "full")
    with stack.http() as http:
        http.post("/v1/messages", json=body())
    [turn_id] = stack.engine.refused
    turn = turn_of(stack, turn_id)
    assert (turn["outcome"], turn["cost_nano"]) == ("overloaded_error", 0)


def test_the_overview_adds_up(stack: Stack) -> None:
    with stack.http() as http:
        answer = http.post("/v1/messages", json=body()).json()
    turn_of(stack, answer["id"])
    overview = stack.admin("overview?seconds=600").json()
    totals = overview["totals"]
    assert totals["requests"] > 0
    for name, value in totals.items():
        assert sum(bucket["totals"][name] for bucket in overview["series"]) == value
    assert overview["saved_nano"] == totals["cost_without_cache_nano"] - totals["cost_nano"]
    assert set(overview["rates"]) <= set(overview["definitions"])
    assert stack.admin("engines").json()[0]["stats"]["blocks"]["total"] == 64
    assert stack.admin("leases").json() == []
