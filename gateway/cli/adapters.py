"""python -m gateway adapters: lists, loads and unloads adapters of the engines"""

import argparse
import asyncio
from contextlib import aclosing

from gateway.base.clock import Clock
from gateway.base.errors import NotFound
from gateway.base.settings import Settings, load
from gateway.cli.arguments import Commands, add_actions
from gateway.cli.running import why_not_ready
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.model_ids import ModelIdsTable
from gateway.routing.client import EngineHttp
from gateway.routing.discovery import places_now
from gateway.routing.engine import Engine
from gateway.routing.model_ids import ModelIds


def add_commands(commands: Commands) -> None:
    actions = add_actions(commands, "adapters", "list, load and unload engines' adapters")
    listed = actions.add_parser("list", help="what each engine has")
    load_ = actions.add_parser("load", help="load a folder of the engine's ENGINE_ADAPTERS")
    unload = actions.add_parser("unload", help="let an adapter go, after its last request")
    listed.set_defaults(run=_run, change=None, engine=None)
    for action, change in ((load_, _load), (unload, _unload)):
        action.add_argument("engine", help="its name, HOST:PORT unless HOLDFAST_ENGINES gives one")
        action.add_argument("adapter", help="the folder's name")
        action.set_defaults(run=_run, change=change)


def _run(options: argparse.Namespace) -> int:
    """Run the action and print each engine's adapters. Return 1 where an engine's are not known."""
    engines = asyncio.run(_change(load(), options))
    for engine in engines:
        print("\n".join(_lines(engine)))
    return int(not all(_is_known(engine) for engine in engines))


async def _load(settings: Settings, engine: Engine, name: str) -> None:
    """Load an adapter. For every gateway of the database its id means these weights from now on."""
    info = await engine.load_adapter(name)
    if engine.description is None:
        return
    model = engine.description.model

    async def give(ledger: Ledger) -> None:
        await ModelIds(ModelIdsTable(ledger), Clock().wall).give_adapter(model, info)

    await with_ledger(settings.ledger_url, give)


async def _unload(_settings: Settings, engine: Engine, name: str) -> None:
    await engine.unload_adapter(name)


async def _change(settings: Settings, options: argparse.Namespace) -> list[Engine]:
    """Make the change, and return the engines as they are after it. Without a change all engines
    are returned, otherwise the changed one. Raise NotFound for an unknown engine."""
    secret = settings.engine_secret.get_secret_value()
    async with aclosing(EngineHttp()) as http:
        places = await places_now(settings.engines)
        engines = [Engine(*place, secret, http) for place in places]
        await asyncio.gather(*(engine.poll() for engine in engines))
        if options.engine is not None:
            engines = [engine for engine in engines if engine.name == options.engine]
            if not engines:
                raise NotFound(f"engine: `{options.engine}` is not in HOLDFAST_ENGINES")
            await options.change(settings, engines[0], options.adapter)
            await engines[0].poll()
        return engines


def _is_known(engine: Engine) -> bool:
    return engine.description is not None and engine.status == "ready"


def _lines(engine: Engine) -> list[str]:
    """A line for each adapter of an engine, or one line that says why there is none."""
    described = engine.description
    if described is None or not _is_known(engine):
        return [f"{engine.name} not known: {why_not_ready(engine)}"]
    return [
        f"{engine.name} {described.model}:{adapter.name} {adapter.digest[:12]}"
        f"{' leaving' if adapter.is_leaving else ''}"
        for adapter in described.adapters
    ] or [f"{engine.name} {described.model} has none"]
