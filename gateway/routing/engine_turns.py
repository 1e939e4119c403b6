"""The turns at one engine, and what they say of it.

What a turn changes here is told to the other workers of the gateway too.
"""

from collections.abc import Callable, Sequence

import msgspec

from engine.protocol import Started
from gateway.routing.breaker import Breaker
from gateway.routing.cost import Load
from gateway.routing.held import PrefixEnd, ResidencyIndex
from gateway.routing.news import Answered, Assigned, Broke, Ended, News


class EngineTurns:
    """`holdings`, `load` and `breaker` are this gateway's knowledge for routing."""

    def __init__(
        self,
        name: str,
        holdings: ResidencyIndex,
        load: Load,
        monotonic: Callable[[], float],
        tell: Callable[[News], None] | None,
    ) -> None:
        self.name = name
        self.holdings = holdings
        self.load = load
        self.breaker = Breaker()
        self.monotonic = monotonic
        self._tell = tell
        # Of turns that were told: the names that were expected with them.
        self._told: dict[str, list[str]] = {}
        self._succeeded: set[str] = set()

    def assign(
        self,
        turn: str,
        ends: Sequence[PrefixEnd],
        to_prefill: int,
        tokens: int,
        *,
        is_batch: bool,
        workspace: str,
    ) -> None:
        """A turn goes to the engine, which has to compute `to_prefill` of its `tokens`."""
        now = self.monotonic()
        self.load.assign(turn, to_prefill, now, is_batch=is_batch, workspace=workspace)
        self.breaker.sent(turn, now)
        self.holdings.touch(ends)
        expected = self.holdings.expect(ends, now)
        if self._tell is not None:
            self._told[turn] = expected
            told = Assigned(self.name, turn, workspace, is_batch, tokens, to_prefill, expected)
            self._tell(told)

    def started(self, turn: str, started: Started, names: Sequence[str]) -> None:
        """The turn's first frame has come. `names` are the request's, in their order."""
        now, computed = self.monotonic(), started.usage.computed_tokens
        self.breaker.answered()
        self.load.started(turn, computed, now)
        self.holdings.learn(started, names, now)
        if self._tell is None:
            return
        told = Answered(self.name, turn, computed)
        if self.holdings.source == "learned":
            held = started.receipt.num_held
            tokens = started.receipt.name_tokens[:held]
            receipt = msgspec.structs.replace(started.receipt, name_tokens=tokens)
            told = Answered(self.name, turn, computed, started.epoch, receipt, list(names[:held]))
        self._tell(told)

    def succeeded(self, turn: str) -> None:
        """The turn was completed, or refused because of its own content."""
        self.breaker.succeeded()
        if turn in self._told:
            self._succeeded.add(turn)

    def returned(self, turn: str) -> None:
        """The engine refused the turn. It computed nothing of it."""
        self.load.returned(turn, self.monotonic())
        self._tell_end(turn, is_returned=True, has_started=False)

    def left(self, turn: str, ends: Sequence[PrefixEnd], *, has_started: bool) -> None:
        """The turn is over, in any way. A second call does nothing."""
        self.load.ended(turn)
        self.breaker.left(turn)
        if not has_started:
            self.holdings.disappoint(ends)
        self._tell_end(turn, is_returned=False, has_started=has_started)

    def broke(self, turn: str) -> None:
        """The engine was gone or silent for the turn."""
        self.breaker.failed(turn, self.monotonic())
        if self._tell is not None:
            self._tell(Broke(self.name, turn))

    def _tell_end(self, turn: str, *, is_returned: bool, has_started: bool) -> None:
        """Tell the others once that a turn is over that they were told of."""
        if self._tell is None or (expected := self._told.pop(turn, None)) is None:
            return
        is_success = turn in self._succeeded
        self._succeeded.discard(turn)
        disappointed = [] if has_started else expected
        self._tell(Ended(self.name, turn, is_returned, disappointed, is_success))
