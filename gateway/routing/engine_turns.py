"""The turns at one engine, and what they say of it."""

from collections.abc import Callable, Sequence

from engine.protocol import Started
from gateway.routing.breaker import Breaker
from gateway.routing.cost import Load
from gateway.routing.held import PrefixEnd, ResidencyIndex


class EngineTurns:
    """`holdings`, `load` and `breaker` are this gateway's knowledge for routing."""

    def __init__(
        self, name: str, holdings: ResidencyIndex, load: Load, monotonic: Callable[[], float]
    ) -> None:
        self.name = name
        self.holdings = holdings
        self.load = load
        self.breaker = Breaker()
        self.monotonic = monotonic

    def assign(
        self,
        turn: str,
        ends: Sequence[PrefixEnd],
        to_prefill: int,
        *,
        is_batch: bool,
        workspace: str,
    ) -> None:
        """A turn goes to the engine, which has to compute `to_prefill` of its tokens."""
        now = self.monotonic()
        self.load.assign(turn, to_prefill, now, is_batch=is_batch, workspace=workspace)
        self.breaker.sent(turn, now)
        self.holdings.touch(ends)
        self.holdings.expect(ends, now)

    def started(self, turn: str, started: Started, names: Sequence[str]) -> None:
        """The turn's first frame has come. `names` are the request's, in their order."""
        now = self.monotonic()
        self.breaker.answered()
        self.load.started(turn, started.usage.computed_tokens, now)
        self.holdings.learn(started, names, now)

    def succeeded(self) -> None:
        """A turn was completed, or refused because of its own content."""
        self.breaker.succeeded()

    def returned(self, turn: str) -> None:
        """The engine refused the turn. It computed nothing of it."""
        self.load.returned(turn, self.monotonic())

    def left(self, turn: str, ends: Sequence[PrefixEnd], *, has_started: bool) -> None:
        """The turn is over, in any way. A second call does nothing."""
        self.load.ended(turn)
        self.breaker.left(turn)
        if not has_started:
            self.holdings.disappoint(ends)

    def broke(self, turn: str) -> None:
        """The engine was gone or silent for the turn."""
        self.breaker.failed(turn, self.monotonic())
