"""python -m gateway journal list: turns that were set aside"""

import argparse
import sqlite3
from pathlib import Path

from gateway.base.errors import JournalUnavailable, NotFound
from gateway.base.settings import load_database
from gateway.cli.arguments import Commands, add_actions
from gateway.journal.files import segment_files
from gateway.journal.old_file import has_old, old_aside
from gateway.journal.reading import set_aside_in


def add_commands(commands: Commands) -> None:
    journal = add_actions(commands, "journal", "the journal of this gateway")
    listed = journal.add_parser("list", help="turns that were set aside, with why")
    listed.add_argument("--journal", type=Path, help="its directory; default: of HOLDFAST_DATA")
    listed.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> int:
    directory = options.journal or load_database().data / "journal"
    if not (segment_files(directory) or has_old(directory)):
        raise NotFound(f"no journal in `{directory}`")
    try:
        rows = [*set_aside_in(directory), *old_aside(directory)]
    except (OSError, sqlite3.Error) as error:
        raise JournalUnavailable(f"journal `{directory}`: {error}") from None
    for turn_id, at, reason, num_bytes in sorted(rows):
        print(turn_id, at, reason, f"{num_bytes} bytes kept")
    return 0
