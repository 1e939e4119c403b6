"""What a connection may bring to an engine, with the secret and without it."""

import asyncio
import gc
import json
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn

from engine.asgi import num_descriptors
from engine.places import Split, split
from engine.reading import FRAMING_TOLD, MAX_HEAD_BYTES, MAX_PIPELINED
from engine.serve import connections
from engine.serve.connections import BoundedProtocol, engine_places
from tests.conformance.engines import SECRET, Engine, running_engine

PATIENCE = 180


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine("synthetic", {"SYNTHETIC_PREFILL_US": 0}) as running:
        yield running


def answer_to(engine: Engine, *parts: bytes) -> bytes:
    """All that comes back until the engine closes the connection."""
    host, port = engine.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
        with suppress(OSError):  # it may be refused while it is still sent
            for part in parts:
                raw.sendall(part)
        with suppress(ConnectionResetError):
            while piece := raw.recv(65536):
                received += piece
    return received


def head(secret: str = SECRET) -> bytes:
    text = f"""POST /v1/count HTTP/1.1
host: x
authorization: Bearer {secret}
content-type: application/json
transfer-encoding: chunked
connection: close

"""
    return text.replace("\n", "\r\n").encode()


def chunked(content: bytes, size: int) -> bytes:
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(("num_bytes", "size"), [(10, 1), (200_000, 16), (2_000_000, 65_536)])
def test_a_body_in_chunks_reaches_its_call(engine: Engine, num_bytes: int, size: int) -> None:
    content = b"{" + b" " * num_bytes
    answer = answer_to(engine, head(), chunked(content, size))
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "invalid_request"


def test_endless_headers_and_trailers_end_their_connection(engine: Engine) -> None:
    endless = b"x-a: " + b"b" * (4 * MAX_HEAD_BYTES)
    answer = answer_to(engine, head()[:-2] + endless)
    assert answer.startswith(b"HTTP/1.1 400") and b"the headers have more than" in answer
    answer = answer_to(engine, head(), b"0\r\n" + endless)
    assert answer.count(b"HTTP/1.1 400") == 1
    assert engine.client.get("/v1/describe").status_code == 200


@pytest.mark.parametrize("piece", [b"1\r\n \r\n" * 1000, b"1;" + b"e" * 60_000 + b"\r\n \r\n"])
@pytest.mark.parametrize("secret", [SECRET, "wrong"])
def test_endless_framing_ends_its_connection(engine: Engine, piece: bytes, secret: str) -> None:
    """Without the secret nothing of the body is read; with it, framing has a bound."""
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
        with suppress(ConnectionError):
            raw.sendall(head(secret).replace(b"connection: close\r\n", b""))
            for _ in range(10_000):
                raw.sendall(piece)
            pytest.fail("it was never cut off")
        answer = raw.recv(65536)
    if secret == SECRET:
        assert answer.startswith(b"HTTP/1.1 400") and FRAMING_TOLD.encode() in answer
    else:
        assert answer.startswith(b"HTTP/1.1 401")


def test_requests_that_wait_on_a_connection_are_few_and_no_http_is_told_in_an_envelope(
    engine: Engine,
) -> None:
    """Thousands in one packet were all made ready at once, and each answer let in thousands."""
    probe = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    last = probe.replace(b"host: x", b"host: x\r\nconnection: close")
    answer = answer_to(engine, probe * MAX_PIPELINED + last)
    assert answer.count(b"HTTP/1.1 200") == MAX_PIPELINED + 1
    answer = answer_to(engine, probe * 5000 + last)
    assert answer.count(b"HTTP/1.1 ") < 1000 and b"requests wait on the connection" in answer
    answer = answer_to(engine, b"\x16\x03\x01\x02\x00\x01\x00")
    error = {"code": "invalid_request", "message": "the request is not valid HTTP"}
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == error


async def slow_answer(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, and answers a second after it, when a head that never comes is given up."""
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


@asynccontextmanager
async def served(parts: Split | None = None) -> AsyncIterator[int]:
    """The port of a server with the engine's bounds."""
    protocol: Any = partial(BoundedProtocol, engine_places(parts or split(4096)))
    config = uvicorn.Config(slow_answer, port=0, http=protocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


@pytest.mark.parametrize(
    ("beginning", "ending"),
    [
        (b"", b"the head did not come"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"the head did not come"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n123", b"no byte of the body"),
        # It does not end the answer before it.
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT", b"done"),
    ],
)
@pytest.mark.anyio
async def test_a_request_that_never_comes_whole_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, beginning: bytes, ending: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.5)
    async with served() as port, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        answer = await reader.read()
        assert ending in answer and answer.startswith(b"HTTP/1.1 200") == (ending == b"done")
        writer.close()


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-a: " + b"b" * 2 * MAX_HEAD_BYTES,
        b"\x16\x03\x01\x02\x00",
    ],
)
@pytest.mark.anyio
async def test_a_connection_that_has_ended_is_gone_without_the_collector(beginning: bytes) -> None:
    """Its cycles waited for Python's collector, with its head of up to 64 KB."""

    def num_protocols() -> int:
        return sum(isinstance(tracked, BoundedProtocol) for tracked in gc.get_objects())

    async with served() as port, asyncio.timeout(PATIENCE):
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(beginning)
                with suppress(ConnectionError):
                    await reader.read()
                writer.close()
            async with asyncio.timeout(30):
                while num_protocols():
                    await asyncio.sleep(0.05)
        finally:
            gc.enable()


@pytest.mark.anyio
async def test_a_connection_that_gives_way_is_told_so() -> None:
    """The newcomer was closed without a status, for as long as the others stayed."""
    async with served(Split(places=2, sockets=4)) as port, asyncio.timeout(PATIENCE):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        reply = await idle[0][0].read()
        assert reply.startswith(b"HTTP/1.1 503") and b"\r\nretry-after: 1\r\n" in reply
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["code"] == "overloaded"
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        for _, stream_writer in [*idle, (reader, writer)]:
            stream_writer.close()


@pytest.mark.parametrize(("soft", "most"), [(1024, 768), (resource.RLIM_INFINITY, 10**9)])
def test_an_endless_number_of_descriptors_is_no_bound_of_zero(
    monkeypatch: pytest.MonkeyPatch, soft: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert split(num_descriptors(sys.maxsize)).places >= most
