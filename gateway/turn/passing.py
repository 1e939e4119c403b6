"""Turns between the gateway's queue and an engine, and how fast the queue moves."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from gateway.limits.congestion import Unanswered
from gateway.prompt.ask import Ask

_STILL = 0.05


class Wanting(msgspec.Struct, frozen=True, array_like=True):
    """What a turn wants of an engine, as far as the gate looks at it.

    Tokens are estimates. `model` is None for a turn that any engine serves. `arrived` is in seconds
    of the monotonic clock.
    """

    workspace: str
    model: str | None
    prompt_tokens: int
    tokens: int
    arrived: float
    is_batch: bool

    @classmethod
    def of(cls, ask: Ask) -> "Wanting":
        return cls(
            ask.principal.workspace,
            ask.model.engine_model,
            ask.prompt_tokens,
            ask.estimated_tokens,
            ask.arrived,
            ask.is_batch,
        )


@dataclass(slots=True)
class PassingSum:
    """How many turns were let in and are no engine's load yet, and the tokens they will compute.

    `num_rows` of them are rows of batches. `workspaces` are those of the others.
    """

    num: int = 0
    num_rows: int = 0
    tokens: float = 0.0
    workspaces: Counter[str] = field(default_factory=Counter)

    def enter(self, tokens: float, workspace: str, *, is_batch: bool = False) -> "Passing":
        self.num += 1
        self.num_rows += is_batch
        self.workspaces[workspace] += not is_batch
        self.tokens += tokens
        return Passing(partial(self._leave, tokens, workspace, is_batch))

    def _leave(self, tokens: float, workspace: str, is_batch: bool) -> None:
        self.num -= 1
        self.num_rows -= is_batch
        self.workspaces[workspace] -= not is_batch
        if not self.workspaces[workspace]:
            del self.workspaces[workspace]
        # With no passing turn the sum is 0, without the remainder of rounding.
        self.tokens = self.tokens - tokens if self.num else 0.0


class Passing:
    """A turn that was let in and is not yet an engine's load.

    The context ends when an engine has the turn or the turn has ended. `is_charged`: the queue
    counted it as served to its workspace. `unanswered` is its place in its workspace's window, and
    whoever entered has to end that one. A row of a batch has none, and neither has a turn that was
    let in before and has its place still.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self.is_charged = False
        self.unanswered: Unanswered | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def give_up(self) -> None:
        """The turn was let in and does not go to an engine."""
        self.__exit__(None, None, None)
        if self.unanswered is not None:
            self.unanswered.ended()


@dataclass(frozen=True, slots=True)
class WaitingTurn:
    """A turn that waits in a queue.

    `is_again`: it was let in before, and an engine refused it. `arrived` is in seconds of the
    monotonic clock.
    """

    future: asyncio.Future[Passing]
    prompt_tokens: int
    arrived: float
    is_again: bool = False

    @property
    def has_passed(self) -> bool:
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is None


class Pace:
    """How fast the queue moved lately, counted in events that fade. Pure."""

    def __init__(self, fade_seconds: float) -> None:
        self._fade_seconds = fade_seconds
        self._count = 0.0
        self._at = self._since = 0.0

    def count(self, now: float) -> None:
        before = self._faded(now)
        if before < 1:
            self._since = now
        self._count, self._at = before + 1, now

    def seconds(self, number: int, now: float) -> float:
        """The expected seconds for `number` more events. Infinite if nothing moves."""
        # The faded seconds since the beginning: an even flow would have this weight.
        seen = self._fade_seconds * -math.expm1(-(now - self._since) / self._fade_seconds)
        count = self._faded(now)
        return number * max(seen, 1.0) / count if count > _STILL else math.inf

    def _faded(self, now: float) -> float:
        return self._count * math.exp(-max(now - self._at, 0.0) / self._fade_seconds)
