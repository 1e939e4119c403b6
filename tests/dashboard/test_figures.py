"""Every figure on Overview and Savings equals what plain SQL over random turns says.

The SQL is written here, over the turns alone: it shares neither sums, nor queries, nor prices with
the gateway. Prices are the shipped reference ones, in nano-dollars a token.
"""

import json
import math
import random
import re
import sqlite3
import tomllib
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from streamlit.dataframe_util import convert_arrow_bytes_to_pandas_df
from streamlit.testing.v1 import AppTest

from dashboard.ui import formats
from dashboard.ui.reasons import ADVICE
from engine.protocol.reports import PrefillSums
from gateway.base.epochs import EpochReport
from tests.dashboard.ledgers import Row, fill, turn
from tests.dashboard.signed_in import open_page, sign_in, table
from tests.gateway.serving import ADMIN_KEY, serve_gateway

INPUT = 1000
WRITE_5M = 1250
WRITE_1H = 2000
READ = 100
PROMPT = "(input_tokens + cache_read_tokens + cache_write_5m_tokens + cache_write_1h_tokens)"
NUM_TURNS = 700
HOUR_MS = 3_600_000
LENGTHS = ((0, 1000), (1000, 4000), (4000, 16_000), (16_000, 64_000))
# A share in a table has three digits.
SHOWN_SHARE = 5.1e-4
SEEDS = (7, 11, 23)
TOKEN_SECONDS = {"engine-0": 5e-5, "engine-1": 4e-4}
"""By engine, the time of a token as its steps tell it."""


def a_mark(section: str, missed: str | None) -> dict[str, Any]:
    """Of a turn, as the ledger keeps it."""
    return {"section": section, "block": 0, "tokens": 1500, "ttl": "5m", "missed": missed}


def turns(seed: int) -> Iterator[Row]:
    """Two days of everything: hits, misses, both TTLs, errors, turns without a price or engine.
    What is frequent differs from seed to seed. None stands near a boundary of a day from now, so
    that no second of delay moves one over it."""
    chance = random.Random(seed)
    now = datetime.now(UTC)
    weights = [chance.uniform(0.5, 2) for _ in range(6)]
    for number in range(NUM_TURNS):
        hours = chance.choice((chance.uniform(1, 23), chance.uniform(25, 47)))
        kind = chance.choices(range(6), weights)[0]
        tokens: dict[str, Any] = {"input": chance.randrange(1, 900)}
        length = chance.choice((1500, 7000, 30_000))
        if kind == 0:
            tokens |= {"write_5m": length, "miss_reason": "cold"}
        elif kind == 1:
            tokens |= {"write_1h": length, "miss_reason": chance.choice(("ttl_expired", "cold"))}
        elif kind == 2:
            reason = chance.choice((None, "ttl_expired", "routed_elsewhere"))
            tokens |= {"read": length, "write_5m": 300, "miss_reason": reason}
        elif kind < 5:
            tokens |= {"read": length}
        if kind < 4:
            last = tokens.get("miss_reason") or ("grew" if kind == 2 else None)
            first = None if tokens.get("read") else last
            tokens["marks"] = [a_mark("system", first), a_mark("messages", last)]
        if kind == 5 and number % 3 == 0:
            tokens |= {"price": None, "model": "unpriced"}
        if kind in (0, 5) and number % 4 == 0:
            written_tokens = length if kind == 0 else 0
            tokens["automatic_tokens"] = chance.randrange(written_tokens + tokens["input"] + 1)
        engine = f"engine-{number % 2}"
        tokens |= {"engine": engine, "epoch": f"{engine}-{'old' if hours > 12 else 'new'}"}
        if kind < 5:
            num_held = length if chance.random() < 0.7 else 0
            tokens |= {
                "available_tokens": num_held,
                "captured_tokens": chance.choice((num_held, 0)),
            }
        if number % 40 == 0:
            tokens |= {"outcome": "api_error", "engine": None, "epoch": None, "status": 500}
            tokens["error"] = f"engine-{number % 2} stopped: {chance.randrange(10**6)}"
        tokens["user_agent"] = chance.choice((None, "anthropic-python/1.2", "curl/8"))
        if kind < 5:
            shared = chance.randrange(30)
            tokens |= {
                "prefix": f"{shared:016x}",
                "prefix_ttl": ("5m", "1h")[shared % 2],
                "workspace_id": f"team-{shared % 3}",
                "name": chance.choice((None, "handbook")),
            }
        tokens["key_id"] = f"key_{tokens.get('workspace_id', 'default')}"
        yield turn(
            number,
            now - timedelta(hours=hours),
            output=chance.randrange(1, 400),
            first_token_seconds=chance.uniform(0.02, 0.2) * (1 if kind in (2, 3, 4) else 9),
            prefill_seconds=None if number % 10 == 0 else chance.uniform(0.01, 2),
            queue_seconds=0.0,
            **tokens,
        )


