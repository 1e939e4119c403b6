"""The load of `gateway.py`: HTTP/1.1 over raw sockets, which leave the CPU to what is measured.

Every answer is checked: a status other than 200, or a text that is not the stub's, ends the
measurement.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.load import Measured, closed_loop


@dataclass(frozen=True, slots=True)
class RawRequest:
    """Ready to be sent; `mark` must be in the answer `num_marks` times."""

    data: bytes
    mark: bytes
    num_marks: int


class RawConnection(asyncio.Protocol):
    """One connection; `ask` is one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parts: list[bytes] = []
        self._left: int | None = None
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the connection was lost"))

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._left is None:
            head, end, body = b"".join(self._parts).partition(b"\r\n\r\n")
            if not end:
                return
            self._left = _content_length(head)
            data = body
        if self._left >= 0:
            self._left -= len(data)
            is_over = self._left <= 0
        else:
            tail = data if len(data) >= 5 else b"".join(self._parts[-5:])
            is_over = tail.endswith(b"0\r\n\r\n")
        if is_over and self._answer is not None and not self._answer.done():
            self._answer.set_result(b"".join(self._parts))

    async def ask(self, request: RawRequest) -> None:
        """Raise RuntimeError for any other answer than the stub's."""
        self._parts, self._left = [], None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request.data)
        answer = await asyncio.wait_for(self._answer, 60)
        is_whole = answer.count(request.mark) == request.num_marks
        if not answer.startswith(b"HTTP/1.1 200 ") or not is_whole:
            raise RuntimeError(f"not the stub's answer: {answer[:2000]!r}")

    def close(self) -> None:
        self._transport.close()


async def drive(
    port: int, requests: Sequence[RawRequest], num_connections: int, num_requests: int
) -> Measured:
    """Ask so many times over so many connections; connection n begins with request n."""
    loop, connections = asyncio.get_running_loop(), []
    try:
        for _ in range(num_connections):
            pair = await loop.create_connection(RawConnection, "127.0.0.1", port)
            connections.append(pair[1])
        return await closed_loop(
            connections, num_requests, lambda one, number: one.ask(requests[number % len(requests)])
        )
    finally:
        for connection in connections:
            connection.close()


def post(
    path: str, headers: dict[str, str], body: bytes, mark: bytes, num_marks: int
) -> RawRequest:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return RawRequest("\r\n".join([*lines, "", ""]).encode() + body, mark, num_marks)


def _content_length(head: bytes) -> int:
    """-1 where the body is chunked."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return -1
