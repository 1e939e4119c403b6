"""The sums beside the turns are what summing the turns gives, whatever comes in any order."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql

from engine.protocol import TTLS, WRITE_FIELDS
from gateway.base.errors import InvalidRequest
from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.reads.sums import Queries, Range, latency
from gateway.ledger.reads.turns import epochs
from gateway.ledger.rollups import MARK_KINDS, dimensions, gap_changes
from gateway.ledger.schema import (
    EpochRow,
    HorizonRow,
    LatencyRollupRow,
    PrefixRow,
    ReasonRollupRow,
    TurnRollupRow,
    TurnRow,
)
from gateway.ledger.upkeep import rebuild, retain
from gateway.prices.price import PROMPT_BANDS
from gateway.structs.usage import TurnMark
from tests.faults import sizes
from tests.gateway.records import turn_record
from tests.migrated import migrate
from tests.postgres import new_database

START = datetime(2026, 11, 20, 22, 30, tzinfo=UTC)
SUMS = (TurnRollupRow, ReasonRollupRow, LatencyRollupRow, PrefixRow, EpochRow)
MAYBE_SECONDS = st.none() | st.floats(0.0001, 300)


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def ledger_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    data: Path = tmp_path_factory.mktemp("rollups")
    url = ""
    if request.param == "postgres":
        url = new_database(request.getfixturevalue("postgres"), uuid4().hex)
    database = DatabaseSettings(data=data, database_url=url)
    migrate(database)
    return database.ledger_url


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


MARKS = st.builds(
    TurnMark,
    section=st.sampled_from(["tools", "system", "messages"]),
    block=st.integers(0, 3),
    tokens=st.none() | st.integers(0, 99),
    ttl=st.sampled_from([*TTLS]),
    missed=st.sampled_from([None, "cold", "grew", "ttl_expired"]),
)
WRITTEN = {name: 700 + 900 * number for number, name in enumerate(WRITE_FIELDS.values())}
"""What a turn writes of each TTL class, if it does."""


@st.composite
def turns(draw: st.DrawFn) -> TurnRecord:
    """Few values of each kind, so that turns meet; two days, so that intervals end among them."""
    cost = draw(st.none() | st.integers(0, 10**12))
    return TurnRecord(
        id=f"msg_{draw(st.integers(0, 40)):03}",
        instance="i",
        workspace=draw(st.sampled_from(["a", "b"])),
        key_id=draw(st.sampled_from(["k", "l"])),
        model=draw(st.sampled_from(["m", "n"])),
        engine=draw(st.sampled_from([None, "engine-0", "engine-1"])),
        epoch=draw(st.sampled_from([None, "e", "f"])),
        stream=False,
        opened_at=START + timedelta(seconds=draw(st.integers(0, 9000))),
        outcome=draw(st.sampled_from(["stop", "api_error", "client_disconnect"])),
        miss_reason=draw(st.sampled_from([None, "cold", "ttl_expired"])),
        input_tokens=draw(st.integers(0, 300_000)),
        cache_read_tokens=draw(st.sampled_from([0, 5000])),
        **{name: draw(st.sampled_from([0, tokens])) for name, tokens in WRITTEN.items()},
        automatic_tokens=draw(st.integers(0, 9)),
        computed_tokens=draw(st.integers(0, 10_000)),
        output_tokens=draw(st.integers(0, 10_000)),
        thinking_tokens=draw(st.integers(0, 99)),
        first_token_seconds=draw(MAYBE_SECONDS),
        prefill_seconds=draw(MAYBE_SECONDS),
        price=draw(st.sampled_from([None, "p@2026-01-01", "q@2026-01-01"])),
        cost=cost,
        cost_without_cache=None if cost is None else cost * 2,
        prefix=draw(st.sampled_from([None, "0" * 16, "f" * 16])),
        prefix_ttl=draw(st.sampled_from([None, *TTLS])),
        marks=draw(st.none() | st.lists(MARKS, max_size=4)),
    )


async def rows_of(ledger: Ledger) -> dict[str, list[dict[str, Any]]]:
    """Everything that is summed; empty groups, which rebuilding cannot know of, do not occur."""
    async with ledger.transaction() as connection:
        return {
            table.__tablename__: sorted(
                (dict(row._mapping) for row in await connection.execute(select(table.__table__))),
                key=repr,
            )
            for table in SUMS
        }


def first_of_each(batches: list[list[TurnRecord]]) -> list[TurnRecord]:
    first: dict[str, TurnRecord] = {}
    for batch in batches:
        for record in batch:
            first.setdefault(record.id, record)
    return list(first.values())


def assert_sums(rows: dict[str, list[dict[str, Any]]], turns: list[TurnRecord]) -> None:
    """Against sums made here, without SQL."""
    for by_engine, width in ((0, 60), (0, 3600), (0, 86_400), (1, 300), (1, 3600), (1, 86_400)):
        sums: Counter[tuple[Any, ...]] = Counter()
        for turn in turns:
            start = int(turn.opened_at.timestamp()) // width * width * 1000
            prompt = turn.input_tokens + turn.cache_read_tokens
            prompt += sum(getattr(turn, name) for name in WRITE_FIELDS.values())
            above = max((band for band in PROMPT_BANDS if prompt > band), default=0)
            price = turn.price if turn.price and turn.cost is not None else ""
            whose = (turn.workspace, turn.key_id, "")
            if by_engine:
                whose = ("" if width == 300 else turn.workspace, "", turn.engine or "")
            group = (start, *whose, turn.model, price, above)
            values = {
                "requests": 1,
                "requests_with_read": int(turn.cache_read_tokens > 0),
                "errors": int(turn.outcome == "api_error"),
                "unpriced": int(turn.cost is None),
                "input_tokens": turn.input_tokens,
                **{name: getattr(turn, name) for name in WRITE_FIELDS.values()},
                "output_tokens": turn.output_tokens,
                "cost_nano": turn.cost or 0,
                "cost_without_cache_nano": turn.cost_without_cache or 0,
                "prefill_tokens": 0 if turn.prefill_seconds is None else turn.computed_tokens,
            }
            for name, value in values.items():
                sums[(*group, name)] += value
        rollups = of_kind(rows["turn_rollups"], by_engine, width)
        own_names = ("start_ms", *dimensions())
        stored = (
            {
                (*(row[name] for name in own_names), measure): row[measure]
                for row in rollups
                for measure in values
            }
            if turns
            else {}
        )
        assert stored == dict(sums)
    assert_gaps(rows["prefixes"], turns)
    models: dict[tuple[Any, ...], set[str]] = {}
    for turn in turns:
        if turn.prefix:
            models.setdefault((turn.workspace, turn.prefix), set()).add(turn.model)
    assert {
        (row["workspace_id"], row["prefix"]): (row["least_model"], row["model"])
        for row in rows["prefixes"]
    } == {key: (min(names), max(names)) for key, names in models.items()}
    num_timed = sum(turn.first_token_seconds is not None for turn in turns)
    for by_engine, width in ((0, 300), (0, 3600), (0, 86_400), (1, 86_400)):
        bins = of_kind(rows["latency_rollups"], by_engine, width)
        assert sum(row["requests"] for row in bins) == num_timed
    for by_engine, width in ((0, 60), (0, 3600), (0, 86_400), (1, 3600), (1, 86_400)):
        reasons = of_kind(rows["reason_rollups"], by_engine, width)
        outcomes = [row["requests"] for row in reasons if row["kind"] == "outcome"]
        assert sum(outcomes) == len(turns)
        assert counted(reasons, MARK_KINDS) == Counter(
            mark.missed for turn in turns for mark in turn.marks or () if mark.missed
        ), "each marker that was not read has one reason"
        assert counted(reasons, ("miss",)) == reasons_of(turns, has_read=False)
        assert counted(reasons, ("part",)) == reasons_of(turns, has_read=True)
    lives: dict[tuple[Any, ...], list[int]] = {}
    for turn in turns:
        if turn.engine and turn.epoch:
            opened_ms = int(turn.opened_at.timestamp() * 1000)
            lives.setdefault((turn.engine, turn.epoch, turn.model), []).append(opened_ms)
    assert {
        (row["engine"], row["epoch"], row["model"]): (row["first_ms"], row["last_ms"])
        for row in rows["engine_epochs"]
    } == {key: (min(moments), max(moments)) for key, moments in lives.items()}


def counted(rows: list[dict[str, Any]], kinds: Collection[str]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for row in rows:
        if row["kind"] in kinds:
            sums[row["value"]] += row["requests"]
    return sums


def reasons_of(turns: list[TurnRecord], *, has_read: bool) -> Counter[str]:
    return Counter(
        turn.miss_reason
        for turn in turns
        if turn.miss_reason and (turn.cache_read_tokens > 0) == has_read
    )


def of_kind(rows: list[dict[str, Any]], by_engine: int, width: int) -> list[dict[str, Any]]:
    return [r for r in rows if (r["by_engine"], r["width_seconds"]) == (by_engine, width)]


def assert_gaps(rows: list[dict[str, Any]], turns: list[TurnRecord]) -> None:
    expected = {}
    for prefix in {(turn.workspace, turn.prefix) for turn in turns if turn.prefix}:
        times = sorted(t.opened_at.timestamp() for t in turns if (t.workspace, t.prefix) == prefix)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        expected[prefix] = (
            len(times),
            sum(g <= 300 for g in gaps),
            sum(300 < g <= 3600 for g in gaps),
        )
    by_prefix = {
        (row["workspace_id"], row["prefix"]): (row["requests"], row["gaps_5m"], row["gaps_1h"])
        for row in rows
    }
    assert by_prefix == expected


async def empty(ledger: Ledger) -> None:
    async with ledger.transaction() as connection:
        for table in (*SUMS, TurnRow, HorizonRow):
            await connection.execute(delete(table))


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[Ledger]:
    store = Ledger(ledger_url, 600.0)
    await empty(store)
    yield store
    await store.close()


@settings(
    max_examples=sizes.number(8, 25),
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(batches=st.lists(st.lists(turns(), min_size=1, max_size=12), min_size=1, max_size=6))
def test_sums_are_those_of_the_turns_after_any_batches_in_any_order(
    ledger_url: str, loop: asyncio.Runner, batches: list[list[TurnRecord]]
) -> None:
    async def check(ledger: Ledger) -> None:
        await empty(ledger)
        for batch in [*batches, batches[0]]:
            await ledger.insert_turns(batch)
        rows = await rows_of(ledger)
        assert_sums(rows, first_of_each(batches))
        async with ledger.transaction() as connection:
            for table in SUMS:
                await connection.execute(delete(table))
        await rebuild(ledger)
        assert await rows_of(ledger) == rows
        await rebuild(ledger)
        assert await rows_of(ledger) == rows

    loop.run(with_ledger(ledger_url, check))


@settings(
    max_examples=sizes.number(8, 25),
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    records=st.lists(turns(), min_size=1, max_size=40),
    seconds=st.tuples(st.integers(-300, 9300), st.integers(-300, 9300)).filter(
        lambda t: t[0] < t[1]
    ),
    workspace=st.sampled_from([None, "a"]),
    engine=st.sampled_from([None, "engine-0"]),
    by=st.sampled_from([(), ("engine", "model"), ("key_id",), ("workspace_id", "engine")]),
)
def test_a_range_has_exactly_its_turns_whatever_sums_it_is_read_from(
    ledger_url: str,
    loop: asyncio.Runner,
    records: list[TurnRecord],
    seconds: tuple[int, int],
    workspace: str | None,
    engine: str | None,
    by: tuple[str, ...],
) -> None:
    since, until = (int((START.timestamp() + second) * 1000) for second in seconds)
    of = Range(since_ms=since, until_ms=until, workspace=workspace, engine=engine)
    there = [
        turn
        for turn in first_of_each([records])
        if since <= turn.opened_at.timestamp() * 1000 < until
        and workspace in (None, turn.workspace)
        and engine in (None, turn.engine)
    ]
    names = {"workspace_id": "workspace"}
    expected: Counter[tuple[Any, ...]] = Counter()
    for turn in there:
        expected[tuple(getattr(turn, names.get(n, n)) or "" for n in by)] += turn.output_tokens

    async def check(ledger: Ledger) -> None:
        await empty(ledger)
        await ledger.insert_turns(records)
        queries = Queries(ledger)
        if engine is not None and "key_id" in by:
            with pytest.raises(InvalidRequest, match=r"^engine: "):
                await queries.totals_by(of, by)
            return
        totals = await queries.totals_by(of, by)
        assert {key: total.output_tokens for key, total in totals.items()} == dict(expected)
        series = (await queries.series(of)).buckets
        assert sum(bucket.totals.requests for bucket in series) == len(there)
        told_of = await queries.reasons(of)
        assert sum(told_of.outcomes.values()) == len(there)
        missed = [t for t in there if t.miss_reason]
        assert told_of.misses == Counter(t.miss_reason for t in missed if not t.cache_read_tokens)
        assert told_of.parts == Counter(t.miss_reason for t in missed if t.cache_read_tokens)
        marks = (mark for turn in there for mark in turn.marks or ())
        assert told_of.marks == Counter(mark.missed for mark in marks if mark.missed)

    loop.run(with_ledger(ledger_url, check))


def at(number: int, day: int, **changes: Any) -> TurnRecord:
    values: dict[str, Any] = {
        "workspace": "a",
        "opened_at": START + timedelta(days=day),
        "outcome": "stop",
        "miss_reason": "cold",
        "input_tokens": 10,
        "first_token_seconds": 0.1,
        "prefix": "0" * 16,
    }
    return turn_record(f"msg_{number:04}", **{**values, **changes})


def ms(day: float) -> int:
    return int((START + timedelta(days=day)).timestamp() * 1000)


@pytest.mark.anyio
async def test_retention_deletes_turns_and_keeps_their_sums(ledger: Ledger) -> None:
    await ledger.insert_turns([at(number, number // 300) for number in range(3000)])
    everything = Range(since_ms=ms(-1), until_ms=ms(11))
    queries = Queries(ledger)
    before = await queries.totals(everything)
    reasons = await queries.reasons(everything)
    deleted = await retain(ledger, ms(8), ms(2), ms(8))
    assert (deleted.turns, (await queries.totals(everything)).requests) == (2400, 2400)
    assert before.requests == 3000 and reasons.misses == {"cold": 3000}
    # A range that begins within a day whose turns are gone takes the whole day.
    partial = Range(since_ms=ms(3) + 60_000, until_ms=ms(5))
    assert (await queries.totals(partial)).requests == 900
    series = await queries.series(everything, 86_400)
    assert sum(bucket.totals.requests for bucket in series.buckets) == 2400
    # Rebuilding does not forget what only the sums remember.
    rollups = (await rows_of(ledger))["turn_rollups"]
    await rebuild(ledger)
    assert (await rows_of(ledger))["turn_rollups"] == rollups
    again = await retain(ledger, ms(8), ms(2), ms(8))
    assert again.turns == 0 and again.rollups == 0


@pytest.mark.anyio
async def test_turns_arrive_while_others_are_deleted_and_summed_again(ledger: Ledger) -> None:
    await ledger.insert_turns([at(number, 0) for number in range(2000)])

    async def insert() -> None:
        for number in range(2000, 2400, 20):
            await ledger.insert_turns([at(n, 9) for n in range(number, number + 20)])

    async def maintain() -> None:
        await rebuild(ledger)
        await retain(ledger, ms(5), ms(-5), ms(5))
        await rebuild(ledger)

    async with asyncio.TaskGroup() as group:
        group.create_task(insert())
        group.create_task(maintain())
    totals = await Queries(ledger).totals(Range(since_ms=ms(-1), until_ms=ms(20)))
    assert (totals.requests, totals.input_tokens) == (2400, 24_000)
    async with ledger.transaction() as connection:
        result = await connection.execute(select(TurnRow.id))
        assert len(result.all()) == 400


@pytest.mark.anyio
async def test_two_writers_of_the_same_prefixes_lose_nothing(
    ledger: Ledger, ledger_url: str
) -> None:
    second_ledger = Ledger(ledger_url, 600.0)

    async def insert(into: Ledger, first: int) -> None:
        for start in range(first, first + 200, 20):
            turns = [
                at(n, 0, opened_at=START + timedelta(seconds=n), prefix=f"{n % 3:016}")
                for n in range(start, start + 20)
            ]
            await into.insert_turns(turns)

    async with asyncio.TaskGroup() as group:
        group.create_task(insert(ledger, 0))
        group.create_task(insert(second_ledger, 200))
    rows = await rows_of(ledger)
    assert sum(row["requests"] for row in rows["prefixes"]) == 400
    await rebuild(ledger)
    assert await rows_of(ledger) == rows
    await second_ledger.close()


@pytest.mark.anyio
async def test_a_restart_is_where_an_engines_turns_have_another_epoch(ledger: Ledger) -> None:
    lives = (("one", "a"), ("two", "a"), ("one", "b"), ("one", "c"), ("two", "a"))
    await ledger.insert_turns(
        [
            at(n, n, engine=engine, epoch=epoch, miss_reason=reason, cache_write_5m_tokens=7)
            for n, (engine, epoch) in enumerate(lives)
            for reason in ["engine_restart" if epoch == "b" else "cold"]
        ]
    )
    runs = await epochs(ledger, Range(since_ms=ms(-1), until_ms=ms(9)))
    assert [(e.engine, e.epoch, e.last_ms, e.first_ms) for e in runs] == [
        ("one", "c", ms(2), ms(3)),
        ("one", "b", ms(0), ms(2)),
    ]
    assert [(e.lost.requests, e.lost.written_tokens) for e in runs] == [(0, 0), (1, 7)]
    assert [e.epoch for e in await epochs(ledger, Range(since_ms=ms(1), until_ms=ms(9)))] == ["c"]


@pytest.mark.parametrize(("minutes", "step"), [(25, 300), (170, 3600)])
@pytest.mark.anyio
async def test_charts_of_many_turns_are_made_of_sums_and_lose_none(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, minutes: int, step: int
) -> None:
    """From 22:30:07 on, so that neither end is one of the sums'."""
    monkeypatch.setattr("gateway.ledger.reads.sums._FINE_TURNS", 1000)
    for first in range(0, 1020, 170):
        await ledger.insert_turns(
            [
                at(
                    n,
                    0,
                    prefix=None,
                    opened_at=START + timedelta(seconds=n * 60 * minutes / 1020),
                )
                for n in range(first, first + 170)
            ]
        )
    since = ms(0) + 7000
    of = Range(since_ms=since, until_ms=ms(0) + minutes * 60_000 - 3000)
    inside = sum(since <= ms(0) + n * 60_000 * minutes / 1020 < of.until_ms for n in range(1020))
    assert inside > 1000
    times = await latency(ledger, of)
    series = await Queries(ledger).series(of)
    assert times.bucket_seconds == step and series.bucket_seconds == (60 if step == 300 else 300)
    assert times.misses.requests == inside
    assert sum(point.misses.requests for point in times.series) == inside
    assert sum(bucket.totals.requests for bucket in series.buckets) == inside


