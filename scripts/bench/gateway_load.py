"""The load of `gateway.py`: HTTP/1.1 over raw sockets, which leave the CPU to what is measured.

Every answer is checked: a status other than 200, or a text that is not the stub's, ends the
measurement.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.report import percentile


@dataclass(frozen=True, slots=True)
class RawRequest:
    """Ready to be sent; `mark` must be in the answer `num_marks` times."""

    data: bytes
    mark: bytes
    num_marks: int


@dataclass(slots=True)
class Measured:
    """Seconds of every answer in the order of their ends, and of the whole measurement."""

    seconds: list[float] = field(default_factory=list)
    wall_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Answers in a second."""
        return len(self.seconds) / self.wall_seconds

    def percentile(self, share: float) -> float:
        """In seconds."""
        return percentile(self.seconds, share)


class RawConnection(asyncio.Protocol):
    """One connection; `ask` is one request at a time."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._parts: list[bytes] = []
        self._missing: int | None = None
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the connection was lost"))

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._missing is None:
            head, end, data = b"".join(self._parts).partition(b"\r\n\r\n")
            if not end:
                return
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._missing = int(length or -1)  # below 0 where the body is chunked
        if self._missing >= 0:
            self._missing -= len(data)
            is_over = self._missing <= 0
        else:
            tail = data if len(data) >= 5 else b"".join(self._parts[-5:])
            is_over = tail.endswith(b"0\r\n\r\n")
        if is_over and self._answer is not None and not self._answer.done():
            self._answer.set_result(b"".join(self._parts))

    async def ask(self, request: RawRequest) -> None:
        """Raise RuntimeError for any other answer than the stub's."""
        self._parts, self._missing = [], None
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request.data)
        answer = await asyncio.wait_for(self._answer, 60)
        is_whole = answer.count(request.mark) == request.num_marks
        if not answer.startswith(b"HTTP/1.1 200 ") or not is_whole:
            raise RuntimeError(f"not the stub's answer: {answer[:2000]!r}")


async def drive(
    port: int, requests: Sequence[RawRequest], num_connections: int, num_requests: int
) -> Measured:
    """Ask so many times over so many connections, each again as soon as it has its answer."""
    loop, measured, numbers = asyncio.get_running_loop(), Measured(), iter(range(num_requests))

    async def work(connection: RawConnection) -> None:
        for number in numbers:
            begun = time.perf_counter()
            await connection.ask(requests[number % len(requests)])
            measured.seconds.append(time.perf_counter() - begun)

    connections = []
    try:
        for _ in range(num_connections):
            pair = await loop.create_connection(RawConnection, "127.0.0.1", port)
            connections.append(pair[1])
        begun = time.perf_counter()
        await asyncio.gather(*map(work, connections))
        measured.wall_seconds = time.perf_counter() - begun
    finally:
        for connection in connections:
            connection.transport.close()
    return measured


def post(
    path: str, headers: dict[str, str], body: bytes, mark: bytes, num_marks: int
) -> RawRequest:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return RawRequest("\r\n".join([*lines, "", ""]).encode() + body, mark, num_marks)
