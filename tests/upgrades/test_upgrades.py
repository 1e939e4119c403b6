"""What an installation of an earlier commit left behind is upgraded, to the last figure."""

import json
import os
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import MetaData, create_engine, insert, select

from gateway.app import create_app
from gateway.base.clock import Clock
from gateway.cli.migrate import migrate, upgrade
from scripts.stack import free_port
from tests.engine.store.engines import PREFIX, MovedWall, StoredEngine, read_of
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually, make_settings, serve_app

STATES = sorted(Path(__file__).parent.glob("*.tar.xz"))
EARLIEST = "29985636"
"""It left revision 0001, so that all others are run."""
TABLES = ("workspaces", "watermarks", "api_keys")
"""Rows of these come first, since others point to them."""


@pytest.fixture(params=STATES, ids=lambda path: path.name.partition(".")[0])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The files that a commit left behind."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "commit").write_text(request.param.name.partition(".")[0])
    return tmp_path


@pytest.fixture
def figures(state: Path) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((state / "figures.json").read_text())
    recorded["commit"] = (state / "commit").read_text()
    return recorded


def revision_of(file: Path) -> str:
    with closing(sqlite3.connect(file)) as db:
        (revision,) = db.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(revision)


def copy_rows(file: Path, url: str) -> None:
    """The rows of a ledger's file into an empty database of its revision. On PostgreSQL that is
    what the commit itself would have made: a revision never changes."""
    source = create_engine(f"sqlite:///{file}")
    target = create_engine(url)
    tables = MetaData()
    destination = MetaData()
    tables.reflect(source)
    destination.reflect(target)
    order = [*TABLES, *(name for name in sorted(tables.tables) if name not in TABLES)]
    with source.connect() as old, target.begin() as new:
        new.execute(destination.tables["watermarks"].delete())
        for name in order:
            if name == "alembic_version":
                continue
            booleans = [
                column.name
                for column in destination.tables[name].columns
                if column.type.python_type is bool
            ]
            rows = [dict(row._mapping) for row in old.execute(select(tables.tables[name]))]
            for row in rows:
                row.update({key: bool(row[key]) for key in booleans})
            if rows:
                new.execute(insert(destination.tables[name]), rows)
    source.dispose()
    target.dispose()


# What a later version says otherwise on purpose. The time that reads avoided was an average over
# what the filter left. It is the marginal time of a token by the engine's own steps now, which
# nobody has of rows of before: it is not known, and all that was read is unmeasured.
SAVINGS = "/admin/v1/savings"
CHANGED = {
    "29985636": {
        f"{SAVINGS}.avoided[0].tokens_per_second": None,
        f"{SAVINGS}.avoided[0].prefill_seconds": None,
        f"{SAVINGS}.avoided[0].gpu_hours": None,
        f"{SAVINGS}.prefill_seconds_avoided": None,
        f"{SAVINGS}.gpu_hours_avoided": None,
        f"{SAVINGS}.unmeasured_tokens": 11_250,
    }
}


def assert_says(answer: Any, was: Any, where: str, changed: dict[str, Any]) -> None:
    """Whatever was said is said, but for what `changed` names; a later version may say more."""
    if where in changed:
        assert answer == changed[where] != was, where
    elif isinstance(was, dict):
        for key, value in was.items():
            place = f"{where}.{key}"
            assert key in answer or changed.get(place, "") is None, place
            assert_says(answer.get(key), value, place, changed)
    elif isinstance(was, list):
        assert len(answer) == len(was), where
        for number, value in enumerate(was):
            assert_says(answer[number], value, f"{where}[{number}]", changed)
    else:
        assert answer == was, where


def check_answers(url: str, figures: dict[str, Any]) -> None:
    for path, query in figures["answers"].items():
        headers = {"x-api-key": query["key"], "authorization": f"Bearer {query['key']}"}
        reply = httpx.get(url + path, headers=headers, timeout=120, trust_env=False)
        assert reply.status_code == 200, (path, reply.text)
        is_lines = path.endswith("/results")
        lines = [json.loads(line) for line in reply.text.splitlines()] if is_lines else None
        was = json.loads(json.dumps(query["answer"]).replace(figures["url"], url))
        place = path.partition("?")[0]
        assert_says(lines or reply.json(), was, place, CHANGED.get(figures["commit"], {}))


def on_each_database() -> Iterator[Any]:
    """Of PostgreSQL one on every commit, since a revision's statements are the same there."""
    for file in STATES:
        name = file.name.partition(".")[0]
        yield pytest.param(file, "sqlite", id=f"{name}-sqlite")
        marks = [pytest.mark.postgres, *([pytest.mark.slow] if name != EARLIEST else [])]
        yield pytest.param(file, "postgres", id=f"{name}-postgres", marks=marks)


@pytest.mark.parametrize(("state", "shared_database"), [*on_each_database()], indirect=True)
def test_a_ledger_and_a_journal_are_upgraded_to_the_last_figure(
    state: Path, figures: dict[str, Any], shared_database: str
) -> None:
    data = state / "data"
    is_postgres = shared_database.startswith("postgresql")
    url = shared_database if is_postgres else ""
    settings = make_settings(data, f"http://127.0.0.1:{free_port()}", database_url=url)
    if is_postgres:
        upgrade(settings, revision_of(data / "ledger.db"))
        copy_rows(data / "ledger.db", settings.ledger_url)
    journal = data / "journal"
    files = {name: (journal / name).read_bytes() for name in os.listdir(journal)}
    # Without its journal first: what the earlier commit said was of the ledger alone.
    journal.rename(state / "journal")
    migrate(settings)
    moment = datetime.fromisoformat(figures["at"])
    clock = Clock(wall=lambda: moment)
    with serve_app(create_app(settings, clock=clock), settings) as url:
        check_answers(url, figures)
    for path in (data / "journal").iterdir():
        path.unlink()
    for name, content in files.items():
        (data / "journal" / name).write_bytes(content)
    with serve_app(create_app(settings, clock=clock), settings) as url:
        check_journal(url, files["instances"].decode().strip())


def check_journal(url: str, instance: str) -> None:
    """Two closed turns come into the ledger as they are, one is to be closed, one is set aside."""
    admin = Admin(url)
    for number in range(2):
        row = admin.recorded(f"msg_{instance}{number:016x}")
        assert (row["input_tokens"], row["cache_read_tokens"]) == (100 + number, 1000 + number)
        assert (row["output_tokens"], row["outcome"]) == (7 + number, "end_turn")
        assert (row["status"], row["cost_nano"], row["saved_nano"]) == (200, 11, 11)

    def health() -> Any:
        return httpx.get(f"{url}/readyz", timeout=120).json()["journal"]

    eventually(lambda: health()["backlog"] == 1)
    assert health()["set_aside"] == 1 and health()["damaged"] == []


def test_an_engines_store_gives_its_leases_back(state: Path, figures: dict[str, Any]) -> None:
    wall = MovedWall()
    wall.wall = figures["store"]["wall"]
    engine = StoredEngine(state / "store", wall=wall)
    try:
        assert engine.stats.restored_leases == 1
        written_tokens = figures["store"]["written_1h_tokens"]
        assert written_tokens == 22 and read_of(engine.say(PREFIX, [77])) == written_tokens
    finally:
        engine.kill()
