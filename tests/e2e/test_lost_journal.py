"""A gateway is killed while the database is away, and its journal is gone at the next start: the
engine's counts become the turns' rows, by themselves."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from scripts.bench.load import body_of
from scripts.stack import (
    ADMIN_KEY,
    API_HEADERS,
    free_port,
    gateway_environment,
    migrate,
    serving_engine,
    url_of,
)
from tests.e2e.kills import Killed, idle_stats
from tests.e2e.outage import data_directory, stopped_postgres
from tests.faults.sizes import number, told
from tests.gateway.admin_client import Admin
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually
from tests.postgres import new_database, running_postgres

pytestmark = pytest.mark.postgres
TURNS = number(14, 100)
TOKENS = 5


@pytest.fixture
def database() -> Iterator[str]:
    """Of a server of its own, since it is stopped."""
    with running_postgres() as server:
        yield new_database(server, uuid4().hex)


def ask(url: str, place: int) -> Any:
    body = body_of("synthetic", "Rules of the lighthouse. " * 60, f"Q {place}", max_tokens=TOKENS)
    reply = httpx.post(f"{url}/v1/messages", json=body, headers=API_HEADERS, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_what_a_lost_journal_had_comes_into_the_ledger_from_the_engines(
    tmp_path: Path, database: str
) -> None:
    port = free_port()
    with serving_engine("synthetic", {"ENGINE_SYNTHETIC_DECODE_MS": "1"}) as engine:
        settings = gateway_environment(
            port, tmp_path, [engine.wait().url], {"HOLDFAST_DATABASE_URL": database}
        )
        migrate(settings)
        gateway = Killed(tmp_path, settings, url_of(port))
        try:
            before = ask(gateway.url, 0)
            eventually(lambda: len(ledger_rows(database)) == 1)
            with stopped_postgres(data_directory(database)):
                with ThreadPoolExecutor(4) as pool:
                    answers = list(pool.map(lambda place: ask(gateway.url, place), range(TURNS)))
                gateway.kill()
            for path in (tmp_path / "journal").glob("journal.db*"):
                path.unlink()
            gateway.start()
            eventually(lambda: len(ledger_rows(database)) == TURNS + 1, 120)
            eventually(lambda: idle_stats(engine.url)["unacknowledged"] == 0, 120)
            health = httpx.get(f"{gateway.url}/readyz", timeout=120).json()
            page = Admin(gateway.url, ADMIN_KEY).recorded(answers[0]["id"])
        finally:
            gateway.stop()
    rows = {row["id"]: row for row in ledger_rows(database)}
    assert rows.keys() == {before["id"], *(answer["id"] for answer in answers)}
    for answer in answers:
        row = rows[answer["id"]]
        usage = answer["usage"]
        assert row["input_tokens"] == usage["input_tokens"]
        assert row["cache_read_tokens"] == usage["cache_read_input_tokens"]
        assert row["output_tokens"] == usage["output_tokens"] == TOKENS
        assert (row["workspace_id"], row["outcome"]) == ("default", "gateway_lost")
        assert row["cost_nano"] is not None
    told("a lost journal: turns", answered=TURNS + 1, rows=len(rows))
    assert page["key_id"] == "unknown"
    kinds = {condition["kind"] for condition in health["conditions"]}
    assert not kinds & {"turns_set_aside", "turns_missing"}