def report_of(engine: str, seconds: float) -> EpochReport:
    """What an engine told of steps that took so long for each token, and 5 ms each."""
    times = PrefillSums()
    for tokens in (0, 0, 512, 512, 300, 15, 15, 2048):
        times.observe(tokens, 1, 0.005 + tokens * seconds)
    return EpochReport(
        engine=engine,
        epoch="one",
        model="reference",
        device="",
        kind="like the other",
        first_ms=0,
        heard_ms=2**41,
        prefill_times=times,
    )


class Figures:
    """The pages of one ledger, and SQL over its turns of the last day."""

    def __init__(self, url: str, database: Path) -> None:
        self._url = url
        self._database = database
        self._pages: dict[str, AppTest] = {}
        self.until_ms = int(datetime.now(UTC).timestamp() * 1000)

    def page(self, name: str, **query: str) -> AppTest:
        """Opened once for each ledger: the tests only read it."""
        address = f"{name} {query}"
        if address not in self._pages:
            with pytest.MonkeyPatch.context() as patch:
                sign_in(patch, self._url, ADMIN_KEY)
                app = self._pages[address] = open_page(name, {"range": "24h", **query})
                assert not app.exception and not app.error
        return self._pages[address]

    def row(self, columns: str, periods_ago: int = 0, where: str = "1") -> Any:
        until = self.until_ms - periods_ago * 24 * HOUR_MS
        return self.rows(f"SELECT {columns} FROM turns", until, where)[0]

    def rows(
        self, select: str, until: int | None = None, where: str = "1", clauses: str = ""
    ) -> Any:
        until = until or self.until_ms
        span = f"opened_ms >= {until - 24 * HOUR_MS} AND opened_ms < {until}"
        with closing(sqlite3.connect(self._database)) as connection:
            return connection.execute(f"{select} WHERE {span} AND {where} {clauses}").fetchall()

    def first_tokens(self, above: int, up_to: int, sign: str, model: str) -> list[float]:
        """The times of a model's prompts of such a length that read something (`>`), or nothing
        (`=`)."""
        where = f"{PROMPT} > {above} AND {PROMPT} <= {up_to} AND cache_read_tokens {sign} 0"
        where += f" AND model = '{model}'"
        answers = self.rows("SELECT first_token_seconds FROM turns", where=where)
        return sorted(seconds for (seconds,) in answers)

    def value(self, column: str, periods_ago: int = 0, where: str = "1") -> Any:
        return self.row(column, periods_ago, where)[0]


@pytest.fixture(scope="module", params=SEEDS)
def figures(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Figures]:
    data = tmp_path_factory.mktemp("figures") / "data"
    fill(data, turns(request.param), [report_of(*usage) for usage in TOKEN_SECONDS.items()])
    with serve_gateway(data, "http://127.0.0.1:9") as url:
        yield Figures(url, next(data.glob("*.db")))


@pytest.fixture
def overview(figures: Figures) -> AppTest:
    return figures.page("overview")


@pytest.fixture
def savings(figures: Figures) -> AppTest:
    return figures.page("savings")


def card(app: AppTest, label: str) -> tuple[str, str]:
    """Its number without the colour, and what stands below it."""
    metric = next(metric for metric in app.metric if metric.label == label)
    return re.sub(r"^:red\[(.*)\]$", r"\1", metric.value), metric.delta


def alts(app: AppTest) -> list[str]:
    return [chart.proto.alt for chart in app.get("vega_lite_chart")]


def bars(app: AppTest, number: int) -> Any:
    """The rows that a chart draws."""
    dataset = app.get("vega_lite_chart")[number].proto.datasets[0]
    return convert_arrow_bytes_to_pandas_df(dataset.data.data)