@pytest.mark.anyio
async def test_a_series_has_every_interval_and_marks_the_partial_ones(ledger: Ledger) -> None:
    await ledger.insert_turns([at(1, 0)])
    end = ms(0) + 90_500
    series = await Queries(ledger).series(Range(since_ms=end - 600_000, until_ms=end))
    assert series.bucket_seconds == 10
    assert [b.is_partial for b in series.buckets] == [True, *[False] * 59, True]
    assert [b.totals.requests for b in series.buckets if b.totals.requests] == [1]


@pytest.mark.parametrize("hours", [1, 24, 47])
@pytest.mark.anyio
async def test_latency_is_shown_for_short_ranges_whose_turns_were_deleted(
    ledger: Ledger, hours: int
) -> None:
    await ledger.insert_turns([at(number, number // 10) for number in range(100)])
    await retain(ledger, ms(8), ms(-1), ms(-1))
    of = Range(since_ms=ms(3), until_ms=ms(3) + hours * 3_600_000)
    times = await latency(ledger, of)
    # The range begins at 22:30 and is widened to the days that it touches.
    assert times.misses.requests == 10 * (1 + (22.5 + hours > 24) + (22.5 + hours > 48))
    assert times.misses.p50 is not None and times.series and times.cells


@pytest.mark.postgres
def test_postgresql_looks_each_gap_up_once_and_compiles_nothing(
    postgres: str, tmp_path: Path
) -> None:
    """It merged the look-ups into each of their uses and compiled them for seconds, batch by batch:
    50 killed gateways never got their turns into the ledger."""
    database = DatabaseSettings(data=tmp_path, database_url=new_database(postgres, uuid4().hex))
    migrate(database)
    changes = select(gap_changes(True)).compile(dialect=postgresql.psycopg.dialect())

    async def look(ledger: Ledger) -> tuple[str, str]:
        async with ledger.transaction() as connection:
            jit = (await connection.exec_driver_sql("SHOW jit")).scalar_one()
            words = f"EXPLAIN {changes}", changes.construct_params({"turn_ids": "[]"})
            plan = (await connection.exec_driver_sql(*words)).scalars()
            return jit, "\n".join(plan)

    jit, plan = asyncio.run(with_ledger(database.ledger_url, look))
    assert jit == "off"
    num_uses = str(changes).count("json_array_elements_text")
    assert plan.count("Function Scan on json_array_elements_text") == num_uses, plan
