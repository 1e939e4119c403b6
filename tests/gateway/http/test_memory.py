"""A connection that has ended leaves nothing behind that only Python's collector would find."""

import gc
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gateway.http.connections import GuardedProtocol
from tests.gateway.conftest import Stack
from tests.gateway.serving import API_KEY, eventually
from tests.wire.test_wire import GOOD, HIDDEN, chunked, length, request

NUM_CONNECTIONS = 20
LONG = tuple(f"x-{number}: {'a' * 1000}" for number in range(50))
CLOSE = "connection: close"
SENT: dict[str, bytes] = {
    "a turn": request(*LONG, length(GOOD), CLOSE, content=GOOD),
    "a stream in chunks": request("transfer-encoding: chunked", CLOSE, content=chunked(GOOD)),
    "no key": request(*LONG, length(GOOD), CLOSE, content=GOOD).replace(API_KEY.encode(), b""),
    "a body that nobody reads": request("content-length: 9000").replace(API_KEY.encode(), b"")
    + b"{",
    "a wrong body": request(length(b"{}"), CLOSE, content=b"{}"),
    "no route": request(CLOSE, first="GET /nowhere HTTP/1.1"),
    "a list": request(CLOSE, first="GET /v1/models HTTP/1.1"),
    "the admin API without a key": request(CLOSE, first="GET /admin/v1/keys HTTP/1.1"),
    "metrics": request(CLOSE, first="GET /metrics HTTP/1.1"),
    "requests behind one another": HIDDEN * 4 + request(CLOSE, first="GET /v1/models HTTP/1.1"),
    "no HTTP": b"\x16\x03\x01\x02\x00",
    "too long a head": request(*LONG, *LONG),
    "too much framing": request("transfer-encoding: chunked") + b"1\r\n \r\n" * 10_000,
    "half a head": request()[:-2],
    "nothing": b"",
}
LEAVE_AT_ONCE = {"half a head", "nothing"}


@contextmanager
def collecting_nothing() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def num_protocols() -> int:
    return sum(isinstance(tracked, GuardedProtocol) for tracked in gc.get_objects())


def talk(url: str, kind: str) -> None:
    """Send it, read until the gateway closes, and leave."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as raw, suppress(ConnectionError):
        raw.sendall(SENT[kind])
        while kind not in LEAVE_AT_ONCE and raw.recv(65536):
            pass


@pytest.mark.parametrize("kind", SENT)
def test_a_connection_that_has_ended_is_gone_without_the_collector(stack: Stack, kind: str) -> None:
    """Cycles of 10,000 connections were 150 MB, which waited for a rare collection."""
    talk(stack.url, kind)
    eventually(lambda: num_protocols() == 0)
    with collecting_nothing():
        for _ in range(NUM_CONNECTIONS):
            talk(stack.url, kind)
        eventually(lambda: num_protocols() == 0, 30)
