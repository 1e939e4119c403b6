"""A flood of refusals costs neither disk nor ledger: no row of a turn, and one count a minute."""

import time
from pathlib import Path
from typing import Any

import httpx

from engine.protocol import ErrorReply
from gateway.ledger.refusals import MINUTE_MS
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack, stacked
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually

DAY_MS = 86_400_000


def counts(stack: Stack, workspace: str = "") -> dict[str, Any]:
    now_ms = int(time.time() * 1000)
    query = f"refusals/counts?since_ms={now_ms - DAY_MS}&until_ms={now_ms + MINUTE_MS}&limit=1000"
    page: dict[str, Any] = Admin(stack.url).get(query + workspace)
    return page


def by_reason(stack: Stack) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in counts(stack)["counts"]:
        sums[row["reason"]] = sums.get(row["reason"], 0) + row["requests"]
    return sums


def flood(stack: Stack, number: int, status: int, **changes: Any) -> None:
    with stack.http() as http:
        for _ in range(number):
            assert http.post("/v1/messages", json=body(**changes)).status_code == status


def test_a_client_that_asks_again_while_no_engine_is_ready_leaves_counts_and_no_rows(
    tmp_path: Path,
) -> None:
    number = 200
    with stacked(tmp_path, engine_down_seconds=0.5) as stack:
        flood(stack, 1, 200)
        eventually(lambda: len(stack.admin("turns?limit=100").json()) == 1)
        stack.engine.is_ready = False
        eventually(lambda: not stack.is_ready())
        with stack.http() as http:
            eventually(lambda: http.post("/v1/messages", json=body()).status_code == 529)
        first = by_reason(stack)["no engine ready"]
        journal = stack.data / "journal" / "journal.db-wal"
        before = journal.stat().st_mtime_ns
        flood(stack, number, 529)
        assert journal.stat().st_mtime_ns == before, "a refusal was written to the journal"
        assert by_reason(stack) == {"no engine ready": first + number}
        rows = counts(stack)["counts"]
        places = {(row["minute_ms"], row["key"], row["reason"]) for row in rows}
        assert len(rows) == len(places) <= 3 and all(row["workspace"] for row in rows)
        assert len(stack.admin("turns?limit=100").json()) == 1
        usage = Admin(stack.url).get("usage")["totals"]
        assert (usage["requests"], usage["errors"]) == (1, 0)
        stack.engine.is_ready = True
        eventually(stack.is_ready)
        flood(stack, 1, 200)
        eventually(lambda: len(stack.admin("turns?limit=100").json()) == 2)
    with stacked(tmp_path) as again:  # they outlive the gateway
        assert by_reason(again) == {"no engine ready": first + number}


def test_each_kind_is_counted_by_its_reason_and_an_error_of_a_turn_is_not(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine()
    with stacked(tmp_path, engine, queue_seconds=0.0) as stack:
        admin = Admin(stack.url)
        admin.workspace("slow", requests_per_minute=1)
        key_id, key = admin.make_key("slow")
        flood(stack, 3, 404, model="no-such-model")
        with stack.http(key) as http:
            statuses = [http.post("/v1/messages", json=body()).status_code for _ in range(3)]
        assert statuses == [200, 429, 429]
        httpx.post(f"{stack.url}/v1/messages", json=body(), trust_env=False)
        flood(stack, 1, 400, max_tokens=-1)
        engine.refusal = ErrorReply("prompt_too_long", "prompt is too long: 9 tokens > 8 maximum")
        flood(stack, 1, 400)  # the turn has a row, which tells it
        eventually(lambda: len(stack.admin("turns?limit=100").json()) == 2)
        assert by_reason(stack) == {
            "model not found": 3,
            "requests per minute": 2,
            "missing key": 1,
            "invalid request": 1,
        }
        of_workspace = counts(stack, "&workspace=slow")
        (row,) = of_workspace["counts"]
        assert of_workspace["requests"] == row["requests"] == 2 and row["key"] == key_id
        assert Admin(stack.url, key).get("refusals/counts") == of_workspace


def test_what_an_engine_refuses_for_want_of_room_is_counted_and_has_no_row(tmp_path: Path) -> None:
    number = 30
    engine = ScriptedEngine()
    with stacked(tmp_path, engine, queue_seconds=0.2) as stack:
        engine.refusal = ErrorReply("overloaded", "too many requests wait")
        flood(stack, number, 529)
        with stack.http() as http:
            streamed = http.post("/v1/messages", json=body(stream=True))
        assert streamed.status_code == 529 and int(streamed.headers["retry-after"]) > 0
        sums = by_reason(stack)
        assert sum(sums.values()) == number + 1 and len(sums) == 1
        assert len(engine.refused) > 0, "the engine itself refused them"
        health = httpx.get(f"{stack.url}/readyz", timeout=120).json()["journal"]
        assert health["backlog"] == 0
        # A batch waits, and leaves nothing behind.
        params = {"custom_id": "row", "params": body()}
        created = stack.post("/v1/messages/batches", json={"requests": [params]}).json()
        before = len(engine.refused)
        eventually(lambda: len(engine.refused) > before + 1)
        assert stack.admin("turns?limit=100").json() == []
        engine.refusal = None
        # The gateway spares a full engine for a moment still.
        eventually(lambda: stack.post("/v1/messages", json=body()).status_code == 200)

        def is_over() -> bool:
            with stack.http() as http:
                batch = http.get(f"/v1/messages/batches/{created['id']}").json()
            return bool(batch["request_counts"]["succeeded"] == 1)

        eventually(is_over)
        eventually(lambda: len(stack.admin("turns?limit=100").json()) == 2)
        usage = Admin(stack.url).get("usage")["totals"]
        assert (usage["requests"], usage["errors"]) == (2, 0)
        assert sum(by_reason(stack).values()) >= number + 1
