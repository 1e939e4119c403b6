"""Journals of workers that a gateway with fewer workers has no process for."""

import asyncio
import re
import sqlite3
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from gateway.base.background import pause
from gateway.base.logs import get_logger
from gateway.journal.store import ASIDE, has_journal, rows_in

_RETRY_SECONDS = 5.0
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


async def recover_left(data: Path, num_workers: int, stopping: asyncio.Event) -> None:
    """Settle the journals beyond `num_workers`, one after the other, until that has worked."""
    left = await asyncio.to_thread(left_journals, data, num_workers)
    while left:
        again = []
        for path in left:
            if stopping.is_set():
                return
            if not await _recover(path):
                again.append(path)
        left = again
        if left:
            await pause(stopping, _RETRY_SECONDS)


async def _recover(directory: Path) -> bool:
    """Settle a journal in a process that ends with this one. Return whether nothing is left.

    The next start may have a worker for the journal, which must find it free.
    """
    command = ("recover", "--ends-with-input", "--journal", str(directory))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *command, stdin=PIPE
    )
    try:
        return await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


def _holds_turns(directory: Path) -> bool:
    """Whether there are turns in it. One that can't be read may hold some."""
    if not has_journal(directory):
        return False
    try:
        return any(row.state != ASIDE for row in rows_in(directory))
    except (OSError, sqlite3.Error):
        return True
