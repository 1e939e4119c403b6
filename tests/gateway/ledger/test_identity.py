"""A ledger that is deleted, replaced or damaged under a running gateway costs no turn.

The drain does not forget what went into a file that has lost its name, and `/readyz` says no.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.cli.migrate import migrate
from tests.gateway.bodies import body
from tests.gateway.records import ledger_rows
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import (
    HEADERS,
    eventually,
    make_settings,
    serve,
    serve_app,
    serve_gateway,
)


def ask(url: str, count: int) -> set[str]:
    turn_ids = set()
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60, trust_env=False) as http:
        for _ in range(count):
            answer = http.post("/v1/messages", json=body())
            assert answer.status_code == 200, answer.text
            turn_ids.add(answer.json()["id"])
    return turn_ids


def health(url: str) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{url}/readyz", timeout=120)
    return answer.status_code, answer.json()


def backlog(url: str) -> int:
    return int(health(url)[1]["journal"]["backlog"])


def rows(path: Path) -> set[str]:
    return {row["id"] for row in ledger_rows(f"sqlite:///{path}")}


def move(source: Path, target: Path) -> None:
    """A SQLite database with its write-ahead log."""
    for file in list(source.glob("ledger.db*")):
        file.rename(target / file.name)


@pytest.fixture
def engine_url() -> Iterator[str]:
    with serve(ScriptedEngine()) as url:
        yield url


def test_a_ledger_that_is_deleted_while_the_gateway_runs_costs_no_turn(
    tmp_path: Path, engine_url: str
) -> None:
    backup = tmp_path / "kept"
    with serve_gateway(tmp_path, engine_url) as url:
        before = ask(url, 2)
        eventually(lambda: backlog(url) == 0)
        backup.mkdir()
        move(tmp_path, backup)
        after = ask(url, 10)
        eventually(lambda: health(url)[0] == 503)
        assert "another database" in health(url)[1]["ledger"]
        assert backlog(url) == 10, "nothing was forgotten"
        assert not (tmp_path / "ledger.db").exists(), "no empty file takes its place"
    # Whoever runs it next has an empty ledger, and what was not in the old one.
    with serve_gateway(tmp_path, engine_url) as url:
        eventually(lambda: backlog(url) == 0)
        assert health(url)[0] == 200
    assert rows(tmp_path / "ledger.db") == after
    assert rows(backup / "ledger.db") == before


def test_a_ledger_that_is_replaced_and_put_back_gets_every_turn(
    tmp_path: Path, engine_url: str
) -> None:
    replaced = tmp_path / "other"
    ledger = tmp_path / "ledger.db"
    mine = tmp_path / "mine"
    mine.mkdir()
    migrate(make_settings(replaced))
    with serve_gateway(tmp_path, engine_url) as url:
        turn_ids = ask(url, 1)
        eventually(lambda: backlog(url) == 0)
        move(tmp_path, mine)
        move(replaced, tmp_path)
        turn_ids |= ask(url, 3)
        eventually(lambda: health(url)[0] == 503)
        assert backlog(url) == 3
        assert rows(ledger) == set()
        move(tmp_path, replaced)
        move(mine, tmp_path)
        eventually(lambda: health(url)[0] == 200 and backlog(url) == 0)
    assert rows(ledger) == turn_ids


def test_a_ledger_that_is_damaged_is_said_to_be(tmp_path: Path, engine_url: str) -> None:
    ledger = tmp_path / "ledger.db"
    with serve_gateway(tmp_path, engine_url) as url:
        ask(url, 1)
        eventually(lambda: backlog(url) == 0)
    with ledger.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(ledger.stat().st_size - 100))
    settings = make_settings(tmp_path, engine_url)
    with serve_app(create_app(settings), settings) as url:  # without a migration
        eventually(lambda: health(url)[0] == 503)
        assert "damaged" in health(url)[1]["ledger"]
