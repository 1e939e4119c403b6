"""Connections of a socket that processes share: who takes them, and that nobody waits for ever."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.http.accepting import Acceptor, Board


def test_a_process_with_more_connections_than_another_that_serves_has_the_most() -> None:
    board, descriptor = Board.made(3)
    other = Board(descriptor, 3)
    os.close(descriptor)
    assert not board.tell(1, 5)  # nobody else serves
    assert not other.tell(2, 5)
    assert other.tell(2, 6)
    assert not board.tell(1, 5)
    other.leave(1)
    assert not board.tell(2, 6)
    assert not board.tell(3, 0)
    assert board.tell(2, 1)


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


class Greeting(asyncio.Protocol):
    """Says the name of its acceptor."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._name)
        transport.close()


async def greeted(server: socket.socket, number: int) -> list[bytes]:
    host, port = server.getsockname()

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        name = await reader.read()
        writer.close()
        return name

    return await asyncio.gather(*(one() for _ in range(number)))


@pytest.mark.parametrize("has_most", [False, True])
def test_every_connection_is_taken_also_by_the_one_that_has_the_most(has_most: bool) -> None:
    async def run() -> None:
        with listening() as server:
            acceptor = Acceptor(server, lambda: Greeting(b"one"), lambda: has_most)
            async with asyncio.timeout(60):
                assert await greeted(server, 50) == [b"one"] * 50
            acceptor.close()
            await acceptor.wait_closed()

    asyncio.run(run())


def test_behind_one_that_is_closed_another_takes_all() -> None:
    async def run() -> None:
        with listening() as server, server.dup() as shared:
            first = Acceptor(server, lambda: Greeting(b"first"), lambda: False)
            other = Acceptor(shared, lambda: Greeting(b"other"), lambda: True)
            async with asyncio.timeout(60):
                assert set(await greeted(server, 50)) <= {b"first", b"other"}
                first.close()
                assert await greeted(server, 20) == [b"other"] * 20
            other.close()

    asyncio.run(run())
