"""A finished turn of a workspace with `keep_days` has its content, or its row says why not.

Kills of the gateway and a stopped database, under a workspace that keeps.
"""

import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from anthropic import Anthropic

from gateway.structs.usage import KEPT, KEPT_CONTENTS, NO_ROOM, TOO_LARGE
from gateway.turn import contents
from scripts.stack import (
    ADMIN_KEY,
    free_port,
    gateway_environment,
    migrate,
    serving_engine,
    url_of,
)
from tests.e2e.kills import Killed, run_kills
from tests.e2e.outage import data_directory, stopped_postgres
from tests.e2e.test_batches import ended, row, sdk_at
from tests.faults.sizes import number, told
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack, stacked
from tests.gateway.serving import eventually
from tests.postgres import new_database, running_postgres

WORKSPACE = "default"
OUTAGE_SECONDS = 4.0
NUM_ROWS = number(24, 100)
SLOW_ENGINE = {"ENGINE_SYNTHETIC_PREFILL_US": "0", "ENGINE_SYNTHETIC_DECODE_MS": "30"}
FEW_ROWS = {"HOLDFAST_BATCH_CONCURRENCY": "3"}
CUT_OFF = ("gateway_killed", "client_disconnect", "open")


def keep(admin: Admin) -> None:
    admin.post(f"workspaces/{WORKSPACE}", {"keep_days": 7})
    time.sleep(2.0)  # the gateway reads keys anew each second


def turns_of(admin: Admin) -> list[dict[str, Any]]:
    """All turns that the ledger has."""
    turns: list[dict[str, Any]] = []
    after = ""
    while True:
        page = admin.get(f"turns/search?limit=1000{after}")
        turns += page["turns"]
        if page["next"] is None:
            return turns
        after = f"&after={page['next']}"


def has_content(url: str, turn_id: str, key: str = ADMIN_KEY) -> bool:
    path = f"{url}/admin/v1/turns/{turn_id}/content"
    reply = httpx.get(path, headers={"x-api-key": key}, timeout=120, trust_env=False)
    assert reply.status_code in (200, 404), reply.text
    return reply.status_code == 200


def num_contents(journal: Path) -> int:
    with closing(sqlite3.connect(f"file:{journal / 'journal.db'}?mode=ro", uri=True)) as db:
        (count,) = db.execute("SELECT count(*) FROM contents").fetchone()
    return int(count)


class Keeping(Killed):
    """A gateway whose workspace keeps. `finished` and `missing` are of the last look."""

    finished: Counter[str | None]
    missing: list[dict[str, Any]]

    def __init__(self, data: Path, settings: Any, url: str) -> None:
        super().__init__(data, settings, url)
        self.journal = data / "journal"
        keep(Admin(url, ADMIN_KEY))

    def stop(self) -> None:
        eventually(lambda: num_contents(self.journal) == 0, 120)
        finished = [
            turn
            for turn in turns_of(Admin(self.url, ADMIN_KEY))
            if turn["content"] is not None and turn["outcome"] not in CUT_OFF
        ]
        type(self).finished = Counter(turn["content"] for turn in finished)
        type(self).missing = [turn for turn in finished if not has_content(self.url, turn["id"])]
        super().stop()


def test_no_kill_takes_the_content_of_a_finished_turn(tmp_path: Path) -> None:
    report = run_kills(
        tmp_path, kills=number(1, 20), streams=number(20, 50), max_tokens=20, kind=Keeping
    )
    told("contents over kills", finished=dict(Keeping.finished), missing=len(Keeping.missing))
    assert report.is_exact, report
    assert sum(report.interrupted) > 0 and Keeping.finished[KEPT] > 0
    assert set(Keeping.finished) == {KEPT} and not Keeping.missing


