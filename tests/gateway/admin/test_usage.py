"""The admin API's numbers over a range, of turns that were put into the ledger."""

import asyncio
import csv
import io
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import httpx
import pytest

from engine.protocol.reports import PrefillSums
from gateway.base.epochs import EpochReport
from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.journal.drain import charge
from gateway.ledger.database import with_ledger
from gateway.ledger.upkeep import line
from gateway.prices.files import load_prices
from tests.gateway.ledger.test_sums import at
from tests.gateway.serving import ADMIN_KEY, serve_gateway

DAY = datetime(2026, 11, 10, tzinfo=UTC)
DAY_MS = int(DAY.timestamp() * 1000)
HOUR_MS = 3_600_000
DAYS_MS = 24 * HOUR_MS
PREFIX = "ab" * 8


def turn(number: int, minutes: float, **changes: Any) -> TurnRecord:
    values: dict[str, Any] = {
        "workspace": "team-a",
        "key_id": "key_1",
        "engine": "engine-0",
        "opened_at": DAY + timedelta(minutes=minutes),
        "miss_reason": None,
        "input_tokens": 100,
        "output_tokens": 10,
        "prefix": None,
    }
    record = at(number, 0, **{**values, **changes})
    if record.model == "m":
        charge(record, load_prices().find("reference", date(2026, 11, 10)))
    return record


TURNS = [
    # A write, read five minutes and then forty minutes later; its prefill was timed.
    turn(
        1,
        0,
        cache_write_5m_tokens=2000,
        computed_tokens=2100,
        prefill_seconds=1.05,
        first_token_seconds=1.1,
        miss_reason="cold",
        prefix=PREFIX,
        prefix_ttl="5m",
    ),
    turn(2, 5, cache_read_tokens=2000, prefix=PREFIX, prefix_ttl="5m", user_agent="Anthropic/Py 1"),
    turn(3, 45, cache_write_5m_tokens=2000, miss_reason="ttl_expired", prefix=PREFIX),
    # An engine that timed nothing, a longer prompt.
    turn(4, 100, engine="engine-1", cache_read_tokens=150_000, workspace="team-b"),
    # No price, no engine, a name that a spreadsheet would run.
    turn(5, 110, model="=1+1", engine=None, outcome="api_error", key_id="key_2"),
    turn(6, 60 * 24 + 1, cache_write_1h_tokens=1000),
]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    data = tmp_path_factory.mktemp("usage")
    headers = {"x-api-key": ADMIN_KEY}
    with (
        serve_gateway(data, "http://127.0.0.1:9", turns=TURNS) as url,
        httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False) as client,
    ):
        ledger_url = DatabaseSettings(data=data).ledger_url
        asyncio.run(with_ledger(ledger_url, lambda ledger: ledger.record_epochs([TOLD])))
        yield client


def steps() -> PrefillSums:
    """Of an engine on which a token takes half a millisecond."""
    sums = PrefillSums()
    for tokens in (0, 15, 15, 512, 512, 300, 2048):
        sums.observe(tokens, 1, 0.004 + tokens * 5e-4)
    return sums


TOLD = EpochReport(
    engine="engine-0",
    epoch="one",
    model="reference",
    device="NVIDIA H100",
    kind="vllm NVIDIA H100",
    first_ms=0,
    heard_ms=DAY_MS,
    prefill_times=steps(),
)


