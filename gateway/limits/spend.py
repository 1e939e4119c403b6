"""Reads from the ledger, in the background, how much workspaces with a spend limit have spent.

So the limit survives a restart, and it counts the turns that other gateways have drained.
"""

import asyncio
from collections.abc import Callable, Mapping

from gateway.admin.structs.fleet import Workspace
from gateway.base.background import pause
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.base.logs import get_logger
from gateway.ledger.access import Workspaces
from gateway.limits.admission import Admission, month_of

POLL_SECONDS = 30.0
_TICK_SECONDS = 2.0


class SpendWatch:
    def __init__(
        self,
        workspaces: Workspaces,
        known: Callable[[], Mapping[str, Workspace]],
        admission: Admission,
        clock: Clock,
    ) -> None:
        self._workspaces = workspaces
        self._known = known
        self._admission = admission
        self._clock = clock
        self._log = get_logger("spend")

    async def run(self, stopping: asyncio.Event) -> None:
        """Read every half minute, and at once when a workspace gets a limit."""
        watched: set[str] = set()
        read = -POLL_SECONDS
        while not stopping.is_set():
            now, limited = self._clock.monotonic(), self._limited()
            if limited - watched or (limited and now - read >= POLL_SECONDS):
                try:
                    await self.step(limited)
                    watched, read = limited, now
                except GatewayError as error:
                    self._log.warning("spend_read_failed", error=str(error))
            await pause(stopping, _TICK_SECONDS)

    async def step(self, workspaces: set[str]) -> None:
        month = month_of(self._clock.wall())
        self._admission.learn_spend(month, await self._workspaces.spent(sorted(workspaces), month))

    def _limited(self) -> set[str]:
        known = self._known().values()
        return {w.id for w in known if w.monthly_spend_nano is not None}
