"""A whole answer goes to the socket in one write."""

from typing import Any, cast

from gateway.http.held_head import hold_head


class _Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True


class _Cycle:
    def __init__(self, transport: _Transport) -> None:
        self.transport: Any = transport


def test_head_and_body_are_one_write_and_what_follows_is_another() -> None:
    transport = _Transport()
    cycle = _Cycle(transport)
    hold_head(cast(Any, cycle))
    cycle.transport.write(b"head ")
    assert transport.written == []
    cycle.transport.write(b"body")
    cycle.transport.write(b"next answer")
    assert transport.written == [b"head body", b"next answer"]


def test_a_connection_that_ends_before_the_body_is_closed() -> None:
    transport = _Transport()
    cycle = _Cycle(transport)
    hold_head(cast(Any, cycle))
    cycle.transport.write(b"head ")
    cycle.transport.close()
    assert transport.is_closed and transport.written == []
