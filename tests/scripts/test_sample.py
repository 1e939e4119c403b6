"""Sample data: a month that could have been, marked for good, and never mixed with real turns."""

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from anthropic import Anthropic, PermissionDeniedError
from openai import OpenAI
from openai import PermissionDeniedError as OpenAIPermissionDeniedError
from sqlalchemy import func, select

from engine.backends.synthetic_renderer import SyntheticRenderer
from engine.protocol import Role
from gateway.base.epochs import EpochReport
from gateway.base.errors import InvalidRequest, SampleData
from gateway.base.settings import DatabaseSettings
from gateway.cli.main import main
from gateway.cli.migrate import migrate
from gateway.ledger.access import Keys
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.reads.leases import leases_kept
from gateway.ledger.reads.sums import Queries, Range, latency
from gateway.ledger.schema import ApiKeyRow, PrefixRow, TurnRow
from gateway.ledger.upkeep import rebuild
from gateway.prices.files import PriceBook
from scripts.runner.options import SAMPLE_ENGINES, sample_model
from scripts.sample.__main__ import fill_sample
from scripts.sample.__main__ import main as make_sample
from scripts.sample.arrivals import Arrival
from scripts.sample.cast import APPS, MACHINES, App
from scripts.sample.month import Month
from scripts.sample.prompt import SamplePrompt
from tests.gateway.records import turn_record
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ADMIN_KEY, API_KEY, eventually, serve, serve_gateway
from tests.postgres import new_database

UNTIL = datetime(2026, 11, 21, 18, tzinfo=UTC)
NUM_TURNS = 2500
ALL = Range(since_ms=0, until_ms=2**45)
DAY = Range(since_ms=int(UNTIL.timestamp() * 1000) - 86_400_000, until_ms=ALL.until_ms)
A_TURN = turn_record("msg_real", opened_at=UNTIL, outcome="stop", input_tokens=10)
Filled = tuple[DatabaseSettings, int]


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """A database with samples, which no test changes, and the number of its turns."""
    url = ""
    if request.param == "postgres":
        url = new_database(request.getfixturevalue("postgres"), uuid4().hex)
    database = DatabaseSettings(data=tmp_path_factory.mktemp("filled"), database_url=url)
    migrate(database)
    return database, fill_sample(database, UNTIL, NUM_TURNS, 1)


def ask(database: DatabaseSettings, work: Callable[[Ledger], Any]) -> Any:
    return asyncio.run(with_ledger(database.ledger_url, work))


def rows(database: DatabaseSettings, query: Any) -> list[Any]:
    async def fetch(ledger: Ledger) -> list[Any]:
        async with ledger.transaction() as connection:
            return list((await connection.execute(query)).all())

    fetched: list[Any] = ask(database, fetch)
    return fetched


def test_a_month_is_one_that_the_contract_allows_and_shows_what_the_dashboard_is_for() -> None:
    month = list(Month(UNTIL, 4_000, 1, PriceBook()).records())
    assert len({turn.id for turn in month}) == len(month)
    assert all(UNTIL - timedelta(days=30) <= turn.opened_at < UNTIL for turn in month)
    saved: Counter[str] = Counter()
    for turn in month:
        counts = (turn.input_tokens, turn.cache_read_tokens, turn.automatic_tokens)
        assert min(*counts, turn.computed_tokens, turn.output_tokens) >= 0
        written_tokens = turn.cache_write_5m_tokens + turn.cache_write_1h_tokens
        prompt = turn.input_tokens + turn.cache_read_tokens + written_tokens
        assert turn.computed_tokens == prompt - turn.cache_read_tokens - turn.automatic_tokens
        if turn.miss_reason in ("no_breakpoint", "below_minimum"):
            assert turn.cache_read_tokens == written_tokens == 0
        for mark in turn.marks or ():
            is_read = mark.tokens is not None and mark.tokens <= turn.cache_read_tokens
            assert (mark.missed is None) == is_read, "a reason for what was not read alone"
        if turn.captured_tokens is not None and turn.available_tokens is not None:
            assert turn.captured_tokens <= turn.available_tokens
        saved[turn.workspace] += (turn.cost_without_cache or 0) - (turn.cost or 0)
    assert saved["coding"] > 0 > saved["prototype"]
    assert all(turn.cost is None for turn in month if turn.workspace == "evaluation")
    assert {app.workspace for app in APPS} == {turn.workspace for turn in month}
    assert {m.name for m in MACHINES} <= {turn.engine for turn in month}
    reasons = {turn.miss_reason for turn in month}
    assert reasons >= {None, "cold", "ttl_expired", "no_breakpoint", "routed_elsewhere"}
    assert any(turn.outcome.endswith("_error") for turn in month)
    assert len({turn.epoch for turn in month if turn.engine == "engine-2"}) == 4
    days = Counter(turn.opened_at.weekday() >= 5 for turn in month)
    assert days[False] / 22 > 2 * days[True] / 8, "weekends are quiet"
    records, again, of_another_seed = (
        list(Month(UNTIL, 500, s, PriceBook()).records()) for s in (1, 1, 2)
    )
    assert records == again != of_another_seed


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.workspace)
def test_what_engines_are_asked_has_the_months_lengths_and_names(app: App) -> None:
    arrival = Arrival(ms=1, app=app, prompt=0, talk=1, turn=1, key="k")
    messages: list[tuple[Role, str, int]] = [
        ("user", "a", 90),
        ("assistant", "b", 7),
        ("user", "c", 5),
    ]
    prompt = SamplePrompt(arrival, messages, 0, "of the month")
    request = prompt.request("id", "of the engines", 3)
    rendered = SyntheticRenderer().render(request.prompt, thinking=False, scope=request.scope)
    assert [span.end for span in rendered.segments] == prompt.lengths
    assert [name.digest for name in request.names] == prompt.keys
    marked = [(prompt.lengths[mark.segment], mark.ttl) for mark in request.breakpoints]
    assert marked == [(mark.tokens, mark.ttl) for mark in prompt.marks]


