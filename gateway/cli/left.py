"""Journals of workers that a gateway with fewer workers has no process for."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from gateway.base.logs import get_logger

_NAME = re.compile(r"journal-(\d+)")


def left_journals(data: Path, num_workers: int) -> list[Path]:
    """Directories of journals beyond `num_workers` that still hold turns."""
    if not data.is_dir():
        return []
    found = [
        (int(name[1]), path)
        for path in data.iterdir()
        if (name := _NAME.fullmatch(path.name)) is not None
    ]
    return [path for number, path in sorted(found) if number > num_workers and _holds_turns(path)]


def warn_of_left(data: Path, num_workers: int) -> None:
    for path in left_journals(data, num_workers):
        command = f"python -m gateway recover --journal {path}"
        get_logger("gateway").warning("journal_left", journal=str(path), command=command)


def _holds_turns(directory: Path) -> bool:
    """Whether there are turns in it. One that can't be read may hold some."""
    path = directory / "journal.db"
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            return db.execute("SELECT 1 FROM turns LIMIT 1").fetchone() is not None
    except sqlite3.Error:
        return True