def ask(http: httpx.Client, path: str, **parameters: Any) -> Any:
    query = {"since_ms": DAY_MS, "until_ms": DAY_MS + DAYS_MS, **parameters}
    reply = http.get(f"/admin/v1/{path}", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_range_may_begin_and_end_anywhere(http: httpx.Client) -> None:
    """From within an hour to within another: the middle comes from sums, the ends from turns."""
    for later in (0, 1):
        since = DAY_MS + 5 * 60_000 + later
        usage = ask(http, "usage", since_ms=since, until_ms=DAY_MS + DAYS_MS + 60_000 + later)
        assert usage["totals"]["requests"] == 4
    assert usage["miss_reasons"] == {"ttl_expired": 1}
    assert usage["outcomes"] == {"stop": 3, "api_error": 1}


def test_time_avoided_is_each_engines_own_and_unknown_where_none_was_timed(
    http: httpx.Client,
) -> None:
    savings = ask(http, "savings")
    by_engine = {engine["engine"]: engine for engine in savings["avoided"]}
    assert by_engine["engine-0"]["seconds_per_token"] == pytest.approx(1 / 2000)
    assert by_engine["engine-0"]["prefill_seconds"] == pytest.approx(1.0)
    assert by_engine["engine-1"]["prefill_seconds"] is None
    assert savings["prefill_tokens_avoided"] == 152_000
    assert savings["unmeasured_tokens"] == 150_000
    assert savings["gpu_hours_avoided"] == pytest.approx(1 / 3600)
    assert ask(http, "savings", engine="engine-1")["prefill_seconds_avoided"] is None


def test_pages_of_turns_hold_each_turn_once(http: httpx.Client) -> None:
    ids = []
    after = None
    while True:
        query = {"limit": 2} | ({"after": after} if after else {})
        page = http.get("/admin/v1/turns/search", params=query).json()
        ids += [turn["id"] for turn in page["turns"]]
        after = page["next"]
        if after is None:
            break
    assert ids == [turn.id for turn in sorted(TURNS, key=lambda turn: turn.opened_at, reverse=True)]


def test_turns_are_found_by_client_and_by_read_share(http: httpx.Client) -> None:
    """2,000 of the 2,100 tokens of the second turn were read: 95.2 %."""

    def ids(**parameters: Any) -> list[str]:
        page = http.get("/admin/v1/turns/search", params=parameters).json()
        return [turn["id"] for turn in page["turns"]]

    assert ids(client="Anthropic/") == ["msg_0002"]
    assert ids(min_read_percent=96) == ["msg_0004"]
    assert ids(min_read_percent=95, max_read_percent=96) == ["msg_0002"]
    assert len(ids(max_read_percent=0)) == len(TURNS) - 2


def test_one_turn_is_shown_by_its_id(http: httpx.Client) -> None:
    details = http.get("/admin/v1/turns/msg_0001").json()
    assert (details["prefix"], details["prefill_seconds"]) == (PREFIX, 1.05)
    assert details["price"].startswith("reference@2026-01-01#")
    assert http.get("/admin/v1/turns/msg_none").status_code == 404


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("usage?since_ms=5&until_ms=5", "since_ms"),
        ("turns/search?after=1.", "after"),
        ("turns/search?min_read_percent=101", "min_read_percent"),
        ("turns/search?max_read_percent=-1", "max_read_percent"),
        ("usage/groups?group_by=key&engine=engine-0", "engine"),
        ("usage/groups?group_by=key&group_by=engine", "engine"),
        ("export.csv?engine=engine-0", "engine"),
    ],
)
def test_a_wrong_question_names_its_parameter(http: httpx.Client, path: str, names: str) -> None:
    reply = http.get(f"/admin/v1/{path}")
    assert reply.status_code == 400
    assert names in reply.json()["error"]["message"]


@pytest.mark.parametrize(("rows", "lines"), [("hours", 3), ("days", 3), ("turns", 5)])
def test_an_export_holds_no_formula(http: httpx.Client, rows: str, lines: int) -> None:
    query = {"rows": rows, "since_ms": DAY_MS, "until_ms": DAY_MS + DAYS_MS}
    reply = http.get("/admin/v1/export.csv", params=query)
    assert reply.headers["content-type"].startswith("text/csv")
    table = list(csv.DictReader(io.StringIO(reply.text)))
    assert len(table) == lines
    assert {row["model"] for row in table} == {"m", "'=1+1"}
    assert sum(int(row["cache_read_tokens"]) for row in table) == 152_000


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("agent/1.0 (X11; Linux)", "agent/1.0 (X11; Linux)"),
        ("a-b=c@d+e", "a-b=c@d+e"),
        ("=1+1", "'=1+1"),
        ("\uff1d1+1", "'\uff1d1+1"),
        ("x;=1+1", "x;'=1+1"),
        ("x\n@SUM(A1)", "x\n'@SUM(A1)"),
        ("\t=1+1", "'\t'=1+1"),
        ('"=1+1', '"=1+1'),
    ],
)
def test_a_cell_begins_no_formula_with_any_list_separator(text: str, cell: str) -> None:
    (row,) = csv.reader(io.StringIO(line([text, -1]), newline=""))
    assert row == [cell, "-1"]


def test_a_workspaces_key_sees_what_an_admin_sees_of_that_workspace_and_nothing_of_others(
    http: httpx.Client,
) -> None:
    http.post("/admin/v1/workspaces", json={"id": "team-b"}).raise_for_status()
    reply = http.post("/admin/v1/keys", json={"workspace": "team-b", "scope": "read_only"})
    assert reply.status_code == 200, reply.text
    key = reply.json()["key"]

    def look(path: str, **parameters: Any) -> httpx.Response:
        return http.get(path, params=parameters, headers={"x-api-key": key})

    day = {"since_ms": DAY_MS, "until_ms": DAY_MS + DAYS_MS}
    for path in ("usage", "savings", "latency", "prefixes", "turns/search"):
        theirs = look(f"/admin/v1/{path}", **day)
        assert theirs.status_code == 200, theirs.text
        assert theirs.json() == ask(http, path, workspace="team-b")
        assert theirs.json() != ask(http, path) or path == "prefixes"
    for workspace in ("team-a", "nobody"):
        for path in ("usage", "savings", "export.csv", "turns/search"):
            assert look(f"/admin/v1/{path}", workspace=workspace).status_code == 403
    assert look("/admin/v1/turns/msg_0004").status_code == 200
    foreign = look("/admin/v1/turns/msg_0001")
    unknown = look("/admin/v1/turns/msg_0009")
    assert (foreign.status_code, unknown.status_code) == (404, 404)
    assert "team-a" not in look("/admin/v1/export.csv", rows="turns", since_ms=0).text
    groups = look("/admin/v1/usage/groups", group_by="workspace", **day)
    assert {group["workspace"] for group in groups.json()} == {"team-b"}
