"""Journals of workers that a gateway with fewer workers has no process for."""

import re
from pathlib import Path

from gateway.base.logs import get_logger
from gateway.journal.old_file import holds_turns
from gateway.journal.reading import look

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
    if holds_turns(directory):
        return True
    try:
        found = look(directory)
    except OSError:
        return True
    is_sound = not (found.damaged or found.missing or found.broken)
    return not is_sound or bool(found.state.open or found.state.closed)
