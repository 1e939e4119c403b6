"""python -m gateway adapters: which are on the engines of HOLDFAST_ENGINES, and how they change"""

import argparse
import asyncio
from contextlib import aclosing

from gateway.base.errors import NotFound
from gateway.base.settings import EnginePlace, Settings, is_source, load
from gateway.cli.arguments import Commands, add_actions
from gateway.routing.client import EngineHttp
from gateway.routing.engine import Engine


def add_commands(commands: Commands) -> None:
    actions = add_actions(commands, "adapters", "list, load and unload engines' adapters")
    listed = actions.add_parser("list", help="what each engine has")
    load_ = actions.add_parser("load", help="load a folder of the engine's ENGINE_ADAPTERS")
    unload = actions.add_parser("unload", help="let an adapter go, after its last request")
    listed.set_defaults(run=_run, change=None, engine=None)
    for action, change in ((load_, Engine.load_adapter), (unload, Engine.unload_adapter)):
        action.add_argument("engine", help="its name, HOST:PORT unless HOLDFAST_ENGINES gives one")
        action.add_argument("adapter", help="the folder's name")
        action.set_defaults(run=_run, change=change)


def _run(options: argparse.Namespace) -> int:
    for line in asyncio.run(_change(load(), options)):
        print(line)
    return 0


async def _change(settings: Settings, options: argparse.Namespace) -> list[str]:
    """Do it, and tell what the engines have then. Raise NotFound for an unknown engine."""
    secret = settings.engine_secret.get_secret_value()
    async with aclosing(EngineHttp()) as http:
        places = [EnginePlace.parse(one) for one in settings.engines if not is_source(one)]
        engines = [Engine(*place, secret, http) for place in places]
        await asyncio.gather(*(engine.poll() for engine in engines))
        if options.engine is not None:
            engines = [engine for engine in engines if engine.name == options.engine]
            if not engines:
                raise NotFound(f"engine: `{options.engine}` is not in HOLDFAST_ENGINES")
            await options.change(engines[0], options.adapter)
        return [
            f"{engine.name} {engine.description.model}:{one.name} {one.digest[:12]}"
            f"{' leaving' if one.is_leaving else ''}"
            for engine in engines
            if engine.description is not None
            for one in engine.description.adapters
        ]
