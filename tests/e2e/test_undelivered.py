"""A turn whose close can't be written: its row says what the client got, and nothing is charged."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.base.record import NOT_DELIVERED
from gateway.journal.store import OPEN, rows_in
from scripts.bench.load import body_of
from scripts.stack import API_HEADERS, serving_engine, serving_gateway
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually

TURNS = 3
DECODE_MS = 40
TOKENS = 60


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    settings = {"ENGINE_SYNTHETIC_DECODE_MS": str(DECODE_MS), "ENGINE_MIN_CACHE_TOKENS": "64"}
    with serving_engine("synthetic", settings) as running:
        yield running.wait().url


def ask(url: str, number: int, *, stream: bool) -> httpx.Response:
    body = body_of("synthetic", "Rules. " * 200, f"Question {number}", max_tokens=TOKENS)
    return httpx.post(
        f"{url}/v1/messages", json=body | {"stream": stream}, headers=API_HEADERS, timeout=120
    )


def open_turns(journal: Path) -> int:
    return sum(row.state == OPEN for row in rows_in(journal))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_can_not_be_recorded_is_an_error_in_its_row_and_costs_nothing(
    tmp_path: Path, engine: str, stream: bool
) -> None:
    """Somebody else holds the journal's file while the engine computes, until the clients have
    their errors. The close that is still tried then works, and must not stand."""
    journal = tmp_path / "journal"
    with serving_gateway(tmp_path, [engine]) as gateway, ThreadPoolExecutor(TURNS) as pool:
        url = gateway.wait().url
        assert ask(url, -1, stream=stream).status_code == 200
        replies: list[Future[httpx.Response]] = [
            pool.submit(ask, url, number, stream=stream) for number in range(TURNS)
        ]
        eventually(lambda: open_turns(journal) == TURNS)
        with closing(sqlite3.connect(journal / "journal.db", isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            failed = [reply.result() for reply in replies]
            holder.execute("ROLLBACK")
        for reply in failed:
            assert reply.status_code == (200 if stream else 500)
            assert "could not be recorded" in reply.text
        eventually(lambda: ask(url, TURNS, stream=stream).status_code == 200)  # 529 for a moment
        eventually(lambda: len(rows_of(tmp_path)) == TURNS + 2)
    rows = rows_of(tmp_path)
    errors = [row for row in rows if row["outcome"] == "api_error"]
    assert len(errors) == TURNS
    for row in errors:
        assert row["status"] == (200 if stream else 500)
        assert "could not be recorded" in row["error"]
        assert (row["price"], row["cost_nano"]) == (NOT_DELIVERED, 0)
        # The engine's work is told apart.
        assert row["output_tokens"] == TOKENS and row["decode_seconds"] > 0
    for row in rows:
        if row["outcome"] != "api_error":
            assert row["status"] == 200 and row["price"] != NOT_DELIVERED


def rows_of(data: Path) -> list[dict[str, Any]]:
    return ledger_rows(f"sqlite:///{data / 'ledger.db'}")
