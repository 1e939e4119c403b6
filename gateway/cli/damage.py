"""python -m gateway journal list | ledger check: what damage has cost, by name."""

import argparse
import asyncio
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from gateway.base.errors import JournalUnavailable, NotFound
from gateway.base.settings import load_database
from gateway.ledger.check import problems
from gateway.ledger.database import with_ledger


def add_commands(commands: Any) -> None:
    """Give the command line its `journal` and `ledger`."""
    journal = commands.add_parser("journal", help="the journal of this gateway").add_subparsers(
        required=True, metavar="action"
    )
    listed = journal.add_parser("list", help="turns that were set aside, with why")
    listed.add_argument("--journal", type=Path, help="its directory; default: of HOLDFAST_DATA")
    listed.set_defaults(run=_list)
    ledger = commands.add_parser("ledger", help="the database").add_subparsers(
        required=True, metavar="action"
    )
    check = ledger.add_parser("check", help="look for damage: structure, turns against sums")
    check.set_defaults(run=_check)


def _list(options: argparse.Namespace) -> int:
    directory = options.journal or load_database().data / "journal"
    if not (directory / "journal.db").is_file():
        raise NotFound(f"no journal in `{directory}`")
    try:
        with closing(sqlite3.connect(f"file:{directory / 'journal.db'}?mode=ro", uri=True)) as db:
            rows = db.execute("SELECT id, at, reason, length(record) FROM set_aside ORDER BY id")
            for turn_id, at, reason, num_bytes in rows:
                print(turn_id, at, reason, f"{num_bytes or 0} bytes kept")
    except sqlite3.Error as error:
        raise JournalUnavailable(f"journal `{directory}`: {error}") from None
    return 0


def _check(_: argparse.Namespace) -> int:
    found = asyncio.run(with_ledger(load_database().ledger_url, problems))
    for each in found:
        print(each)
    if found:
        print(
            "restore a backup; sums alone are made again by `python -m gateway rollups rebuild`",
            file=sys.stderr,
        )
    return 1 if found else 0
