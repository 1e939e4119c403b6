"""Exports take no connection that keys, the drain or a revocation need."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from gateway.base.errors import InvalidRequest
from gateway.cli.migrate import migrate
from gateway.ledger.database import Ledger
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


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serve(ScriptedEngine()) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        yield url


def test_a_key_is_revoked_and_turns_are_drained_while_it_exports_in_parallel(url: str) -> None:
    admin = Admin(url)
    admin.workspace("reader")
    key_id, key = admin.make_key("reader", scope="read_only")
    until = int(datetime.now(UTC).timestamp() * 1000)
    path = f"{url}/admin/v1/export.csv?since_ms={until - 3 * YEAR_MS}&until_ms={until}&rows=hours"
    statuses: list[int] = []

    def export(_: int) -> None:
        answer = httpx.get(path, headers={"x-api-key": key}, timeout=120, trust_env=False)
        statuses.append(answer.status_code)

    with ThreadPoolExecutor(24) as pool:
        running = [pool.submit(export, number) for number in range(24)]
        headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
        assert httpx.post(f"{url}/v1/messages", json=body(), headers=headers, timeout=60).is_success
        admin.post(f"keys/{key_id}/revoke")
        eventually(
            lambda: httpx.get(f"{url}/readyz", timeout=120).json()["journal"]["backlog"] == 0
        )
        for each in running:
            each.result()
    assert set(statuses) <= {200, 401, 429}, "what is too much is refused, and nothing fails"


def test_an_export_of_more_rows_than_the_bound_is_refused_before_it_begins(
    tmp_path: Path,
) -> None:
    with (
        serve(ScriptedEngine()) as engine,
        serve_gateway(tmp_path, engine, max_export_rows=3) as url,
    ):
        headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}

        def export(rows: str) -> httpx.Response:
            day = int(datetime.now(UTC).timestamp()) // 86_400 * 86_400_000
            span = {"since_ms": day - YEAR_MS, "until_ms": day + 2 * 86_400_000, "rows": rows}
            admin = {"x-api-key": ADMIN_KEY}
            return httpx.get(f"{url}/admin/v1/export.csv", params=span, headers=admin, timeout=60)

        for number in range(1, 6):
            reply = httpx.post(f"{url}/v1/messages", json=body(), headers=headers, timeout=60)
            assert reply.is_success
            eventually(
                lambda: not httpx.get(f"{url}/readyz", timeout=120).json()["journal"]["backlog"]
            )
            answer = export("turns")
            if number <= 3:
                assert len(answer.text.splitlines()) == 1 + number
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert "since_ms, until_ms" in error["message"] and " 3 rows" in error["message"]
        # The five turns are one or two rows of sums.
        assert [export(rows).status_code for rows in ("hours", "days")] == [200, 200]


def test_sums_are_counted_by_the_rows_that_are_read(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    migrate(settings)

    async def check() -> None:
        ledger = Ledger(settings.ledger_url)
        await ledger.insert_turns([at(number, number) for number in range(40)])
        until = int(datetime(2027, 1, 1, tzinfo=UTC).timestamp() * 1000)
        of = Range(since_ms=until - 3 * YEAR_MS, until_ms=until)
        num_lines = len([line async for line in usage_lines(ledger, of, 3600)]) - 1
        await check_rows(ledger, of, 3600, num_lines)
        with pytest.raises(InvalidRequest):
            await check_rows(ledger, of, 3600, num_lines - 1)
        await ledger.close()

    asyncio.run(check())


def test_an_export_of_three_years_is_one_transaction_of_few_statements(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    migrate(settings)

    async def check() -> tuple[int, int, int]:
        ledger = Ledger(settings.ledger_url)
        await ledger.insert_turns([at(number, number) for number in range(40)])
        statements, begins = [], []

        def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            (begins if statement == "BEGIN" else statements).append(statement)

        event.listen(ledger.engine.sync_engine, "before_cursor_execute", note)
        until = int(datetime(2027, 1, 1, tzinfo=UTC).timestamp() * 1000)
        of = Range(since_ms=until - 3 * YEAR_MS, until_ms=until)
        lines = [line async for line in usage_lines(ledger, of, 3600)]
        await ledger.close()
        return len(lines), len(statements), len(begins)

    lines, statements, begins = asyncio.run(check())
    assert (lines, begins) == (41, 1)
    assert statements < 15, "a week at a time, and only weeks with turns"
