"""python -m gateway conditions: what is wrong now at a gateway that runs"""

import argparse

import msgspec

from gateway.cli.arguments import Commands
from gateway.cli.running import add_url, ask, url_of
from gateway.structs.conditions import Condition


class _Readiness(msgspec.Struct):
    conditions: list[Condition]


def add_commands(commands: Commands) -> None:
    parser = commands.add_parser("conditions", help="say what is wrong now, and what to do")
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="all of it")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Print the conditions. Return 1 where one is critical or a warning. No key is needed."""
    conditions = ask(url_of(options), "/readyz", _Readiness).conditions
    if options.json:
        print(msgspec.json.encode(conditions).decode())
    else:
        for condition in conditions:
            print(f"{condition.severity}: {condition.sentence}\n    {condition.remedy}")
        if not conditions:
            print("nothing is wrong")
    return int(any(condition.severity != "info" for condition in conditions))
