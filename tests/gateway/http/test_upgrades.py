"""Clients that ask for another protocol, on connections that carry further requests."""

import json
import logging
import socket

import pytest
from msgspec import to_builtins

from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.serving import API_KEY

UPGRADES = ("h2c", "websocket")
JSON = "content-type: application/json"


def head(line: str, upgrade: str | None, *further: str, is_last: bool = False) -> bytes:
    lines = [f"{line} HTTP/1.1", "host: x", f"x-api-key: {API_KEY}"]
    if upgrade is not None:
        lines += [f"connection: Upgrade{', close' if is_last else ''}", f"upgrade: {upgrade}"]
    return "\r\n".join([*lines, "anthropic-version: 2023-06-01", *further, "", ""]).encode()


def answers(url: str, *parts: bytes) -> bytes:
    """All that comes back until the gateway closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=120) as client:
        for part in parts:
            client.sendall(part)
        while piece := client.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_a_request_without_a_body_is_answered_and_not_logged(
    stack: Stack, upgrade: str, caplog: pytest.LogCaptureFixture
) -> None:
    """RFC 9110, 7.8: a server may ignore an Upgrade."""
    with caplog.at_level(logging.DEBUG, "uvicorn.error"):
        received = answers(stack.url, head("GET /v1/models", upgrade, is_last=True))
    assert received.count(b"HTTP/1.1 200") == 1, received[:2000]
    assert "pgrade" not in caplog.text and "WebSocket" not in caplog.text


def test_a_websocket_for_responses_is_answered_so_that_codex_goes_on_over_http(
    stack: Stack,
) -> None:
    """openai/codex#10824: 426 alone is no error that is tried again. A plain GET stays a 405."""
    wish = ("sec-websocket-version: 13", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==")
    request = head("GET /v1/responses", "websocket", *wish, is_last=True)
    received = answers(stack.url, request)
    assert received.startswith(b"HTTP/1.1 426 "), received[:2000]
    assert b"upgrade: HTTP/1.1" in received and b"POST /v1/responses over HTTP" in received
    plain = answers(stack.url, head("GET /v1/responses", None, "connection: close"))
    assert plain.startswith(b"HTTP/1.1 405 ") and b"allow: " in plain.lower()


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_is_never_the_next_request(stack: Stack, upgrade: str, is_chunked: bool) -> None:
    """A proxy before the gateway would give the second answer to another client."""
    smuggled = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    framing = f"content-length: {len(smuggled)}"
    if is_chunked:
        framing = "transfer-encoding: chunked"
        smuggled = b"%x\r\n%b\r\n0\r\n\r\n" % (len(smuggled), smuggled)
    request = head("POST /v1/messages", upgrade, JSON, framing, is_last=True)
    received = answers(stack.url, request, smuggled)
    assert received.count(b"HTTP/1.1 ") == 1 and b"HTTP/1.1 400" in received, received[:2000]
    assert b"not valid JSON" in received


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_turns_that_ask_for_another_protocol_are_served_however_they_are_cut(
    stack: Stack, size: int
) -> None:
    """As Java's default client asks. Another turn, and one that does not ask, come behind it."""
    settings = "http2-settings: AAMAAABkAAQAAP__"
    requests = turn_of("one", "h2c", settings) + turn_of("two", "h2c", settings)
    requests += turn_of("three", None, "connection: close")
    received = answers(
        stack.url, *(requests[at : at + size] for at in range(0, len(requests), size))
    )
    assert received.count(b"HTTP/1.1 200") == 3, received[:2000]
    prompts = [json.dumps(to_builtins(request.prompt)) for request in stack.engine.requests]
    assert ["one" in prompts[0], "two" in prompts[1], "three" in prompts[2]] == [True] * 3


def turn_of(question: str, upgrade: str | None, *further: str) -> bytes:
    content = json.dumps(body(messages=[{"role": "user", "content": question}])).encode()
    framing = (JSON, f"content-length: {len(content)}", *further)
    return head("POST /v1/messages", upgrade, *framing) + content
