"""A loop that was held up by one request cuts nobody's stream whose data waits in the socket."""

import asyncio
import socket
import threading
import time

import pytest

from gateway.base.errors import EngineTimeout
from gateway.routing.client import EngineHttp, timeouts

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n"
SILENCE_SECONDS = 1.0
STALL_SECONDS = 2.5


class Talker(threading.Thread):
    """A server that does not depend on the loop under test: it says "two" while that is held up."""

    def __init__(self, *, is_silent: bool) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_silent = is_silent
        self.port = self._listener.getsockname()[1]
        self.is_held_up, self.is_over = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        connection, _ = self._listener.accept()
        with connection, self._listener:
            connection.recv(65536)
            connection.sendall(HEAD)
            self.is_held_up.wait(30)
            if not self._is_silent:
                connection.sendall(b"3\r\ntwo\r\n")
            self.is_over.wait(30)
            if not self._is_silent:
                connection.sendall(b"5\r\nthree\r\n0\r\n\r\n")


async def read(talker: Talker) -> list[bytes]:
    def hold_up() -> None:
        talker.is_held_up.set()
        time.sleep(STALL_SECONDS)

    async with EngineHttp() as http:
        response = await http.send(
            "GET", f"http://127.0.0.1:{talker.port}/", {}, None, timeouts(SILENCE_SECONDS, 20.0)
        )
        asyncio.get_running_loop().call_later(SILENCE_SECONDS / 4, hold_up)
        pieces = []
        try:
            async for piece in response.chunks():
                pieces.append(piece)
                if piece.endswith(b"two"):
                    talker.is_over.set()
        finally:
            talker.is_over.set()
            response.close()
        return pieces


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_stalled_loop_looks_at_the_socket_before_it_says_silence(loop: str) -> None:
    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        pieces = runner.run(read(Talker(is_silent=False)))
    assert b"".join(pieces) == b"onetwothree"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_engine_that_says_nothing_is_silent_behind_a_stall_too(loop: str) -> None:
    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner, pytest.raises(EngineTimeout):
        runner.run(read(Talker(is_silent=True)))
