"""The fleet as settings say it, started and stopped with its gateway."""

from collections.abc import Callable
from contextlib import AsyncExitStack

from gateway.base.settings import Settings
from gateway.base.supervisor import Supervisor
from gateway.routing.client import EngineHttp
from gateway.routing.cost import Weights
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.held import BYTES_PER_NAME


def weights_of(settings: Settings) -> Weights:
    return Weights(
        load_weight=settings.routing_load_weight,
        host_cost=settings.routing_host_cost,
        delay_cost=settings.routing_delay_cost,
        fade_seconds=settings.routing_fade_seconds,
    )


async def open_fleet(
    stack: AsyncExitStack,
    settings: Settings,
    supervisor: Supervisor,
    monotonic: Callable[[], float],
) -> Fleet:
    http = EngineHttp()
    stack.push_async_callback(http.aclose)
    secret = settings.engine_secret.get_secret_value()
    num_engines, weights = len(settings.engines), weights_of(settings)

    def make(name: str, url: str) -> Engine:
        return Engine(
            name,
            url,
            secret,
            http,
            weights=weights,
            learns=not settings.routing_events,
            down_seconds=settings.engine_down_seconds,
            monotonic=monotonic,
            max_names=max(settings.routing_index_bytes // BYTES_PER_NAME // num_engines, 1),
        )

    fleet = Fleet(settings.engines, make, supervisor)
    await fleet.start()
    stack.push_async_callback(fleet.stop)
    return fleet
