"""Turns between admission and an engine: let in, and not yet the load of the engine they go to."""

from collections import Counter
from dataclasses import dataclass

from gateway.prompt.ask import Ask

_LEARNING = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedTurn:
    """What the queue knows of a turn."""

    ask: Ask
    # It was let in and is no engine's load yet. It will compute so many tokens.
    is_between: bool = False
    tokens: float = 0.0
    # An engine refused it after it was let in.
    is_again: bool = False
    # The tokens that the queue counts as served to its workspace.
    charged: int = 0

    @property
    def workspace(self) -> str:
        return self.ask.principal.workspace

    @property
    def is_row(self) -> bool:
        """Whether it is a row of a batch."""
        return self.ask.is_batch


class Between:
    """All turns of this gateway that are between. Their load counts before an engine has it."""

    def __init__(self) -> None:
        self.num = 0
        self.num_rows = 0
        # Of prefill, as far as it is expected to be computed.
        self.tokens = 0.0
        # Rows of batches don't count here.
        self._num_by_workspace: Counter[str] = Counter()
        # Of a prompt's tokens, as seen of late: the rest is read.
        self._computed_share = 1.0

    def add(self, turn: QueuedTurn) -> None:
        turn.is_between = True
        turn.tokens = turn.ask.prompt_tokens * self._computed_share
        self.num += 1
        self.tokens += turn.tokens
        if turn.is_row:
            self.num_rows += 1
        else:
            self._num_by_workspace[turn.workspace] += 1

    def remove(self, turn: QueuedTurn) -> None:
        """The turn is an engine's load now, or over. A second call does nothing."""
        if not turn.is_between:
            return
        turn.is_between = False
        self.num -= 1
        # With no turn between the sum is 0, without the remainder of rounding.
        self.tokens = self.tokens - turn.tokens if self.num else 0.0
        if turn.is_row:
            self.num_rows -= 1
            return
        self._num_by_workspace[turn.workspace] -= 1
        if not self._num_by_workspace[turn.workspace]:
            del self._num_by_workspace[turn.workspace]

    def has_turn_of(self, workspace: str) -> bool:
        return workspace in self._num_by_workspace

    def learn(self, computed_share: float) -> None:
        """What share of a turn's prompt an engine is to compute."""
        self._computed_share += _LEARNING * (computed_share - self._computed_share)