READS = "SUM(cache_read_tokens)"
AUTOMATIC = """MIN(MAX(automatic_tokens - cache_write_5m_tokens - cache_write_1h_tokens, 0),
    input_tokens)"""
COMPUTED = f"SUM(input_tokens) - SUM({AUTOMATIC})"
SAVED = f"""SUM(CASE WHEN price IS NOT NULL THEN
    {PROMPT} * {INPUT} - input_tokens * {INPUT} - cache_read_tokens * {READ}
    - cache_write_5m_tokens * {WRITE_5M} - cache_write_1h_tokens * {WRITE_1H} ELSE 0 END)"""


@pytest.mark.parametrize(
    ("label", "share"),
    [
        ("Token hit rate", f"1.0 * {READS} / SUM({PROMPT})"),
        ("Cacheable hit rate", f"1.0 * {READS} / SUM({PROMPT} - input_tokens)"),
        ("Request hit rate", "1.0 * SUM(cache_read_tokens > 0) / COUNT(*)"),
    ],
)
def test_rates_and_their_change(
    figures: Figures, overview: AppTest, label: str, share: str
) -> None:
    now = figures.value(share)
    before = figures.value(share, 1)
    value, delta = card(overview, label)
    assert value == formats.percent(now)
    assert delta == formats.points(now, before, is_comparable=True)


def test_net_saved_and_how_it_changed(figures: Figures, overview: AppTest) -> None:
    now = figures.value(SAVED)
    before = figures.value(SAVED, 1)
    changed = formats.change(now, before, is_comparable=True)
    assert card(overview, "Net saved") == (formats.dollars(now), changed)


def test_requests(figures: Figures, overview: AppTest) -> None:
    count = figures.value("COUNT(*)")
    failed = figures.value("COUNT(*)", where="outcome LIKE '%\\_error' ESCAPE '\\'")
    assert failed > 0
    assert card(overview, "Requests") == (formats.compact(count), f"{failed:,} failed")


def test_prefill_avoided(figures: Figures, overview: AppTest) -> None:
    """For each engine its reads by the time of its token. A part has what it adds to the whole."""
    reads = figures.rows(f"SELECT engine, {READS} FROM turns", clauses="GROUP BY engine")
    parts = {engine: read_tokens * TOKEN_SECONDS.get(engine, 0.0) for engine, read_tokens in reads}
    value, below = card(overview, "Prefill time avoided")
    assert value == formats.seconds(sum(parts.values()))
    unknown = sum(read_tokens for engine, read_tokens in reads if engine not in TOKEN_SECONDS)
    line = f"{formats.compact(figures.value(READS))} tokens read"
    assert below == (f"{line}, {formats.compact(unknown)} of them not timed" if unknown else line)
    for engine in TOKEN_SECONDS:
        engine_page = figures.page("overview", engine=engine)
        assert card(engine_page, "Prefill time avoided")[0] == formats.seconds(parts[engine])


def test_first_token_times_are_of_one_model_and_prompt_length(
    figures: Figures, overview: AppTest
) -> None:
    """The length that most hits and misses both had; within 1 %, as its definition says."""
    times = {
        (model, low, high): [figures.first_tokens(low, high, sign, model) for sign in (">", "=")]
        for low, high in LENGTHS
        for (model,) in figures.rows("SELECT DISTINCT model FROM turns")
    }
    (model, low, high), sides = max(times.items(), key=lambda item: min(map(len, item[1])))
    for label, side in zip(("with a read", "without a read"), sides, strict=True):
        value, below = card(overview, f"First token, {label}")
        assert below == f"{low:,} to {high:,} tokens, {model}"
        number, unit = value.split()
        seconds = float(number) / (1000 if unit == "ms" else 1)
        true = side[math.ceil(0.5 * len(side)) - 1]
        # Milliseconds are whole, and seconds have two places.
        rounding = 5e-4 if unit == "ms" else 5e-3
        assert abs(seconds - true) <= 0.01 * true + rounding, label


