"""Exports take no connection that keys, the drain or a revocation need, and have a bound."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from gateway.base.errors import InvalidRequest
from gateway.cli.migrate import migrate
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.reads.sums import Range
from gateway.ledger.upkeep import check_rows, usage_lines
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.ledger.test_sums import at
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import (
    ADMIN_KEY,
    API_KEY,
    eventually,
    make_settings,
    serve,
    serve_gateway,
)

YEAR_MS = 365 * 86_400_000


def ask(url: str) -> None:
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
    assert httpx.post(f"{url}/v1/messages", json=body(), headers=headers, timeout=60).is_success


def is_drained(url: str) -> bool:
    return not httpx.get(f"{url}/readyz", timeout=120).json()["journal"]["backlog"]


def export(url: str, key: str, rows: str) -> httpx.Response:
    until = int(datetime.now(UTC).timestamp()) // 86_400 * 86_400_000 + 2 * 86_400_000
    asked = {"since_ms": until - 3 * YEAR_MS, "until_ms": until, "rows": rows}
    path = f"{url}/admin/v1/export.csv"
    return httpx.get(path, params=asked, headers={"x-api-key": key}, timeout=120, trust_env=False)


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
        ask(url)
        admin.post(f"keys/{key_id}/revoke")
        eventually(lambda: is_drained(url))
        statuses = {each.result().status_code for each in running}
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
                ask(url)
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


def test_three_years_are_one_transaction_of_few_statements_bounded_by_the_rows_that_are_read(
    tmp_path: Path,
) -> None:
    settings = make_settings(tmp_path)
    migrate(settings)

    async def check(ledger: Ledger) -> None:
        await ledger.insert_turns([at(number, number) for number in range(40)])
        statements: list[str] = []

        def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            statements.append(statement)

        event.listen(ledger.engine.sync_engine, "before_cursor_execute", note)
        until = int(datetime(2027, 1, 1, tzinfo=UTC).timestamp() * 1000)
        of = Range(since_ms=until - 3 * YEAR_MS, until_ms=until)
        lines = [line async for line in usage_lines(ledger, of, 3600)]
        assert len(lines) == 41 and statements.count("BEGIN") == 1
        assert len(statements) < 16, "a week at a time, and only weeks with turns"
        await check_rows(ledger, of, 3600, len(lines) - 1)
        with pytest.raises(InvalidRequest):
            await check_rows(ledger, of, 3600, len(lines) - 2)

    asyncio.run(with_ledger(settings.ledger_url, check))
