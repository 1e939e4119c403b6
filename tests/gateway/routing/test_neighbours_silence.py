"""A loop that was held up by one request cuts nobody's stream whose data waits in the socket."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from gateway.base.errors import EngineTimeout
from gateway.routing.client import EngineHttp, timeouts

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n"
REST = b"3\r\ntwo\r\n0\r\n\r\n"
WAIT_SECONDS = 180.0


class Talker(threading.Thread):
    """A server that does not depend on the loop under test: it says the rest while that is held up.

    A silent one says no more than the beginning.
    """

    def __init__(self, *, is_silent: bool) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_silent = is_silent
        self.port = self._listener.getsockname()[1]
        self.is_held_up, self.has_said_all = threading.Event(), threading.Event()
        self.is_over = threading.Event()
        self.start()

    def run(self) -> None:
        connection, _ = self._listener.accept()
        with connection, self._listener:
            connection.recv(65536)
            connection.sendall(HEAD)
            self.is_held_up.wait(WAIT_SECONDS)
            if not self._is_silent:
                connection.sendall(REST)
            self.has_said_all.set()
            self.is_over.wait(WAIT_SECONDS)


class MovedLoop(asyncio.SelectorEventLoop):
    """Its time goes on by itself, and in steps."""

    moved_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.moved_seconds


class Case(NamedTuple):
    """A loop, the silence that it bears, and what holds it up for longer than that.

    The last is told what is to happen meanwhile.
    """

    loop: asyncio.AbstractEventLoop
    silence_seconds: float
    hold_up: Callable[[Callable[[], None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "asyncio":
        moved = MovedLoop()

        def move(meanwhile: Callable[[], None]) -> None:
            """Both timers are over in the same round, this one before that of the silence."""
            moved.moved_seconds = 2 * WAIT_SECONDS
            moved.call_at(0, meanwhile)

        return Case(moved, WAIT_SECONDS, move)

    def sleep(meanwhile: Callable[[], None]) -> None:
        """Nobody can move this loop's time. It looks at timers before it reads."""
        meanwhile()
        time.sleep(4.0)

    return Case(pytest.importorskip("uvloop").new_event_loop(), 3.0, sleep)


async def read(talker: Talker, case: Case) -> list[bytes]:
    def talk() -> None:
        talker.is_held_up.set()
        assert talker.has_said_all.wait(WAIT_SECONDS)

    async with EngineHttp() as http:
        url, limits = f"http://127.0.0.1:{talker.port}/", timeouts(case.silence_seconds, 20.0)
        response = await http.send("GET", url, {}, None, limits)
        pieces = []
        try:
            async for piece in response.chunks():
                pieces.append(piece)
                if pieces == [b"one"]:
                    # In the loop's next round, when this waits for the next bytes.
                    asyncio.get_running_loop().call_soon(case.hold_up, talk)
        finally:
            talker.is_over.set()
            response.close()
        return pieces


def run(case: Case, talker: Talker) -> list[bytes]:
    with asyncio.Runner(loop_factory=lambda: case.loop) as runner:
        return runner.run(read(talker, case))


def test_a_stalled_loop_looks_at_the_socket_before_it_says_silence(case: Case) -> None:
    assert b"".join(run(case, Talker(is_silent=False))) == b"onetwo"


def test_an_engine_that_says_nothing_is_silent_behind_a_stall_too(case: Case) -> None:
    with pytest.raises(EngineTimeout):
        run(case, Talker(is_silent=True))