def test_the_chart_of_tokens_says_their_sums(figures: Figures, overview: AppTest) -> None:
    """What was in memory without a marker is a class of its own, and no part of the computed."""
    writes_sql = "(cache_write_5m_tokens + cache_write_1h_tokens)"
    read_tokens, five, hour, plain, automatic = figures.row(
        f"""{READS}, SUM(cache_write_5m_tokens), SUM(cache_write_1h_tokens), SUM(input_tokens),
            SUM(MAX(automatic_tokens - {writes_sql}, 0))"""
    )
    assert automatic > 0
    assert alts(overview) == [
        f"Prompt tokens over time: {read_tokens:,} read, {five:,} written for 5 minutes,"
        f" 0 written for 30 minutes, {hour:,} written for 1 hour, 0 written for 12 hours,"
        f" {automatic:,} reused automatically, {plain - automatic:,} computed and not written."
    ]
    assert bars(overview, 0).groupby("class")["amount"].sum().to_dict() == {
        "Read from cache": read_tokens,
        "Written, 5 minutes": five,
        "Written, 1 hour": hour,
        "Reused automatically": automatic,
        "Computed, not written": plain - automatic,
    }


def test_miss_reasons_lead_to_as_many_requests_as_were_counted(
    figures: Figures, overview: AppTest
) -> None:
    """Turns that read a part are no misses, and are not listed behind a count of misses."""
    counts = dict(
        figures.rows(
            "SELECT miss_reason, COUNT(*) FROM turns",
            where="miss_reason IS NOT NULL AND cache_read_tokens = 0",
            clauses="GROUP BY 1",
        )
    )
    in_part = "miss_reason IS NOT NULL AND cache_read_tokens > 0"
    assert figures.value("COUNT(*)", where=in_part)
    links = [link.proto for link in overview.get("page_link")]
    named = {link.label: link.query_string for link in links}
    hit = {"hit": "read nothing"}
    assert named == {
        ADVICE[reason].title: urlencode({"reason": ADVICE[reason].title} | hit) for reason in counts
    }
    for reason, count in counts.items():
        page = figures.page("requests", reason=ADVICE[reason].title, **hit)
        listed = table(page, "Request id")
        assert len(listed) == min(count, 200) and not listed["Read (tokens)"].any()
    lines = [element.value for element in overview.text]
    for count in counts.values():
        share = formats.percent(count / sum(counts.values()))
        assert f"{share} · {formats.counted(count, 'request')}" in lines


def test_each_marker_that_was_not_read_is_counted_once(figures: Figures, overview: AppTest) -> None:
    marks = [
        mark["missed"]
        for (turn_marks,) in figures.rows("SELECT marks FROM turns", where="marks IS NOT NULL")
        for mark in json.loads(turn_marks)
        if mark["missed"]
    ]
    grew = marks.count("grew")
    line = f"{len(marks):,} markers were not read in full, {grew:,} of them new behind what was"
    assert any(line in element.value for element in overview.caption)


def test_the_hero_says_what_was_not_computed_again(figures: Figures, overview: AppTest) -> None:
    read_tokens = formats.in_words(figures.value(READS)).capitalize()
    assert any(
        f"**{read_tokens} tokens were read, not computed**" in m.value for m in overview.markdown
    )


MONEY = {
    "Net saved": SAVED,
    "Without a cache": f"SUM({PROMPT} * {INPUT} + output_tokens * 5000)",
    "Write premium": f"""SUM(cache_write_5m_tokens * {WRITE_5M - INPUT}
        + cache_write_1h_tokens * {WRITE_1H - INPUT})""",
    "Read discount": f"SUM(cache_read_tokens * {INPUT - READ})",
    "Actual cost": f"""SUM(input_tokens * {INPUT} + cache_read_tokens * {READ}
        + cache_write_5m_tokens * {WRITE_5M} + cache_write_1h_tokens * {WRITE_1H}
        + output_tokens * 5000)""",
}


@pytest.mark.parametrize("label", MONEY)
def test_the_waterfall(figures: Figures, savings: AppTest, label: str) -> None:
    expected = formats.dollars(figures.value(MONEY[label], where="price IS NOT NULL"))
    assert card(savings, label)[0] == expected
    if label != "Net saved":
        assert expected in alts(savings)[0]


