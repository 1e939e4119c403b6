"""Whether a turn may start now: the gateway's own bound on turns in flight and on its backlog."""

from gateway.errors import Overloaded

MAX_IN_FLIGHT = 2000
MAX_BACKLOG = 1_000_000


class Admission:
    def __init__(self) -> None:
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def admit(self, backlog: int) -> None:
        """Take one place, or raise Overloaded."""
        if self._in_flight >= MAX_IN_FLIGHT or backlog >= MAX_BACKLOG:
            raise Overloaded
        self._in_flight += 1

    def leave(self) -> None:
        self._in_flight -= 1
