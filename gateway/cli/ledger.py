"""python -m gateway ledger check: looks for damage in the database"""

import argparse
import sys

from gateway.cli.arguments import Commands, add_actions
from gateway.cli.in_ledger import run_long_in_ledger
from gateway.ledger.upkeep import problems


def add_commands(commands: Commands) -> None:
    ledger = add_actions(commands, "ledger", "the database")
    check = ledger.add_parser("check", help="look for damage: structure, turns against sums")
    check.set_defaults(run=_check)


def _check(_: argparse.Namespace) -> int:
    found = run_long_in_ledger(problems)
    for each in found:
        print(each)
    if found:
        print(
            "restore a backup; sums alone are made again by `python -m gateway rollups rebuild`",
            file=sys.stderr,
        )
    return 1 if found else 0
