"""Which engines are full, crowded or unsure, and a gate before them.

The gate is a process's own (`gate.py`), or its parent's (`shared_gate.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from gateway.base.catalogue import is_served
from gateway.limits.admission import MAX_IN_FLIGHT
from gateway.prompt.ask import Ask
from gateway.routing.engine import Engine
from gateway.turn.idle_room import IdleRoom
from gateway.turn.passing import Passing

_CLOSED_SECONDS = 1.0


class FullEngines(ABC):
    """`wait_seconds` is how long a turn may wait for an engine with room."""

    def __init__(
        self,
        engines: Sequence[Engine],
        monotonic: Callable[[], float],
        idle_room: IdleRoom,
        wait_seconds: float,
    ) -> None:
        self._engines = engines
        self._monotonic = monotonic
        self._idle_room = idle_room
        self.wait_seconds = wait_seconds
        self._closed: dict[str, float] = {}

    @abstractmethod
    async def enter(self, ask: Ask, *, is_first: bool = False, is_charged: bool = False) -> Passing:
        """Wait until an engine has room and this turn is next.

        `is_first`: the turn was let in before and an engine refused it, so it goes before its
        workspace's other turns. Then `is_charged` is that of its earlier Passing, and it keeps its
        place in the window. Raise Overloaded if the queue is full or the turn's time is over.
        """

    @abstractmethod
    def assigned(self, to_prefill: int, tokens: int) -> None:
        """An engine has the turn now and must compute `to_prefill` of its `tokens`."""

    def closed(self, engine: Engine) -> bool:
        """The engine refused a turn because it is full.

        Return whether that turn may wait for it.
        """
        if not self.wait_seconds:
            return False
        self._closed = {url: self._closed[url] for url in self.refusing}
        self._closed[engine.url] = self._monotonic() + _CLOSED_SECONDS
        return True

    def moved(self, engine: Engine) -> None:
        """A turn on this engine has begun to answer or is over."""
        self._closed.pop(engine.url, None)

    @property
    def refusing(self) -> list[str]:
        """URLs of engines that said they are full."""
        if not self._closed:
            return []
        now = self._monotonic()
        return [url for url, until in self._closed.items() if until > now]

    def crowded(self, ask: Ask) -> list[str]:
        """URLs of engines that have a quarter more turns than they compute together.

        Other engines are preferred, whatever prefixes these hold. Below that a held prefix is worth
        a short wait. For a row of a batch these are the engines without idle room.
        """
        if ask.is_batch:
            return self._idle_room.without()
        return [
            engine.url
            for engine in self._engines
            if engine.description is not None
            and (most := engine.description.max_running)
            and engine.load.num_running >= most + max(4, most // 4)
        ]

    def may_come_back(self, ask: Ask) -> bool:
        """Whether an unsure engine serves the request, and it may wait for that one still."""
        is_early = self._monotonic() < ask.arrived + self.wait_seconds
        return is_early and self.is_unsure(ask.model.engine_model)

    def is_unsure(self, model: str | None) -> bool:
        """Whether an engine that serves the model is unsure."""
        return any(
            engine.status == "unsure"
            and engine.description is not None
            and not engine.is_draining
            and is_served(model, engine.description.model)
            for engine in self._engines
        )

    def _takes_turns(self, engine: Engine, model: str | None, now: float) -> bool:
        """Whether the engine is ready for turns of the model, apart from its room."""
        description = engine.description
        return (
            description is not None
            and not engine.is_draining
            and is_served(model, description.model)
            and engine.is_ready
            and engine.breaker.allows(now)
        )

    def _places(self, engine: Engine, now: float) -> int:
        """How many more turns the engine may get, however many tokens they compute."""
        if self._closed.get(engine.url, now) > now:
            return 0
        max_running = engine.description.max_running if engine.description is not None else 0
        if not max_running:
            return MAX_IN_FLIGHT
        # A few turns wait at the engine, so that it never waits for us.
        return max_running + max(1, max_running // 16) - engine.load.num_running
