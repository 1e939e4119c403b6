"""The command line of the gateway."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from gateway.base.catalogue import CatalogueError
from gateway.base.errors import GatewayError
from gateway.base.settings import SettingsError
from gateway.base.traces import TracesError
from gateway.cli.arguments import CommandError
from gateway.prices.files import PriceError

# Each command with its module in this folder. A module is imported only for its own command. The
# import of all modules takes twice as long as a command on the schema or on a key.
COMMANDS = {
    "serve": "serve",
    "migrate": "migrate",
    "recover": "recover",
    "keys": "access",
    "workspaces": "access",
    "adapters": "adapters",
    "conditions": "conditions",
    "leases": "leases",
    "purge": "purge",
    "advise": "reports",
    "plan": "reports",
    "trace": "trace",
    **dict.fromkeys(("prices", "retain", "rollups", "export", "journal", "ledger"), "upkeep"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser(words).parse_args(words)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (CommandError, SettingsError, CatalogueError, PriceError, TracesError) as error:
        print(error, file=sys.stderr)
        return 2
    except GatewayError as error:
        print(error, file=sys.stderr)
        return 1


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that is the first word. Without such a command it is the parser of
    all commands."""
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Holdfast's gateway")
    commands = parser.add_subparsers(required=True, metavar="command")
    modules = [COMMANDS[words[0]]] if words and words[0] in COMMANDS else COMMANDS.values()
    for name in dict.fromkeys(modules):
        import_module(f"gateway.cli.{name}").add_commands(commands)
    return parser
