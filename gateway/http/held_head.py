"""The head of a whole answer goes out with its body: one write to the socket, not two."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HOLD_HEAD = "hold_head"
"""Where a request's state has the function that holds the head of its answer.

It is called by who sends the body right behind the head.
"""


class HeldHead:
    """The transport of one answer until its body comes. It keeps the first write for the second."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
            return
        self._cycle.transport = self._transport
        self._transport.write(self._head + data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def hold_head(cycle: RequestResponseCycle) -> None:
    cycle.transport = HeldHead(cycle)  # type: ignore[assignment]
