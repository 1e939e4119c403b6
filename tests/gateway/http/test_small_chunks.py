"""Bodies in very many small pieces: the event loop pays for each, whatever its size."""

import json
import socket
from contextlib import suppress
from typing import Any

import pytest

from engine.protocol import TextPart
from gateway.http.connections import FREE_PIECES, LEAST_PIECE_BYTES
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.serving import API_KEY

HEAD = (
    f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {API_KEY}\r\n"
    "anthropic-version: 2023-06-01\r\ncontent-type: application/json\r\n"
    "transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
).encode()


def answered(stack: Stack, request: dict[str, Any], chunk_bytes: int) -> tuple[int, bytes]:
    """The status and the body of the answer to a request in chunks of one size."""
    content = json.dumps(request).encode()
    parts = [content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)]
    sent = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as raw:
        with suppress(OSError):  # it may be refused while it is still sent
            raw.sendall(HEAD + sent)
        seen = bytearray()
        with suppress(ConnectionResetError):
            while piece := raw.recv(65536):
                seen += piece
    head, _, answer = bytes(seen).partition(b"\r\n\r\n")
    return int(head.split()[1]), answer


def asked(num_bytes: int) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": "x" * num_bytes}])


@pytest.mark.parametrize(
    ("num_bytes", "chunk_bytes"),
    [(FREE_PIECES // 2, 1), (200_000, LEAST_PIECE_BYTES), (200_000, 1024), (30, 7)],
)
def test_a_body_in_chunks_is_read(stack: Stack, num_bytes: int, chunk_bytes: int) -> None:
    status, answer = answered(stack, asked(num_bytes), chunk_bytes)
    assert status == 200, answer
    [part] = stack.engine.requests[-1].prompt.messages[-1].parts
    assert isinstance(part, TextPart) and part.text == "x" * num_bytes


@pytest.mark.parametrize("chunk_bytes", [1, LEAST_PIECE_BYTES - 2])
def test_a_body_in_very_many_tiny_chunks_is_refused(stack: Stack, chunk_bytes: int) -> None:
    num_before = len(stack.engine.requests)
    status, answer = answered(stack, asked(300_000), chunk_bytes)
    assert status == 400 and b"chunks of less than" in answer
    assert len(stack.engine.requests) == num_before
    assert answered(stack, asked(10), 8)[0] == 200
