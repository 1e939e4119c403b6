"""May this turn run now? Its workspace's limits, then the queue. The answer is one permit."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from gateway.admission.accounts import Wanted, WorkspaceLimits
from gateway.admission.queue import EngineQueue, Passage
from gateway.admission.shared import SharedLimits
from gateway.base.grants import RateStatuses
from gateway.prompt.ask import Ask, Principal


class Permit:
    """What admission gives a turn. Its context is the turn: leaving it gives everything back.

    `is_open`: the turn is in the journal, so its close counts what it used. `passage` is its way
    to an engine and its place in its workspace's window.
    """

    def __init__(self, turn_id: str, ask: Ask, admission: "Admission") -> None:
        self.is_open = False
        self.passage = Passage(ask, admission.queue)
        self._turn_id = turn_id
        self._admission = admission
        self._is_limited = False

    async def take_limits(self, backlog: int) -> None:
        ask, admission = self.passage.ask, self._admission
        is_spending = ask.principal.limits.monthly_spend is not None
        wanted = Wanted(
            turn_id=self._turn_id,
            principal=ask.principal,
            estimate=ask.estimated_tokens,
            backlog=backlog,
            most_cost=admission.most_cost(ask) if is_spending else 0,
        )
        if admission.shared is None:
            admission.limits.take(wanted)
        else:
            await admission.shared.take(wanted)
        self._is_limited = True

    def _leave_limits(self) -> None:
        if self._is_limited:
            self._is_limited = False
            workspace = self.passage.workspace
            self._admission.limits.leave(self._turn_id, workspace, is_open=self.is_open)

    async def wait_again(self) -> None:
        """Go back to the queue, before the other turns of the workspace: an engine refused it."""
        self._admission.queue.leave(self.passage)
        self.passage.is_again = True
        await self._admission.enter(self.passage)

    def crowded(self) -> list[str]:
        """URLs of engines that have enough turns, so that others are preferred."""
        return self._admission.crowded()

    def sent(self, to_prefill: int, tokens: int) -> None:
        """An engine has the turn now and must compute `to_prefill` of its `tokens`."""
        self._admission.queue.sent(self.passage, to_prefill, tokens)

    async def give_back(self) -> None:
        """Give the workspace's place back before the client has its whole answer."""
        self._leave_limits()
        if self._admission.shared is not None:
            await self._admission.shared.told(self.passage.workspace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        queue, passage = self._admission.queue, self.passage
        was_between = passage.is_between
        queue.leave(passage)
        # One whose client left counts in the window until its engine has been told to end it.
        if not passage.is_left:
            passage.ended()
        self._leave_limits()
        if was_between:
            queue.changed()


class Admission:
    """Of turns that somebody waits for."""

    def __init__(
        self,
        limits: WorkspaceLimits,
        queue: EngineQueue,
        most_cost: Callable[[Ask], int] = lambda ask: 0,
        shared: SharedLimits | None = None,
    ) -> None:
        """`most_cost` says what a turn can cost at most, in nano-dollars.

        With `shared`, limits hold over all gateways.
        """
        self.limits = limits
        self.queue = queue
        self.most_cost = most_cost
        self.shared = shared

    async def admit(self, turn_id: str, ask: Ask, backlog: int) -> Permit:
        """Raise Overloaded, RateLimited or SpendLimitReached, with nothing taken.

        `backlog` is the journal's: turns that the ledger does not have yet.
        """
        with ExitStack() as undoing:
            permit = undoing.enter_context(Permit(turn_id, ask, self))
            await permit.take_limits(backlog)
            await self.enter(permit.passage)
            undoing.pop_all()
        return permit

    async def enter(self, passage: Passage) -> None:
        await self.queue.enter(passage)

    def crowded(self) -> list[str]:
        return self.queue.crowded()

    def rates(self, principal: Principal) -> RateStatuses:
        """How much of its limits the workspace has left; None for a limit that it does not have."""
        return self.limits.rates(principal)


class RowAdmission(Admission):
    """Of rows of batches: they take the room that other turns leave.

    A row that waits for idle room takes no place of its workspace's turns.
    """

    async def admit(self, turn_id: str, ask: Ask, backlog: int) -> Permit:
        with ExitStack() as undoing:
            permit = undoing.enter_context(Permit(turn_id, ask, self))
            await self.enter(permit.passage)
            await permit.take_limits(backlog)
            undoing.pop_all()
        return permit

    async def enter(self, passage: Passage) -> None:
        await self.queue.enter_row(passage)

    def crowded(self) -> list[str]:
        return self.queue.without_idle_room()
