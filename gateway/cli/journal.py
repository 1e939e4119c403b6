"""python -m gateway journal list: turns that were set aside"""

import argparse
import sqlite3
from pathlib import Path

from gateway.base.errors import JournalUnavailable, NotFound
from gateway.base.settings import load_database
from gateway.cli.arguments import Commands, add_actions
from gateway.journal.store import ASIDE, has_journal, rows_in


def add_commands(commands: Commands) -> None:
    journal = add_actions(commands, "journal", "the journal of this gateway")
    listed = journal.add_parser("list", help="turns that were set aside, with why")
    listed.add_argument("--journal", type=Path, help="its directory; default: of HOLDFAST_DATA")
    listed.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> int:
    directory = options.journal or load_database().data / "journal"
    if not has_journal(directory):
        raise NotFound(f"no journal in `{directory}`")
    try:
        rows = [row for row in rows_in(directory) if row.state == ASIDE]
    except (OSError, sqlite3.Error) as error:
        raise JournalUnavailable(f"journal `{directory}`: {error}") from None
    for row in sorted(rows):
        print(row.id, row.at, row.reason, f"{len(row.record or b'')} bytes kept")
    return 0
