"""HTTP to engines, over real sockets: what breaks, what is silent, and what only looks like it."""

import asyncio
import socket
from contextlib import aclosing

import pytest
from structlog.testing import capture_logs

from gateway.base.errors import EngineLost, EngineTimeout
from gateway.routing.client import CannotConnect, EngineHttp, Timeouts
from gateway.routing.engine import Engine
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import serve

pytestmark = pytest.mark.anyio
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def read_pieces(answer: bytes, *, then_silent: bool = False) -> list[bytes]:
    """The pieces of the answer of a server that has read the request's head."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if then_silent:
            await reader.read()  # until the other side has had enough
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    seconds = Timeouts(0.5 if then_silent else 20.0, 2.0)
    async with server, aclosing(EngineHttp()) as http:
        response = await http.send("GET", url, {}, None, seconds)
        try:
            return [piece async for piece in response]
        finally:
            response.close()


async def test_what_falls_silent_is_a_timeout_and_what_breaks_is_a_lost_engine() -> None:
    assert await read_pieces(HEAD + b"3\r\none\r\n0\r\n\r\n") == [b"one"]
    for answer in (b"", HEAD + b"3\r\none\r\n"):
        with pytest.raises(EngineTimeout):
            await read_pieces(answer, then_silent=True)
    with pytest.raises(EngineLost):
        await read_pieces(HEAD + b"3\r\none\r\n5\r\ntw")


async def test_a_large_body_has_the_time_that_it_takes_to_be_sent() -> None:
    body = bytes(12 << 20)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(6.0)
        await reader.readexactly(len(body))
        writer.write(HEAD + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1 << 16)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, aclosing(EngineHttp()) as http:
        response = await http.send("POST", url, {}, body, Timeouts(0.5, 0.5))
        assert await response.read() == b""


async def test_a_reader_that_pauses_hears_no_silence() -> None:
    """Only a wait for the engine counts: what has arrived may lie here for any time."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, aclosing(EngineHttp()) as http:
        response = await http.send("GET", url, {}, None, Timeouts(0.2, 2.0))
        text = b""
        async for piece in response:
            text += piece
            await asyncio.sleep(3.0)
        assert text == b"onetwo"


@pytest.mark.parametrize("is_found", [False, True])
async def test_a_name_that_is_not_found_or_an_address_that_is_silent_makes_no_engine_down(
    is_found: bool,
) -> None:
    """It is unsure: DNS or the network may be back in a moment."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as waiting:
        waiting.connect(full.getsockname())  # the backlog has no place for another
        url = f"http://127.0.0.1:{full.getsockname()[1]}" if is_found else "http://a.invalid"
        async with aclosing(EngineHttp()) as http:
            engine = Engine("one", url, "secret", http, down_seconds=60.0)
            engine.status = "ready"
            with pytest.raises(CannotConnect) as failed:
                await engine.cancel("r")
            assert not failed.value.is_refused
            await engine.poll()
            assert engine.status == "unsure"


async def test_an_engine_that_was_down_is_told_to_be_back_once_though_a_poll_met_it_starting() -> (
    None
):
    scripted = ScriptedEngine(is_ready=False)
    with serve(scripted) as url, capture_logs() as logged:
        async with aclosing(EngineHttp()) as http:
            engine = Engine("one", "http://127.0.0.1:1", scripted.secret, http)
            await engine.poll()
            assert engine.status == "down"
            engine.url = url
            await engine.poll()
            assert engine.status == "starting"
            scripted.is_ready = True
            for _ in range(2):
                await engine.poll()
                assert engine.is_ready
    assert [entry["event"] for entry in logged] == ["engine_down", "engine_back"]
