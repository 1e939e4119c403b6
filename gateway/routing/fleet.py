"""All engines. Supervised loops poll each engine and follow its events.

Engines that are added, drained or removed while the gateway runs stay so until its next start. Then
HOLDFAST_ENGINES decides again.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial

from engine.supervisor import Loop, Supervisor
from gateway.base.background import pause
from gateway.base.catalogue import Served
from gateway.base.errors import AnotherModel, GatewayError, InvalidRequest, NotFound
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.base.settings import URL_MUST_BE, EnginePlace, Settings, is_engine_url, is_source
from gateway.routing.client import EngineHttp
from gateway.routing.engine import Engine
from gateway.routing.held import PrefixIndex
from gateway.routing.model_ids import ModelIds
from gateway.routing.pending_purges import PendingPurges
from gateway.routing.router import Weights

_POLL_SECONDS = 1.0
_SOON_SECONDS = 0.2
_POLLS_A_SECOND = 100
# Other gateways' turns are seen after this delay. With it two gateways lose 0.7 points of hit rate;
# with 1 s they lose 2.0 (simulated).
_LOAD_SECONDS = 0.25
_FIRST_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 5.0

MAX_ENGINES = 256

MakeEngine = Callable[[str, str], Engine]
"""Makes an engine of a name and a URL."""


class Fleet:
    """All engines. `engines` is the same list for the fleet's whole life, so it may be shared."""

    def __init__(
        self,
        engines: Sequence[str],
        make: MakeEngine,
        supervisor: Supervisor,
        ids: ModelIds,
        purges: PendingPurges | None = None,
    ) -> None:
        """`engines` are written as in HOLDFAST_ENGINES. Without `purges`, pending ones are kept
        only as long as this object lives."""
        self._make = make
        self.ids = ids
        self.purges = purges or PendingPurges(None)
        self._supervisor = supervisor
        self._places = {place.url: place for place in map(EnginePlace.parse, engines)}
        self.engines: list[Engine] = []
        for place in self._places.values():
            self._join(make(*place))
        self._log = get_logger("fleet")

    @property
    def ready(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.status == "ready"]

    def model_of(self, name: str) -> str:
        """The model of the engine with that name; empty where it has not described itself."""
        for engine in self.engines:
            if engine.name == name and engine.description is not None:
                return engine.description.model
        return ""

    @property
    def takes_turns(self) -> bool:
        """Whether an engine is ready, or is unsure and may be ready again while a turn waits."""
        return any(engine.status in ("ready", "unsure") for engine in self.engines)

    @property
    def served(self) -> Served:
        """The models and adapters of all engines, also of engines that are down. While an engine
        has no description, the models that it may have are those with an id."""
        described = [engine.description for engine in self.engines if engine.description]
        return Served(
            list(dict.fromkeys(description.model for description in described)),
            [
                (description.model, info)
                for description in described
                for info in description.adapters
                if not info.is_leaving
            ],
            {
                description.model
                for description in described
                if "images" in description.known_capabilities
            },
            default=self.ids.default,
            known=[] if len(described) == len(self.engines) else self.ids.models,
        )

    def find(self, name: str) -> Engine:
        """Raise NotFound."""
        for engine in self.engines:
            if engine.name == name:
                return engine
        raise NotFound(f"engine: {name[:64]}")

    def epoch_of(self, name: str) -> str | None:
        """The last known epoch of the engine with that name."""
        for engine in self.engines:
            if engine.name == name and engine.description is not None:
                return engine.description.epoch
        return None

    @property
    def answering(self) -> dict[str, str | None]:
        """The epoch in which each engine answers, by its name; None while it does not answer."""
        return {engine.name: engine.answers_in for engine in self.engines}

    async def acknowledge(self, name: str, request_ids: list[str]) -> None:
        """Acknowledge counts to the engine with that name, if it can be reached."""
        for engine in self.ready:
            if engine.name == name:
                await engine.ack(request_ids)

    async def start(self) -> None:
        await asyncio.gather(*(engine.poll() for engine in self.engines))
        for engine in self.engines:
            self._attend(engine)

    async def stop(self) -> None:
        await asyncio.gather(*(self._leave(engine) for engine in self.engines))

    async def add(
        self, url: str, name: str | None = None, *, stays: bool = False, gives_id: bool = False
    ) -> Engine:
        """Add an engine, under this name or that of its URL.

        Raise InvalidRequest if the engine is there already (by any URL), if its name is another
        engine's, if what answers at the URL is not an engine, if its model's name belongs to
        another model, or if the fleet is full. With `stays` an engine with another model is added
        as refused, so that operators see it. With `gives_id` its model gets the id of that name.
        """
        if any(engine.url == url for engine in self.engines):
            raise InvalidRequest("url: this engine is there already")
        if len(self.engines) >= MAX_ENGINES:
            raise InvalidRequest(f"url: there are {MAX_ENGINES} engines already")
        place = self._places.get(url) or EnginePlace.parse(f"{name}={url}" if name else url)
        if not place.is_name:
            raise InvalidRequest(f"url: `{place.name}` can't be an engine's name")
        if any(engine.name == place.name for engine in self.engines):
            raise InvalidRequest(f"url: another engine has the name `{place.name}` already")
        engine = self._make(*place)
        self._join(engine)
        await engine.poll()
        if (
            gives_id
            and engine.status in ("ready", "refused")
            and engine.last_description is not None
        ):
            await self.ids.give_model(engine.last_description)
            await engine.poll()
        new = engine.last_description
        problem = ""
        if isinstance(engine.fault, AnotherModel):
            problem = "" if stays else str(engine.fault)
        elif engine.fault is not None:
            problem = f"what answers there is not taken for an engine: {engine.readiness['error']}"
        for other in self.engines:
            description = other.last_description
            if other is not engine and description and new and description.epoch == new.epoch:
                problem = problem or f"this engine is there already, as {other.name}"
        if problem:
            self.engines.remove(engine)
            raise InvalidRequest(f"url: {problem}")
        self._attend(engine)
        return engine

    async def remove(self, name: str) -> None:
        """Remove an engine. Raise NotFound, and InvalidRequest while turns of this gateway run on
        it."""
        engine = self.find(name)
        if engine.load.num_running:
            raise InvalidRequest("engine: turns run there; drain it, and remove it when they end")
        self.engines.remove(engine)
        await self._leave(engine)

    def _join(self, engine: Engine) -> None:
        self.engines.append(engine)
        engine.peers = self.engines

    def _attend(self, engine: Engine) -> None:
        for kind, loop in self._loops(engine).items():
            self._supervisor.start(f"{kind} {engine.name}", loop, kind)

    async def _leave(self, engine: Engine) -> None:
        names = [f"{kind} {engine.name}" for kind in self._loops(engine)]
        await asyncio.gather(*(self._supervisor.stop(name, 0) for name in names))

    def _loops(self, engine: Engine) -> dict[str, Loop]:
        return {
            "poll": partial(self._poll, engine),
            "watch": partial(self._watch, engine),
            "follow": partial(self._follow, engine),
        }

    async def _poll(self, engine: Engine, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            num_away = len(self.engines) - len(self.ready)
            # An engine that is away is polled more often, so that it gets its first turn soon.
            soon = _SOON_SECONDS + num_away / _POLLS_A_SECOND
            is_steady = engine.status in ("ready", "refused")
            await pause(stopping, _POLL_SECONDS if is_steady else min(_POLL_SECONDS, soon))
            await engine.poll()
            if engine.status in ("unsure", "down", "refused"):
                if any(ready.kind == engine.kind for ready in self.ready):
                    engine.give_up()

    async def _watch(self, engine: Engine, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            await pause(stopping, _LOAD_SECONDS)
            if engine.is_ready:
                await engine.watch_load()

    async def _follow(self, engine: Engine, stopping: asyncio.Event) -> None:
        """Follow the engine's events, and begin again after every break."""
        seconds = _FIRST_RETRY_SECONDS
        while not stopping.is_set():
            if engine.is_ready and await self._take_events(engine):
                seconds = _FIRST_RETRY_SECONDS
            await pause(stopping, seconds)
            longer = min(seconds * 2, _MAX_RETRY_SECONDS)
            seconds = longer if engine.is_ready else _FIRST_RETRY_SECONDS

    async def _take_events(self, engine: Engine) -> bool:
        """Take in the engine's events until the connection ends or an event is missing. Return
        whether any came."""
        holdings = engine.holdings
        has_heard = False
        try:
            # A connection begins after the last event that was taken in.
            async with aclosing(engine.events(holdings.epoch, holdings.seq)) as frames:
                async for frame in frames:
                    if not holdings.apply(frame, engine.monotonic()):
                        break  # an event is missing
                    has_heard = True
        except GatewayError as error:
            self._log.info("events_lost", engine=engine.name, error=str(error))
        return has_heard


def engine_url(text: str) -> str:
    """Check an engine's URL. Raise InvalidRequest for a wrong one."""
    url = text.strip().rstrip("/")
    if not is_engine_url(url):
        raise InvalidRequest(f"url: {URL_MUST_BE}")
    return url


def weights_of(settings: Settings) -> Weights:
    return Weights(
        load_weight=settings.routing_load_weight,
        host_cost=settings.tuning.routing_host_cost,
        delay_cost=settings.tuning.routing_delay_cost,
        fade_seconds=settings.tuning.routing_fade_seconds,
    )


async def open_fleet(
    stack: AsyncExitStack,
    settings: Settings,
    supervisor: Supervisor,
    monotonic: Callable[[], float],
    metrics: Metrics,
    ids: ModelIds,
    purges: PendingPurges,
) -> Fleet:
    """Start the fleet that the settings name. It is stopped with the stack."""
    http = await stack.enter_async_context(aclosing(EngineHttp()))
    secret = settings.engine_secret.get_secret_value()
    weights = weights_of(settings)
    index = PrefixIndex(
        settings.tuning.routing_index_bytes,
        lambda number: metrics.count("forgotten_names", amount=number),
    )
    metrics.watch(routing_names=lambda: len(index), routing_max_names=lambda: index.max_names)
    listed = [entry for entry in settings.engines if not is_source(entry)]

    def make(name: str, url: str) -> Engine:
        return Engine(
            name,
            url,
            secret,
            http,
            weights=weights,
            down_seconds=settings.tuning.engine_down_seconds,
            monotonic=monotonic,
            index=index,
            admit=ids.admit,
            purges=purges,
        )

    fleet = Fleet(listed, make, supervisor, ids, purges)
    await fleet.start()
    stack.push_async_callback(fleet.stop)
    return fleet
