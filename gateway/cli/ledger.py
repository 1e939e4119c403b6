"""python -m gateway ledger check: looks for damage in the database"""

import argparse
import asyncio
import sys

from gateway.cli.arguments import Commands, add_actions
from gateway.cli.in_ledger import run_long_in_ledger
from gateway.ledger.check import problems
from gateway.ledger.database import Ledger


def add_commands(commands: Commands) -> None:
    ledger = add_actions(commands, "ledger", "the database")
    check = ledger.add_parser("check", help="look for damage: structure, rows, turns against sums")
    check.set_defaults(run=_check)


async def _all(ledger: Ledger) -> list[str]:
    return [line async for line in problems(ledger, lambda: asyncio.sleep(0))]


def _check(_: argparse.Namespace) -> int:
    found = run_long_in_ledger(_all)
    for each in found:
        print(each)
    if found:
        print(
            "restore a backup; sums alone are made again by `python -m gateway rollups rebuild`",
            file=sys.stderr,
        )
    return 1 if found else 0
