"""Clients that end their side of a connection behind a request: some wait, some have left.

Both send the same. The one that waits gets its answer, the one that has left ends its turn.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import user
from tests.gateway.http.test_leaving import connect, turn_of
from tests.gateway.scripted_engine import say
from tests.gateway.serving import API_KEY, eventually

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OPENAI = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
GEMINI = {"contents": [user({"text": "Hello"})]}
MODEL = "/v1beta/models/scripted"


def asked(
    content: dict[str, Any], path: str = "/v1/messages", version: str = "1.1", *, last: bool = False
) -> bytes:
    sent = json.dumps(content).encode()
    lines = [
        f"POST {path} HTTP/{version}",
        "host: x",
        f"{'x-goog-api-key' if path.startswith(MODEL) else 'x-api-key'}: {API_KEY}",
        "anthropic-version: 2023-06-01",
        "content-type: application/json",
        f"content-length: {len(sent)}",
        *(["connection: close"] if last else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + sent


def rest(raw: socket.socket) -> bytes:
    received = bytearray()
    while piece := raw.recv(65536):
        received += piece
    return bytes(received)


def parted(received: bytes) -> tuple[bytes, bytes]:
    """The head of one answer, and its body without chunks."""
    head, _, left = received.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head:
        return head, left
    whole = b""
    while left:
        size, _, left = left.partition(b"\r\n")
        whole += left[: int(size, 16)]
        left = left[int(size, 16) + 2 :]
    return head, whole


def test_one_that_waits_for_a_turn_gets_its_answer(stack: Stack) -> None:
    stack.engine.wait_seconds = 1.0
    with connect(stack) as raw:
        raw.sendall(asked(body()))
        raw.shutdown(socket.SHUT_WR)
        received = rest(raw)
    assert received.startswith(CONTINUE), "or one that has left would not be noticed"
    head, answer = parted(received.replace(CONTINUE, b""))
    assert b" 200 OK" in head and b"connection: close" in head
    message = json.loads(answer)
    assert message["content"][0]["text"] == "Hello there"
    assert turn_of(stack, message["id"])["outcome"] == "stop"


def test_an_answer_from_memory_comes_alone(stack: Stack) -> None:
    for version in ("1.0", "1.1"):
        with connect(stack) as raw:
            raw.sendall(f"GET /healthz HTTP/{version}\r\nhost: x\r\n\r\n".encode())
            raw.shutdown(socket.SHUT_WR)
            head, answer = parted(rest(raw))
        assert head.startswith(b"HTTP/1.1 200") and json.loads(answer) == {"status": "ok"}


def messages_text(events: str) -> str:
    return "".join(
        event["delta"]["text"]
        for event in map(json.loads, data_of(events))
        if event["type"] == "content_block_delta"
    )


def data_of(events: str) -> Iterator[str]:
    for event in events.split("\n\n"):
        for line in event.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield line.removeprefix("data: ")


def chat_text(events: str) -> str:
    chunks = [json.loads(data) for data in data_of(events)]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def gemini_text(answers: list[dict[str, Any]]) -> str:
    return "".join(
        part["text"]
        for answer in answers
        for candidate in answer.get("candidates", [])
        for part in candidate.get("content", {}).get("parts", [])
    )


STREAMS: dict[str, tuple[str, dict[str, Any], Callable[[str], str]]] = {
    "messages": ("/v1/messages", body(stream=True), messages_text),
    "chat": ("/v1/chat/completions", {**OPENAI, "stream": True}, chat_text),
    "gemini events": (
        f"{MODEL}:streamGenerateContent?alt=sse",
        GEMINI,
        lambda events: gemini_text([json.loads(data) for data in data_of(events)]),
    ),
    "gemini list": (
        f"{MODEL}:streamGenerateContent",
        GEMINI,
        lambda answer: gemini_text(json.loads(answer)),
    ),
}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("kind", STREAMS)
def test_one_that_waits_in_a_stream_gets_all_of_it(stack: Stack, kind: str, version: str) -> None:
    path, content, text_of = STREAMS[kind]
    stack.engine.script = say(*["word "] * 5, delay=0.3)
    with connect(stack) as raw:
        raw.sendall(asked(content, path, version))
        received = bytearray()
        while b"word" not in received:
            received += raw.recv(65536)
        raw.shutdown(socket.SHUT_WR)
        head, answer = parted(bytes(received) + rest(raw))
    assert (b"chunked" in head) is (version == "1.1")
    assert text_of(answer.decode()) == "word " * 5
    filled = {"gemini events": b"data:  ", "gemini list": b""}.get(kind, b"\n\n\n")
    assert filled in answer, "what stands between two pieces"
    assert stack.engine.requests[-1].request_id not in stack.engine.cancelled


def test_each_of_several_requests_is_answered(stack: Stack) -> None:
    stack.engine.script = say("one", delay=0.5)
    with connect(stack) as raw:
        raw.sendall(asked(body()) + asked(body()) + asked(body()))
        raw.shutdown(socket.SHUT_WR)
        received = rest(raw)
    assert received.count(b"HTTP/1.1 200 OK") == 3 and received.count(b'"one"') == 3


def test_the_answers_before_a_body_that_never_comes_whole_are_sent(stack: Stack) -> None:
    stack.engine.script = say("one", delay=0.5)
    with connect(stack) as raw:
        raw.sendall(asked(body()) + asked(body()) + asked(body())[:-5])
        raw.shutdown(socket.SHUT_WR)
        received = rest(raw)
    assert received.count(b"HTTP/1.1 200 OK") == 2 and received.count(b'"one"') == 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_one_that_leaves_later_ends_its_turn(stack: Stack, is_stream: bool) -> None:
    """Its second end sends nothing at all: only what is sent to it tells."""
    stack.engine.wait_seconds = 300.0
    with connect(stack) as raw:
        raw.sendall(asked(body(stream=is_stream)))
        eventually(lambda: stack.engine.running)
        raw.shutdown(socket.SHUT_WR)
        raw.settimeout(120)
        assert raw.recv(4096)
    [request] = stack.engine.requests
    eventually(lambda: request.request_id in stack.engine.cancelled)
    assert turn_of(stack, request.request_id)["outcome"] == "client_disconnect"


def test_an_old_client_that_ends_its_side_before_a_turns_answer_counts_as_gone(
    stack: Stack,
) -> None:
    """HTTP/1.0 has nothing that could be sent to it before the answer. nginx leaves this way."""
    stack.engine.wait_seconds = 300.0
    with connect(stack) as raw:
        raw.sendall(asked(body(), version="1.0"))
        raw.shutdown(socket.SHUT_WR)
        assert rest(raw).startswith(b"HTTP/1.1 499")
    eventually(lambda: not stack.engine.running)


def relay(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on, and their end, as a balancer does that knows no HTTP."""
    with suppress(OSError):
        while piece := source.recv(65536):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
        return
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def balancer(stack: Stack) -> Iterator[int]:
    """The port of a relay for one connection."""
    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, gateway = server.accept()[0], connect(stack)
            ends.extend((client, gateway))
            back = threading.Thread(target=relay, args=(gateway, client), daemon=True)
            back.start()
            relay(client, gateway)
            back.join()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(120)
        for end in ends:
            end.close()
        assert not thread.is_alive()


@pytest.mark.parametrize("is_stream", [False, True])
def test_one_that_leaves_behind_a_balancer_ends_its_turn(stack: Stack, is_stream: bool) -> None:
    """The balancer passes the end of the client's side on, and keeps the other side."""
    stack.engine.wait_seconds = 300.0
    with balancer(stack) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as raw:
            raw.sendall(asked(body(stream=is_stream)))
            eventually(lambda: stack.engine.running)
        [request] = stack.engine.requests
        eventually(lambda: request.request_id in stack.engine.cancelled)
    assert turn_of(stack, request.request_id)["outcome"] == "client_disconnect"
