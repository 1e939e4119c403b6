"""python -m gateway rollups rebuild"""

import argparse

from gateway.cli.arguments import Commands, add_actions
from gateway.cli.in_ledger import run_long_in_ledger
from gateway.ledger.upkeep import rebuild


def add_commands(commands: Commands) -> None:
    sums = add_actions(commands, "rollups", "sums of the ledger")
    sums.add_parser("rebuild", help="make all sums again from the turns").set_defaults(run=_rebuild)


def _rebuild(_: argparse.Namespace) -> int:
    print(f"made the sums of {run_long_in_ledger(rebuild)} days again")
    return 0
