"""Admission: a turn passes its workspace's limits, then the queue. It then has one permit."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gateway.admission.accounts import TurnClaim, WorkspaceLimits
from gateway.admission.between import QueuedTurn
from gateway.admission.engine_queue import EngineQueue
from gateway.admission.shared import SharedLimits
from gateway.prompt.ask import Ask


@dataclass(slots=True, eq=False, kw_only=True)
class Permit(QueuedTurn):
    """What admission gives a turn. The turn runs in its context, whose end gives everything
    back."""

    turn_id: str
    admission: "Admission"
    # Whether the turn is in the journal, so that its close counts what it used.
    is_open: bool = False
    # Whether it has a place in its workspace's limits.
    is_limited: bool = False

    async def wait_again(self) -> None:
        """Wait in the queue again, before the workspace's other turns, after an engine's
        refusal."""
        self.admission.queue.leave(self)
        self.is_again = True
        await self.admission.queue.enter(self)

    async def give_back(self) -> None:
        """Give the workspace's place back before the client has its whole answer."""
        self._leave_limits()
        if self.admission.shared is not None:
            await self.admission.shared.told(self.workspace)

    def _leave_limits(self) -> None:
        if self.is_limited:
            self.is_limited = False
            self.admission.limits.leave(self.turn_id, self.workspace, is_open=self.is_open)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        queue = self.admission.queue
        was_between = self.is_between
        queue.leave(self)
        self._leave_limits()
        if was_between:
            queue.changed()


@dataclass(frozen=True, slots=True)
class Admission:
    """Lets turns in."""

    limits: WorkspaceLimits
    queue: EngineQueue
    # The most that a turn can cost, in nano-dollars.
    most_cost: Callable[[Ask], int]
    # Makes limits hold over all gateways; None where they hold for this one.
    shared: SharedLimits | None

    async def admit(self, permit: Permit, backlog: int) -> None:
        """Return when the turn may run. Raise Overloaded, RateLimited or SpendLimitReached.

        `backlog` is the number of turns that the journal has and the ledger does not. A row of a
        batch takes a place of its workspace's limits only behind the queue.
        """
        ask = permit.ask
        if ask.is_batch:
            await self.queue.enter(permit)
        is_spending = ask.principal.limits.monthly_spend is not None
        claim = TurnClaim(
            turn_id=permit.turn_id,
            principal=ask.principal,
            estimate=ask.estimated_tokens,
            backlog=backlog,
            most_cost=self.most_cost(ask) if is_spending else 0,
        )
        if self.shared is None:
            self.limits.take(claim)
        else:
            await self.shared.take(claim)
        permit.is_limited = True
        if not ask.is_batch:
            await self.queue.enter(permit)
