"""A connection's timers, under a clock of the test: none concerns another request than its own."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from gateway.http.admitted import Connections
from gateway.http.connections import ConnectionLimits, guarded
from gateway.http.half_closed import HalfClosed

REQUEST_SECONDS = 30.0
EARLY = b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


class Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Timers:
    """An event loop's timers. `tasks` run in the loop of the test."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[Timer] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self._timers.append(Timer(self._now + seconds, call))
        return self._timers[-1]

    def create_task(self, work: Coroutine[Any, Any, None], **given: Any) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, **given)

    def advance(self, seconds: float) -> int:
        """Let time pass. Return how many timers were due."""
        until, num_due = self._now + seconds, 0
        while True:
            due = [one for one in self._timers if not one.is_cancelled and one.at <= until]
            if not due:
                break
            first = min(due, key=lambda one: one.at)
            self._timers.remove(first)
            self._now = first.at
            first.call()
            num_due += 1
        self._now = until
        return num_due


class Wire(asyncio.Transport):
    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})
        self.sent = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def answer_early(scope: Any, receive: Any, send: Any) -> None:
    """Answers without a look at the body, but for `/read`."""
    while scope["path"] == "/read" and (await receive()).get("more_body"):
        pass
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    await send(start)
    await send({"type": "http.response.body", "body": b""})


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def connected(timers: Timers, wire: Wire) -> Any:
    config = uvicorn.Config(
        answer_early, ws="none", log_config=None, lifespan="off", timeout_keep_alive=75
    )
    config.load()
    limits = ConnectionLimits(
        REQUEST_SECONDS, 60.0, lambda reason, request_id=None: None, Connections(10, 10)
    )
    made = cast(Any, guarded(limits))(
        config=config, server_state=ServerState(), app_state={}, _loop=timers
    )
    made.connection_made(wire)
    return made


def test_the_deadline_of_a_body_that_nobody_read_ends_with_that_body() -> None:
    """It closed the connection in the body of a later request, which had its time still."""

    async def run() -> None:
        timers, (end, other) = Timers(), socket.socketpair()
        with end, other:
            wire = Wire(end)
            connection = connected(timers, wire)
            connection.data_received(EARLY)
            await settled()
            assert wire.sent.count(b"200 OK") == 1
            timers.advance(REQUEST_SECONDS / 2)
            connection.data_received(b"{}{}" + EARLY.replace(b"/none", b"/read"))
            await settled()
            timers.advance(REQUEST_SECONDS * 0.75)
            assert not wire.is_closed
            connection.data_received(b"{}{}")
            await settled()
            assert wire.sent.count(b"200 OK") == 2

    asyncio.run(run())


def test_a_body_that_nobody_reads_has_a_deadline() -> None:
    async def run() -> None:
        timers, (end, other) = Timers(), socket.socketpair()
        with end, other:
            wire = Wire(end)
            connection = connected(timers, wire)
            connection.data_received(EARLY + b"{}")
            await settled()
            timers.advance(REQUEST_SECONDS - 1)
            assert not wire.is_closed
            timers.advance(2)
            assert wire.is_closed

    asyncio.run(run())


def test_a_client_that_has_ended_its_side_costs_few_looks() -> None:
    """Thousands may wait so, and all others on the event loop pay for each look."""
    timers, probes = Timers(), []
    end, other = socket.socketpair()
    with end, other:

        def probe() -> bytes:
            probes.append(True)
            return b" "

        wire = Wire(end)
        HalfClosed(wire, cast(asyncio.AbstractEventLoop, timers), probe)
        assert timers.advance(60.0) <= 75
        assert len(probes) == 12 and wire.sent == b" " * 12
        other.close()
        timers.advance(6.0)
        assert wire.is_closed, "it has left"
