"""Turns between admission and an engine: they are let in and are not yet an engine's load."""

from collections import Counter
from dataclasses import dataclass

from gateway.prompt.ask import Ask

_LEARNING = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedTurn:
    """What the queue knows of a turn."""

    ask: Ask
    # Whether it was let in and is not yet an engine's load.
    is_between: bool = False
    # The tokens of prefill that it is expected to compute.
    tokens: float = 0.0
    # Whether an engine refused it after it was let in.
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
    """All turns of this gateway between admission and an engine. Their load counts already."""

    def __init__(self) -> None:
        self.num = 0
        self.num_rows = 0
        # The tokens of prefill that they are expected to compute.
        self.tokens = 0.0
        # The number of turns by workspace, without rows of batches.
        self._num_by_workspace: Counter[str] = Counter()
        # The share of a prompt's tokens that engines lately computed; they read the rest.
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
        """Take out a turn that is an engine's load now, or over. A second call does nothing."""
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
        """Learn the share of a turn's prompt that an engine is to compute."""
        self._computed_share += _LEARNING * (computed_share - self._computed_share)