def test_rows_of_batches_have_their_contents_over_kills(tmp_path: Path) -> None:
    port = free_port()
    with serving_engine("synthetic", SLOW_ENGINE) as engine:
        settings = gateway_environment(port, tmp_path, [engine.wait().url], FEW_ROWS)
        migrate(settings)
        gateway = Killed(tmp_path, settings, url_of(port))
        try:
            admin = Admin(gateway.url, ADMIN_KEY)
            keep(admin)
            with sdk_at(gateway.url) as sdk:
                rows = [row(f"r{place}", "kept", max_tokens=10) for place in range(NUM_ROWS)]
                batch = sdk.messages.batches.create(requests=rows)
                for goal in (NUM_ROWS // 4, NUM_ROWS // 2):
                    eventually(lambda goal=goal: succeeded(sdk, batch.id) >= goal)  # type: ignore[misc]
                    gateway.kill()
                    gateway.start()
                ended(sdk, batch)
                ids = [
                    result.result.message.id
                    for result in sdk.messages.batches.results(batch.id)
                    if result.result.type == "succeeded"
                ]
            assert len(set(ids)) == NUM_ROWS
            eventually(lambda: num_contents(tmp_path / "journal") == 0, 120)
            turns = turns_of(admin)
            missing = [turn_id for turn_id in ids if not has_content(gateway.url, turn_id)]
        finally:
            gateway.stop()
    told("contents of batches over kills", rows=NUM_ROWS, missing=len(missing))
    assert {turn["id"]: turn["content"] for turn in turns} == dict.fromkeys(ids, KEPT)
    assert not missing


def succeeded(sdk: Anthropic, batch_id: str) -> int:
    return sdk.messages.batches.retrieve(batch_id).request_counts.succeeded


@pytest.mark.postgres
def test_an_outage_of_the_database_takes_no_content(tmp_path: Path) -> None:
    with running_postgres() as server:
        url = new_database(server, uuid4().hex)
        with stacked(tmp_path, database_url=url) as stack:
            admin = Admin(stack.url)
            keep(admin)
            with ThreadPoolExecutor(8) as pool, stopped_postgres(data_directory(url)):
                ends = time.monotonic() + OUTAGE_SECONDS
                futures = [pool.submit(ask_until, stack, ends) for _ in range(8)]
                ids = [turn_id for future in futures for turn_id in future.result()]
            assert len(ids) > 8
            eventually(lambda: len(turns_of(admin)) == len(ids), 120)
            eventually(lambda: num_contents(tmp_path / "journal") == 0, 120)
            assert {turn["content"] for turn in turns_of(admin)} == {KEPT}
            missing = [turn_id for turn_id in ids if not has_content(stack.url, turn_id, admin.key)]
            told("contents over an outage", finished=len(ids), missing=len(missing))
            assert not missing


def ask_until(stack: Stack, ends: float) -> list[str]:
    ids: list[str] = []
    while time.monotonic() < ends:
        reply = stack.post("/v1/messages", json=body())
        assert reply.status_code == 200, reply.text
        ids.append(reply.json()["id"])
    return ids


def test_what_is_too_much_is_told_on_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAX_BYTES", 4096)
    with stacked(tmp_path) as stack:
        admin = Admin(stack.url)
        keep(admin)
        message = {"role": "user", "content": "x" * 5000}
        long_id = stack.post("/v1/messages", json=body(messages=[message])).json()["id"]
        eventually(lambda: stack.admin(f"turns/{long_id}").status_code == 200)
        assert admin.get(f"turns/{long_id}")["content"] == TOO_LARGE
        assert not has_content(stack.url, long_id, admin.key)
        short_id = stack.post("/v1/messages", json=body()).json()["id"]
        eventually(lambda: has_content(stack.url, short_id, admin.key))
        assert admin.get(f"turns/{short_id}")["content"] == KEPT
        # What is deleted does not come back.
        admin.delete(f"turns/{short_id}/content")
        time.sleep(1.0)
        assert not has_content(stack.url, short_id, admin.key)
    monkeypatch.setattr("gateway.app.MAX_WAITING_BYTES", 10)
    with stacked(tmp_path) as stack:
        admin = Admin(stack.url)
        third_id = stack.post("/v1/messages", json=body()).json()["id"]
        eventually(lambda: stack.admin(f"turns/{third_id}").status_code == 200)
        assert admin.get(f"turns/{third_id}")["content"] == NO_ROOM
        assert NO_ROOM in KEPT_CONTENTS
