"""Clients that ask for another protocol, on connections that carry further requests."""

import json
import logging
import socket
from pathlib import Path

import pytest

from tests.gateway.bodies import body
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, serve, serve_gateway

WAIT_SECONDS = 120
UPGRADES = ("h2c", "websocket")


def head(line: str, upgrade: str, *further: str, is_last: bool = False) -> bytes:
    lines = [
        f"{line} HTTP/1.1",
        "host: x",
        f"x-api-key: {API_KEY}",
        f"connection: Upgrade{', close' if is_last else ''}",
        f"upgrade: {upgrade}",
        *further,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def answers(url: str, *sent: bytes) -> bytes:
    """All that comes back until the gateway closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as client:
        for each in sent:
            client.sendall(each)
        while piece := client.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_a_request_without_a_body_is_answered_and_not_logged(
    tmp_path: Path, upgrade: str, caplog: pytest.LogCaptureFixture
) -> None:
    """RFC 9110, 7.8: a server may ignore an Upgrade."""
    with serve(ScriptedEngine()) as engine, serve_gateway(tmp_path, engine) as url:
        with caplog.at_level(logging.DEBUG, "uvicorn.error"):
            received = answers(url, head("GET /v1/models", upgrade, is_last=True))
    assert received.count(b"HTTP/1.1 200") == 1, received[:2000]
    assert "pgrade" not in caplog.text and "WebSocket" not in caplog.text


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("framing", ["content-length: 30", "transfer-encoding: chunked"])
def test_a_body_is_never_taken_for_the_next_request(
    tmp_path: Path, upgrade: str, framing: str
) -> None:
    """A proxy before the gateway would give the second answer to another client."""
    smuggled = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    with serve(ScriptedEngine()) as engine, serve_gateway(tmp_path, engine) as url:
        received = answers(url, head("POST /v1/messages", upgrade, framing), smuggled)
    assert received.count(b"HTTP/1.1 ") == 1 and b"HTTP/1.1 400" in received, received[:2000]
    assert b"Upgrade" in received


def test_a_turn_that_asks_for_another_protocol_is_told_what_to_do(tmp_path: Path) -> None:
    content = json.dumps(body()).encode()
    framing = ["content-type: application/json", f"content-length: {len(content)}"]
    engine = ScriptedEngine()
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        received = answers(url, head("POST /v1/messages", "h2c", *framing) + content)
    assert b"HTTP/1.1 400" in received and b"send HTTP/1.1" in received
    assert not engine.requests
