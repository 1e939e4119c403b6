"""HTTP to engines, over real sockets: what breaks, what is silent, and what only looks like it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.base.errors import EngineLost, EngineTimeout
from gateway.routing.client import CannotConnect, EngineHttp, EngineResponse, timeouts
from gateway.routing.engine import Engine

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def asked(serve: Serve, read_seconds: float) -> AsyncIterator[EngineResponse]:
    """The answer of a server that has read the request's head."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, EngineHttp() as http:
        response = await http.send("GET", url, {}, None, timeouts(read_seconds, 20.0))
        yield response
        response.close()


async def everything(response: EngineResponse) -> bytes:
    return b"".join([piece async for piece in response.chunks()])


@pytest.mark.anyio
async def test_what_falls_silent_behind_its_first_piece_is_a_timeout() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"one"))
        await reader.read()  # until the other side has had enough

    async with asked(serve, 0.5) as response:
        pieces = response.chunks()
        assert await anext(pieces) == b"one"
        with pytest.raises(EngineTimeout):
            await anext(pieces)


@pytest.mark.anyio
async def test_what_never_answers_is_a_timeout() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    with pytest.raises(EngineTimeout):
        async with asked(serve, 0.5):
            pass


@pytest.mark.anyio
async def test_a_connection_that_breaks_is_a_lost_engine() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"one") + b"5\r\ntw")

    async with asked(serve, 20.0) as response:
        with pytest.raises(EngineLost):
            await everything(response)


@pytest.mark.anyio
async def test_where_nobody_listens_nothing_was_sent() -> None:
    async with asked(_answer, 20.0) as response:
        assert await everything(response) == b"all"
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with EngineHttp() as http:
        with pytest.raises(CannotConnect) as refused:
            await http.send("GET", f"http://127.0.0.1:{port}/", {}, None, timeouts(20.0, 20.0))
    assert refused.value.is_refused


@pytest.mark.anyio
@pytest.mark.parametrize("is_found", [False, True])
async def test_a_name_that_is_not_found_or_an_address_that_is_silent_makes_no_engine_down(
    is_found: bool,
) -> None:
    """It is unsure: DNS or the network may be back in a moment."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as waiting:
        waiting.connect(full.getsockname())  # the backlog has no place for another
        url = f"http://127.0.0.1:{full.getsockname()[1]}" if is_found else "http://a.invalid"
        async with EngineHttp() as http:
            engine = Engine("one", url, "secret", http, down_seconds=60.0)
            engine.status = "ready"
            with pytest.raises(CannotConnect) as failed:
                await engine.cancel("r")
            assert not failed.value.is_refused
            await engine.poll()
            assert engine.status == "unsure"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(b"all") + b"0\r\n\r\n")
    await writer.drain()
