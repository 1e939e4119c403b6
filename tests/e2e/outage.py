"""Databases that are away, in the ways in which they are: frozen, stopped, locked."""

import os
import shlex
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.postgres import find_programs, run

START_SECONDS = 180


def data_directory(url: str) -> Path:
    plain = url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(plain) as connection:
        row = connection.execute("SHOW data_directory").fetchone()
    assert row is not None
    return Path(row[0])


def _postmaster(data: Path) -> int:
    return int((data / "postmaster.pid").read_text().split()[0])


@contextmanager
def frozen_postgres(data: Path) -> Iterator[None]:
    """Every process of the server gets SIGSTOP: its sockets stay open and say nothing."""
    postmaster = _postmaster(data)
    os.kill(postmaster, signal.SIGSTOP)
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    frozen = [postmaster, *(int(child) for child in children)]
    try:
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        yield
    finally:
        for process in reversed(frozen):
            os.kill(process, signal.SIGCONT)


@contextmanager
def stopped_postgres(data: Path) -> Iterator[None]:
    """The server is gone, as after a crash, and comes back with the options that it had."""
    programs = find_programs()
    assert programs is not None
    # The program itself, then its options.
    _, *options = shlex.split((data / "postmaster.opts").read_text())
    os.kill(_postmaster(data), signal.SIGQUIT)
    deadline = time.monotonic() + START_SECONDS
    while (data / "postmaster.pid").exists():
        assert time.monotonic() < deadline, "PostgreSQL did not stop"
        time.sleep(0.05)
    try:
        yield
    finally:
        words = ("-D", data, "-w", "-l", data / "log", "-o", shlex.join(options), "start")
        run(programs / "pg_ctl", *words)


@contextmanager
def locked_sqlite(path: Path) -> Iterator[None]:
    """Somebody else writes, and does not come to an end."""
    with sqlite3.connect(path, isolation_level=None) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            holder.execute("ROLLBACK")
    holder.close()
