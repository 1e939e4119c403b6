"""What can't be upgraded is refused in one line, and left as it is."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine, create_engine, inspect, text

from gateway.app import create_app
from gateway.base.errors import JournalUnavailable, SchemaRefused
from gateway.base.settings import DatabaseSettings
from gateway.cli.main import main
from gateway.cli.migrate import migrate
from gateway.journal.store import Journal
from gateway.journal.versions import APPLICATION, FORMAT
from gateway.ledger.schema import REVISION
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, make_settings, serve, serve_app

OTHER_COLUMNS = (
    "ALTER TABLE turns DROP COLUMN approximate",
    "ALTER TABLE turns ADD COLUMN seal VARCHAR(8)",
    "ALTER TABLE turn_rollups DROP COLUMN prefill_us",
    "DROP TABLE engine_epochs",
)


@pytest.fixture
def settings(tmp_path: Path, shared_database: str) -> DatabaseSettings:
    database_settings = DatabaseSettings(data=tmp_path, database_url=shared_database)
    migrate(database_settings)
    return database_settings


@pytest.fixture
def database(settings: DatabaseSettings) -> Iterator[Engine]:
    engine = create_engine(settings.ledger_url.replace("+aiosqlite", ""))
    yield engine
    engine.dispose()


def change(database: Engine, *statements: str) -> None:
    with database.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def says(revision: str) -> str:
    return f"UPDATE alembic_version SET version_num = '{revision}'"


def tables_of(database: Engine) -> dict[str, list[str]]:
    inspector = inspect(database)
    tables = sorted(inspector.get_table_names())
    return {table: [column["name"] for column in inspector.get_columns(table)] for table in tables}


def refusal(settings: DatabaseSettings, database: Engine) -> str:
    """What `migrate` says. It has changed nothing."""
    before = tables_of(database)
    with pytest.raises(SchemaRefused) as refused:
        migrate(settings)
    assert tables_of(database) == before
    line = str(refused.value)
    assert "\n" not in line and REVISION in line
    return line


@pytest.mark.parametrize(
    ("statement", "revision"),
    [
        *((statement, REVISION) for statement in OTHER_COLUMNS),
        # More columns than the first revision's, under a number not known, are a newer version's.
        *((statement, "9999") for statement in OTHER_COLUMNS if "ADD" not in statement),
    ],
)
def test_a_database_of_before_is_refused_whatever_it_calls_its_revision(
    settings: DatabaseSettings, database: Engine, statement: str, revision: str
) -> None:
    change(database, statement, says(revision))
    line = refusal(settings, database)
    assert f"revision {revision}" in line and "before 2026-11-28" in line
    assert "export" in line and "lacks its turns" in line and "nothing was changed" in line


def test_a_database_of_a_newer_version_is_refused(
    settings: DatabaseSettings, database: Engine
) -> None:
    change(database, "ALTER TABLE turns ADD COLUMN later BIGINT", says("9999"))
    line = refusal(settings, database)
    assert "revision 9999" in line and "start the version that migrated it" in line
    assert "restore the backup" in line and "lacks what was recorded since" in line


def test_a_database_that_says_no_revision_is_refused(
    settings: DatabaseSettings, database: Engine
) -> None:
    change(database, "DROP TABLE alembic_version")
    assert "says no revision" in refusal(settings, database)


def test_the_command_prints_the_refusal_as_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    assert main(["migrate"]) == 0
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
        db.execute(says("9999"))
        db.execute("ALTER TABLE turns DROP COLUMN name")
    capsys.readouterr()
    assert main(["migrate"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "revision 9999" in captured.err
    assert "Traceback" not in captured.err and captured.out == ""


def test_a_gateway_is_ready_with_its_own_schema_alone(tmp_path: Path, shared_database: str) -> None:
    """Without one, with one, with a newer one, with one of before, and again with its own."""
    with serve(ScriptedEngine()) as engine:
        settings = make_settings(tmp_path, engine, database_url=shared_database)
        database = create_engine(shared_database.replace("+aiosqlite", ""))
        with serve_app(create_app(settings), settings) as url:

            def ready(status: int, problem: str | None) -> bool:
                reply = httpx.get(f"{url}/readyz", timeout=120)
                ledger = reply.json()["ledger"]
                is_told = ledger is None if problem is None else problem in (ledger or "")
                return reply.status_code == status and is_told

            eventually(lambda: ready(503, "has no schema"))
            migrate(settings)
            eventually(lambda: ready(200, None))
            change(database, says("9999"))
            eventually(lambda: ready(503, "revision 9999"))
            change(database, says(REVISION))
            eventually(lambda: ready(200, None))
        change(database, "ALTER TABLE turns DROP COLUMN name")
        with serve_app(create_app(settings), settings) as url:
            eventually(lambda: ready(503, "lacks `turns.name`"))
        database.dispose()


def old_rows(directory: Path) -> None:
    """A journal as versions of before the segments wrote it."""
    with closing(sqlite3.connect(directory / "journal.db")) as db, db:
        db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        db.execute("CREATE TABLE turns (id TEXT PRIMARY KEY, closed INTEGER, record BLOB)")
        db.execute("CREATE TABLE set_aside (id TEXT PRIMARY KEY, at TEXT, reason TEXT)")
        db.executemany("INSERT INTO turns VALUES (?, 1, x'00')", [(f"msg_{n}",) for n in range(6)])


def segments(directory: Path) -> None:
    for number in range(2):
        (directory / f"segment-{number:010}").write_bytes(b"a turn")


def newer(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "journal.db")) as db, db:
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
        db.execute("CREATE TABLE turns (id TEXT PRIMARY KEY, state TEXT, record BLOB)")


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (old_rows, "before 2026-11-28 wrote it (6 turns)"),
        (segments, "before 2026-11-28 wrote it (2 segments)"),
        (newer, f"a newer version wrote it (format {FORMAT + 1})"),
    ],
)
def test_a_journal_of_another_version_is_refused_as_it_is(
    tmp_path: Path,
    write: object,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tmp_path / "journal"
    directory.mkdir()
    assert callable(write)
    write(directory)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(JournalUnavailable) as refused:
        Journal(directory).start()
    line = str(refused.value)
    assert problem in line and f"reads format {FORMAT}" in line and "\n" not in line
    assert "loses the turns that the ledger does not have" in line
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    assert main(["journal", "list"]) == 1
    assert capsys.readouterr().err == line + "\n"
    after = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}
    assert after == before


def test_a_journal_that_was_refused_is_free_for_the_version_that_wrote_it(tmp_path: Path) -> None:
    newer(tmp_path)
    for _ in range(2):
        with pytest.raises(JournalUnavailable, match="newer version"):
            Journal(tmp_path).start()
    (tmp_path / "journal.db").unlink()

    async def work() -> None:
        await Journal(tmp_path).start().stop()

    asyncio.run(work())
