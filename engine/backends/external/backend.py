"""What the backends over vLLM and over a server share: their blocks are another program's."""

from collections.abc import Callable
from typing import Any

from engine.backends.base import Progress
from engine.backends.looped import LoopedBackend
from engine.clock import Clock
from engine.protocol import Memory
from engine.settings import Settings
from engine.supervisor import Supervisor


class ExternalBackend(LoopedBackend):
    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
        supervisor: Supervisor,
    ) -> None:
        super().__init__(settings, clock, self._never, on_crash)
        self._supervisor = supervisor

    async def memory(self) -> Memory:
        """Without a map: our books mirror only the blocks that entries and names stand on."""
        loaded = self._ready()
        return Memory(
            epoch=loaded.description.epoch,
            block_size=loaded.description.block_size,
            lifetimes=loaded.cache.entries.lifetimes.report(),
        )

    @staticmethod
    def _never(settings: Settings, progress: Progress) -> Any:
        raise NotImplementedError("the parts of another program are loaded otherwise")
