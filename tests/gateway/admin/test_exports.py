"""Exports take no connection that keys, the drain or a revocation need, and have a bound."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import httpx

from gateway.admin.export import SINCE_HEADER, WAITING_HEADER
from tests.gateway.admin_client import Admin
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import (
    ADMIN_KEY,
    ask,
    eventually,
    serve,
    serve_gateway,
)

YEAR_MS = 365 * 86_400_000


def is_drained(url: str) -> bool:
    return not httpx.get(f"{url}/readyz", timeout=120).json()["journal"]["backlog"]


def export(url: str, key: str, rows: str) -> httpx.Response:
    until = int(datetime.now(UTC).timestamp()) // 86_400 * 86_400_000 + 2 * 86_400_000
    parameters = {"since_ms": until - 3 * YEAR_MS, "until_ms": until, "rows": rows}
    path = f"{url}/admin/v1/export.csv"
    return httpx.get(
        path, params=parameters, headers={"x-api-key": key}, timeout=120, trust_env=False
    )


def test_a_key_is_revoked_and_turns_are_drained_while_it_exports_in_parallel(
    tmp_path: Path,
) -> None:
    with (
        serve(ScriptedEngine()) as engine,
        serve_gateway(tmp_path, engine) as url,
        ThreadPoolExecutor(24) as pool,
    ):
        admin = Admin(url)
        admin.workspace("reader")
        key_id, key = admin.make_key("reader", scope="read_only")
        running = [pool.submit(export, url, key, "hours") for _ in range(24)]
        assert ask(url).is_success
        admin.post(f"keys/{key_id}/revoke")
        eventually(lambda: is_drained(url))
        statuses = {future.result().status_code for future in running}
        assert statuses <= {200, 401, 429}, "what is too much is refused, and nothing fails"


def test_an_export_of_more_rows_than_the_bound_is_refused_before_it_begins(
    tmp_path: Path,
) -> None:
    with (
        serve(ScriptedEngine()) as engine,
        serve_gateway(tmp_path, engine, max_export_rows=3) as url,
    ):
        answers = []
        for number in (3, 1):
            for _ in range(number):
                assert ask(url).is_success
            eventually(lambda: is_drained(url))
            answers.append(export(url, ADMIN_KEY, "turns"))
        whole, answer = answers
        assert len(whole.text.splitlines()) == 1 + 3
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert "since_ms, until_ms" in error["message"] and " 3 rows" in error["message"]
        # The four turns are one or two rows of sums.
        for rows in ("hours", "days"):
            assert export(url, ADMIN_KEY, rows).status_code == 200


def test_an_export_counts_the_turns_that_wait_for_the_ledger(tmp_path: Path) -> None:
    with serve(ScriptedEngine()) as engine, serve_gateway(tmp_path, engine) as url:
        assert ask(url).is_success
        eventually(lambda: is_drained(url))
        with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as database:
            # Readers read on, and nothing new is written.
            database.execute("BEGIN IMMEDIATE")
            for _ in range(3):
                assert ask(url).is_success
            eventually(lambda: export(url, ADMIN_KEY, "turns").headers[WAITING_HEADER] == "3")
            assert len(export(url, ADMIN_KEY, "turns").text.splitlines()) == 1 + 1
            database.execute("ROLLBACK")
        eventually(lambda: is_drained(url))
        reply = export(url, ADMIN_KEY, "turns")
        assert reply.headers[WAITING_HEADER] == "0" and SINCE_HEADER not in reply.headers
        assert len(reply.text.splitlines()) == 1 + 4
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as database, database:
            database.execute("INSERT INTO horizon (id, turns_ms) VALUES (1, 86400000)")
        assert SINCE_HEADER not in export(url, ADMIN_KEY, "turns").headers
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as database, database:
            database.execute("UPDATE horizon SET turns_ms = 1767225600000")
        assert export(url, ADMIN_KEY, "turns").headers[SINCE_HEADER] == "2026-01-01T00:00:00Z"
        assert SINCE_HEADER not in export(url, ADMIN_KEY, "days").headers