def test_savings_over_time_add_up(figures: Figures, savings: AppTest) -> None:
    drawn = bars(savings, 1)
    amount = drawn["top"] - drawn["bottom"]
    assert amount.sum() == pytest.approx(figures.value(SAVED) / 1e9)
    assert set(drawn.loc[amount < 0, "class"]) <= {"Lost"}


def test_what_has_no_price_is_counted(figures: Figures, savings: AppTest) -> None:
    unpriced = figures.value("COUNT(*)", where="price IS NULL")
    assert unpriced > 0
    warning = f"{unpriced:,} of {figures.value('COUNT(*)'):,} requests have no price"
    assert warning in savings.warning[0].value
    assert any(element.value.startswith(f"{unpriced:,} requests") for element in savings.caption)


def test_prefixes(figures: Figures, savings: AppTest) -> None:
    """Over their whole life: gaps by a window function, and what each TTL would have cost."""
    with_gaps = f"""
        SELECT prefix, prefix_ttl, cache_read_tokens AS r, cache_write_5m_tokens AS w5,
            cache_write_1h_tokens AS w1, {PROMPT} * {INPUT} - input_tokens * {INPUT}
                - cache_read_tokens * {READ} - cache_write_5m_tokens * {WRITE_5M}
                - cache_write_1h_tokens * {WRITE_1H} AS saved,
            opened_ms - LAG(opened_ms) OVER (
                PARTITION BY workspace_id, prefix ORDER BY opened_ms, id) AS gap
        FROM turns WHERE prefix IS NOT NULL"""
    with closing(sqlite3.connect(figures._database)) as connection:
        expected = connection.execute(
            f"""SELECT prefix, MAX(prefix_ttl), COUNT(*), SUM(r > 0), SUM(saved),
                COALESCE(SUM(gap <= 300000), 0), COALESCE(SUM(gap > 300000 AND gap <= 3600000), 0),
                SUM(r + w5 + w1) FROM ({with_gaps}) GROUP BY prefix HAVING COUNT(*) > 1"""
        ).fetchall()
    frame = table(savings, "Cheaper TTL").set_index("Prefix id")
    frame = frame[frame.index.notna()]
    assert len(frame) == len(expected) == 30
    would_save = 0
    for prefix, ttl, count, with_read, saved, near, later, marked in expected:
        row = frame.loc[prefix]
        assert (row["Requests"], row["With a read"]) == (count, with_read)
        assert (row["Gaps up to 5 min"], row["Gaps 5 min to 1 h"]) == (near, later)
        assert row["Longer gaps"] == count - 1 - near - later
        assert row["Net ($)"] == pytest.approx(saved / 1e9)
        assert row["Paid back"] == ("yes" if saved > 0 else "not yet")
        assert row["Pays back after (reads)"] == {"5m": 1, "1h": 2}[ttl]
        tokens = marked // count
        within = near + later
        costs = {
            "5m": tokens * (WRITE_5M * (count - near) + READ * near),
            "1h": tokens * (WRITE_1H * (count - within) + READ * within),
        }
        best = "5m" if costs["5m"] <= costs["1h"] else "1h"
        assert row["Cheaper TTL"] == best
        would_save += costs[ttl] - costs[best]
        if ttl != best:
            assert row["It would save ($)"] == pytest.approx((costs[ttl] - costs[best]) / 1e9)
    assert any(formats.dollars(would_save) in element.value for element in savings.caption)


def test_published_prices(figures: Figures, savings: AppTest) -> None:
    """One model's, whose prices are read from the shipped file here."""
    path = Path(__file__).parents[2] / "gateway" / "prices" / "hosted_prices.toml"
    sheets = tomllib.loads(path.read_text("utf-8"))["price"]
    frame = table(savings, "This traffic ($)").set_index("Model")
    flat = next(sheet for sheet in sheets if "band" not in sheet and sheet["model"] in frame.index)
    millionths = {name: float(flat[name]) for name in ("input", "read", "write_5m", "write_1h")}
    expected = figures.value(
        f"""SUM(input_tokens * {millionths["input"]} + cache_read_tokens * {millionths["read"]}
            + cache_write_5m_tokens * {millionths["write_5m"]}
            + cache_write_1h_tokens * {millionths["write_1h"]}
            + output_tokens * {float(flat["output"])}) / 1e6"""
    )
    assert frame.loc[flat["model"], "This traffic ($)"] == pytest.approx(expected)
