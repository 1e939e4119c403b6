"""The command line of the gateway: a module beside this one for each command."""

import argparse
import sys
from collections.abc import Callable, Sequence

from engine.traces import TracesError
from gateway.base.catalogue import CatalogueError
from gateway.base.errors import GatewayError
from gateway.base.settings import SettingsError
from gateway.cli import (
    advise,
    export,
    journal,
    keys,
    ledger,
    migrate,
    plan,
    prices,
    recover,
    retain,
    rollups,
    seed,
    serve,
    workspaces,
)
from gateway.prices.files import PriceError

_COMMANDS = (
    serve,
    migrate,
    recover,
    keys,
    workspaces,
    prices,
    retain,
    rollups,
    export,
    advise,
    plan,
    seed,
    journal,
    ledger,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (SettingsError, CatalogueError, PriceError, TracesError) as error:
        print(error, file=sys.stderr)
        return 2
    except GatewayError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Holdfast's gateway")
    commands = parser.add_subparsers(required=True, metavar="command")
    for each in _COMMANDS:
        each.add_commands(commands)
    return parser
