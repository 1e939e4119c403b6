"""What a worker answers and does when another worker of its gateway asks through their parent."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from litestar.datastructures import State

from gateway.admin.structs.usage import Refusal
from gateway.base.errors import GatewayError, InvalidRequest, LedgerUnavailable
from gateway.base.logs import get_logger
from gateway.http.health import exposition_of, readiness_of
from gateway.http.machine import Machine
from gateway.http.refusals import Refusals
from gateway.http.services import Services
from gateway.routing.breaker import BreakerView
from gateway.routing.fleet import TURNS_RUN, Fleet
from gateway.routing.heard import take_news
from gateway.routing.news import News

Action = Literal["add", "drain", "resume", "remove"]


class EngineChange(msgspec.Struct, frozen=True, array_like=True):
    """A change of the fleet by the admin API. `engine` is a URL to add, and otherwise a name."""

    action: Action
    engine: str


decode_change = msgspec.msgpack.Decoder(EngineChange).decode
_news = msgspec.msgpack.Decoder(list[News]).decode
_name = msgspec.msgpack.Decoder(str).decode
_wanted = msgspec.msgpack.Decoder(tuple[str | None, str | None, int]).decode


async def meet_others(machine: Machine, state: State) -> None:
    """Answer other workers from now on, and take over what they changed before."""
    if machine.link is None:
        return
    services: Services = state.services
    refusals: Refusals = state.refusals

    def heard(body: bytes) -> None:
        now = services.clock.monotonic()
        for news in _news(body):
            take_news(services.fleet, news, now)

    async def keys(_: bytes) -> None:
        await services.keyring.refresh()

    async def engines(body: bytes) -> None:
        await apply_change(services.fleet, decode_change(body))

    machine.handlers.update(
        {
            "alive": lambda _: None,
            "backlog": lambda _: services.journal.backlog,
            "metrics": lambda _: exposition_of(services),
            "readiness": lambda _: (machine.number, readiness_of(services, state.stopping)),
            "refusals": lambda body: refusals.newest(*_wanted(body)),
            "running": lambda body: _num_running(services.fleet, _name(body)),
            "heard": heard,
            "keys": keys,
            "engines": engines,
        }
    )
    for change in await machine.has_begun(EngineChange):
        await apply_change(services.fleet, change)
    try:
        # Changes of keys since this worker read them were told to those that served already.
        await services.keyring.poll()
    except LedgerUnavailable as error:
        get_logger("gateway").warning("keys_not_read", error=str(error))


async def breakers_of(services: Services) -> Mapping[str, BreakerView]:
    """The breaker of each engine, by its name.

    Those of the parent are told where there is one: it hears of all workers' turns.
    """
    if services.machine.link is not None:
        return await services.machine.breakers()
    return services.fleet.breakers(services.clock.monotonic())


async def journal_backlog(services: Services) -> int:
    """Turns that the ledger does not have yet, in the journals of all workers."""
    if services.machine.link is None:
        return services.journal.backlog
    return sum(await services.machine.gather("backlog", None, int))


async def remove_everywhere(services: Services, name: str) -> None:
    """Remove an engine. Raise InvalidRequest while turns of this gateway run on it."""
    if any(await services.machine.gather("running", name, int)):
        raise InvalidRequest(TURNS_RUN)
    await services.fleet.remove(name)
    await services.machine.spread("engines", EngineChange("remove", name))


async def all_refusals(
    machine: Machine, own: Refusals, workspace: str | None, request_id: str | None, limit: int
) -> list[Refusal]:
    """The newest refusals of all workers, the newest first."""
    if machine.link is None:
        return own.newest(workspace, request_id, limit)
    found = await machine.gather("refusals", (workspace, request_id, limit), list[Refusal])
    every = sorted((one for each in found for one in each), key=lambda one: -one.at_ms)
    return every[:limit]


async def apply_change(fleet: Fleet, change: EngineChange) -> None:
    """Do what another worker did. A change that does not fit is logged: nobody waits for it."""
    try:
        match change.action:
            case "add":
                await fleet.add(change.engine)
            case "remove":
                await fleet.remove(change.engine)
            case "drain" | "resume":
                fleet.find(change.engine).is_draining = change.action == "drain"
    except GatewayError as error:
        values: dict[str, Any] = {"action": change.action, "engine": change.engine}
        get_logger("gateway").warning("engine_change_failed", error=str(error), **values)


def _num_running(fleet: Fleet, name: str) -> int:
    return sum(each.load.num_running for each in fleet.engines if each.name == name)
