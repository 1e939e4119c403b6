"""python -m gateway journal list: turns that were set aside"""

import argparse
import sqlite3
from contextlib import closing
from pathlib import Path

from gateway.base.errors import JournalUnavailable, NotFound
from gateway.base.settings import load_database
from gateway.cli.arguments import Commands, add_actions


def add_commands(commands: Commands) -> None:
    journal = add_actions(commands, "journal", "the journal of this gateway")
    listed = journal.add_parser("list", help="turns that were set aside, with why")
    listed.add_argument("--journal", type=Path, help="its directory; default: of HOLDFAST_DATA")
    listed.set_defaults(run=_list)


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
