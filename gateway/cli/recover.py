"""python -m gateway recover [--journal DIR | --instance ID]"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from gateway.base.logs import configure
from gateway.base.settings import load
from gateway.cli.recovery import count_open_turns, recover_instance, recover_journal


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("recover", help="close the turns of a gateway that is gone")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--journal", type=Path, help="the directory of its journal")
    which.add_argument("--instance", help="its id, where the journal is lost too")
    parser.set_defaults(run=_recover)


def _recover(options: argparse.Namespace) -> int:
    settings = load()
    configure(settings.log_level)
    if options.journal is not None:
        found = asyncio.run(recover_journal(settings, options.journal))
        print(f"{found.turns} turns, {found.closed} of them open; {found.left} left")
        return 1 if found.left else 0
    if options.instance is not None:
        print(asyncio.run(recover_instance(settings, options.instance)), "turns")
        return 0
    for instance, count in sorted(asyncio.run(count_open_turns(settings)).items()):
        print(instance, count)
    return 0
