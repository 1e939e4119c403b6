"""A throw-away PostgreSQL server from the programs this machine has, or a skip that says why."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest

from scripts.stack import free_port

NOBODY = "postgres"


def find_programs() -> Path | None:
    """The directory with initdb and pg_ctl: on PATH, or where Debian keeps them."""
    program = shutil.which("initdb")
    if program and shutil.which("pg_ctl"):
        return Path(program).parent
    directories = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((bin for bin in directories if (bin / "pg_ctl").exists()), None)


@contextmanager
def running_postgres() -> Iterator[str]:
    """Yield the server's SQLAlchemy URL without a database name, ending in a slash.

    The data is not under pytest's directory: another run that starts meanwhile closes that one
    to everybody but its owner, and where we are root the server runs as somebody else.
    """
    programs = find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server programs (initdb, pg_ctl)")
    port = free_port()
    with TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as directory:
        data = Path(directory)
        if os.getuid() == 0:
            shutil.chown(data, NOBODY, NOBODY)
        options = f"-p {port} -k {data} -c listen_addresses=127.0.0.1 -c fsync=off"
        run(programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "-N")
        run(programs / "pg_ctl", "-D", data, "-w", "-l", data / "log", "-o", options, "start")
        try:
            yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/"
        finally:
            run(programs / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")


def run(*command: object) -> None:
    """As the unprivileged user where we are root: PostgreSQL refuses root."""
    user = NOBODY if os.getuid() == 0 else None
    words = [str(word) for word in command]
    subprocess.run(words, check=True, user=user, stdout=subprocess.DEVNULL, cwd="/")


def new_database(server: str, name: str) -> str:
    """Create an empty database; its URL."""
    plain = server.replace("postgresql+psycopg", "postgresql") + "postgres"
    with psycopg.connect(plain, autocommit=True) as connection:
        is_quicker = connection.info.server_version >= 150_000  # half of the time, without fsync
        strategy = " STRATEGY FILE_COPY" if is_quicker else ""
        connection.execute(f'CREATE DATABASE "{name}"{strategy}'.encode())
    return server + name
