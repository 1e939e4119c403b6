"""The circuit breaker of one engine: failed turns stop further ones for a while. Pure.

    closed ── FAILURES in a row ──▶ open ── pause over ──▶ half-open ── success ──▶ closed
                                      ▲                         │
                                      └──── failure (pause x2) ─┘

Failures are connections that were refused or broke, silences, and answers that broke the protocol.
A refusal (overloaded, prompt too long) is an answer, so the engine works. While half-open, one turn
at a time goes through. Its first frame is the success. The next turn may go through when it ends.
"""

from gateway.structs.fleet import BreakerState

FAILURES = 3
"""How many failures in a row, without an answer between them, open the breaker."""
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0


class Breaker:
    def __init__(self) -> None:
        self.num_opened = 0
        self._num_failures = 0
        self._pause = FIRST_PAUSE_SECONDS
        self.open_until: float | None = None
        """None while closed."""
        self._probe: str | None = None

    def state(self, now: float) -> BreakerState:
        if self.open_until is None:
            return "closed"
        return "open" if now < self.open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Whether the engine may get a turn: none while open, one at a time while half-open."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and self._probe is None)

    def sent(self, turn: str, now: float) -> None:
        """Note that a turn was sent to the engine. While half-open it is the probe."""
        if self.state(now) == "half_open" and self._probe is None:
            self._probe = turn

    def answered(self) -> None:
        """Close the breaker, because a stream began. The next failure opens it again."""
        if self.open_until is not None:
            self.reset()
            self._num_failures = FAILURES - 1

    def failed(self, turn: str, now: float) -> None:
        """Note that the engine was gone or silent for a turn. A turn from before the breaker opened
        changes nothing."""
        if self.open_until is None:
            self._num_failures += 1
            if self._num_failures >= FAILURES:
                self._open(now)
        elif turn == self._probe:
            self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)
            self._open(now)

    def left(self, turn: str) -> None:
        """Note that the turn is over. It may have told nothing about the engine."""
        if turn == self._probe:
            self._probe = None

    def reset(self) -> None:
        """Forget all failures: a turn was completed, or refused because of its own content, or
        another process runs at the engine's address."""
        self._num_failures = 0
        self._pause = FIRST_PAUSE_SECONDS
        self.open_until = None
        self._probe = None

    def _open(self, now: float) -> None:
        self.open_until = now + self._pause
        self._probe = None
        self.num_opened += 1