def test_the_sample_starts_the_months_engines() -> None:
    assert [f"engine-{n}" for n in range(SAMPLE_ENGINES)] == [machine.name for machine in MACHINES]
    models = [sample_model(number) for number in range(SAMPLE_ENGINES)]
    assert models == [machine.serves for machine in MACHINES]


def test_a_filled_database_has_the_products_own_sums(filled: Filled) -> None:
    database, count = filled
    totals = ask(database, lambda ledger: Queries(ledger).totals(ALL))
    assert totals.requests == count
    sums = select(func.sum(TurnRow.cost_nano), func.sum(TurnRow.cache_read_tokens))
    assert rows(database, sums) == [(totals.cost_nano, totals.cache_read_tokens)]
    prefixes = select(PrefixRow.__table__).order_by(PrefixRow.workspace_id, PrefixRow.prefix)
    before = rows(database, prefixes)
    ask(database, rebuild)
    assert rows(database, prefixes) == before
    assert any(row.gaps_5m for row in before) and any(row.gaps_1h for row in before)


def test_the_months_leases_ended_as_its_turns_say(filled: Filled) -> None:
    """`None has ended` stood beside thousands of turns that came after their lease had ended."""
    database, _ = filled
    nothing_answers = {machine.name: "of today" for machine in MACHINES}
    leases = ask(database, lambda ledger: leases_kept(ledger, ALL, nothing_answers))
    late = select(func.count()).where(TurnRow.miss_reason == "ttl_expired")
    ((came_late,),) = rows(database, late)
    assert 0 < came_late <= leases.expired
    assert set(leases.lost) == {"restart"} and not (leases.not_known or leases.held)
    query = select(func.count()).where(
        TurnRow.cache_write_5m_tokens + TurnRow.cache_write_1h_tokens > 0
    )
    ((num_writes,),) = rows(database, query)
    assert leases.expired + leases.lost["restart"] <= 2 * num_writes, "two marks a turn at most"
    of_day = ask(database, lambda ledger: leases_kept(ledger, DAY, nothing_answers))
    assert 0 < of_day.expired < leases.expired


def test_the_months_engines_are_of_one_kind_a_model(filled: Filled) -> None:
    """So reads and misses are compared. A gateway that runs on it puts no engine's epoch there."""
    database, _ = filled
    for of in (ALL, DAY):
        times = ask(database, lambda ledger, of=of: latency(ledger, of))
        assert times.cells and times.mixed == []
    report = EpochReport(
        engine="engine-0",
        epoch="of today",
        model="general-8b",
        device="",
        kind="synthetic",
        first_ms=0,
        heard_ms=1,
    )
    with pytest.raises(SampleData):
        ask(database, lambda ledger: ledger.record_epochs([report]))


def test_nothing_comes_into_a_database_of_samples(filled: Filled) -> None:
    database, count = filled
    with pytest.raises(SampleData):
        ask(database, lambda ledger: ledger.insert_turns([A_TURN]))
    with pytest.raises(InvalidRequest):
        fill_sample(database, UNTIL, NUM_TURNS, 2)
    assert ask(database, lambda ledger: Queries(ledger).totals(ALL)).requests == count


@pytest.mark.parametrize("what", ["turns", "workspace"])
def test_samples_come_into_an_empty_database_only(tmp_path: Path, what: str) -> None:
    database = DatabaseSettings(data=tmp_path)
    migrate(database)
    if what == "turns":
        ask(database, lambda ledger: ledger.insert_turns([A_TURN]))
    else:
        ask(database, lambda ledger: Keys(ledger).create("hf-key", "somebody", "k", UNTIL))
    before = rows(database, select(TurnRow.id))
    with pytest.raises(InvalidRequest):
        fill_sample(database, UNTIL, NUM_TURNS, 2)
    assert rows(database, select(TurnRow.id)) == before
    ask(database, lambda ledger: ledger.insert_turns([A_TURN]))


def test_a_gateway_on_samples_shows_them_and_serves_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    assert main(["migrate"]) == 0
    assert make_sample(["--turns", "400", "--seed", "7"]) == 0
    assert "sample data" in capsys.readouterr().out
    assert make_sample([]) == 1
    assert "already" in capsys.readouterr().err
    engine = ScriptedEngine()
    messages = [{"role": "user", "content": "Hello"}]
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        eventually(lambda: httpx.get(f"{url}/readyz", timeout=120).status_code == 200)
        with (
            Anthropic(base_url=url, api_key=API_KEY, max_retries=0, timeout=120) as client,
            pytest.raises(PermissionDeniedError, match="sample data"),
        ):
            client.messages.create(model="m", max_tokens=5, messages=messages)  # type: ignore[arg-type]
        with (
            OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=120) as openai,
            pytest.raises(OpenAIPermissionDeniedError, match="sample data"),
        ):
            openai.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
        assert not engine.requests
        since = int((datetime.now(UTC) - timedelta(days=40)).timestamp() * 1000)
        usage = f"{url}/admin/v1/usage?since_ms={since}"
        totals = httpx.get(usage, headers={"x-api-key": ADMIN_KEY}, timeout=120).json()
    database = DatabaseSettings(data=tmp_path)
    assert [(totals["totals"]["requests"],)] == rows(database, select(func.count(TurnRow.id)))
    keys = {row.workspace_id for row in rows(database, select(ApiKeyRow.workspace_id))}
    assert "default" not in keys, "no real key comes in"
