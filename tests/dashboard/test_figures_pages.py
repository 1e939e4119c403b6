"""Every figure of the other pages equals what plain SQL over random turns says.

Workspaces, Latency, Requests, Why, Prefixes and Fleet, over the ledgers of `test_figures.py`.
"""

import math
from typing import Any

import pytest

from dashboard.ui import formats
from dashboard.ui.reasons import ADVICE
from tests.dashboard.signed_in import said, table
from tests.dashboard.test_figures import (
    AUTOMATIC,
    COMPUTED,
    LENGTHS,
    PROMPT,
    READS,
    SAVED,
    SHOWN_SHARE,
    Figures,
    alts,
    bars,
    card,
    figures,
)

__all__ = ["figures"]


def check_groups(figures: Figures, frame: Any, column: str) -> None:
    """A table by a dimension, against the sums of its turns."""
    expected = figures.rows(
        f"""SELECT {column}, COUNT(*), SUM(outcome LIKE '%\\_error' ESCAPE '\\'), {READS},
            SUM(cache_write_5m_tokens), SUM(cache_write_1h_tokens), {COMPUTED},
            SUM(output_tokens), 1.0 * {READS} / SUM({PROMPT}), {SAVED}, SUM(cost_nano)
            FROM turns""",
        clauses=f"GROUP BY {column}",
    )
    assert set(frame.index) == {row[0] for row in expected}
    names = ["Requests", "Failed", "Read (tokens)", "Written 5m (tokens)", "Written 1h (tokens)"]
    names += ["Computed, not written (tokens)", "Output (tokens)"]
    for key, *counts, rate, saved, cost in expected:
        row = frame.loc[key]
        assert [int(row[name]) for name in names] == counts
        assert row["Hit rate"] == pytest.approx(rate, abs=SHOWN_SHARE)
        if cost is not None:
            assert row["Net saved ($)"] == pytest.approx(saved / 1e9)
            assert row["Cost ($)"] == pytest.approx(cost / 1e9)


def test_savings_by_model_and_workspace(figures: Figures) -> None:
    app = figures.page("savings")
    frame = table(app, "Output (tokens)").set_index("Model")
    assert len(frame) == 2
    check_groups(figures, frame, "model")
    frame = next(t.value for t in app.dataframe if t.value.columns[0] == "Workspace")
    check_groups(figures, frame.set_index("Workspace"), "workspace_id")


def test_every_workspace_that_saves_is_among_the_prefixes(figures: Figures) -> None:
    saving = figures.rows(f"SELECT workspace_id, {SAVED} AS saved FROM turns", clauses="GROUP BY 1")
    frame = table(figures.page("savings"), "Cheaper TTL")
    assert {name for name, saved in saving if saved} <= set(frame["Workspace"])


def test_workspaces(figures: Figures) -> None:
    app = figures.page("workspaces")
    check_groups(figures, table(app, "Hit rate").set_index("Workspace"), "workspace_id")
    saved = [
        nano
        for (nano,) in figures.rows(f"SELECT {SAVED} FROM turns", clauses="GROUP BY workspace_id")
    ]
    assert card(app, "With traffic")[0] == str(len(saved))
    assert card(app, "Best net saved")[0] == formats.dollars(max(saved))
    assert card(app, "Worst net saved")[0] == formats.dollars(min(saved))
    good = sum(nano > 0 for nano in saved)
    assert any(f"**{good:,} of {len(saved):,} workspaces**" in m.value for m in app.markdown)


def test_latency_by_prompt_length(figures: Figures) -> None:
    app = figures.page("latency")
    frame = table(app, "Times shorter").set_index("Prompt tokens")
    (model,) = set(frame["Model"])
    where = f"model = '{model}'"
    assert f"{model}, one of 2 models" in said(app, "text")
    for low, high in LENGTHS:
        for kind, sign in (("With a read", ">"), ("Without a read", "=")):
            times = figures.first_tokens(low, high, sign, model)
            if times:
                row = frame.loc[f"{low:,} to {high:,}"]
                assert row[kind] == len(times)
                for share, name in ((0.5, "median"), (0.95, "95 %")):
                    true = times[math.ceil(share * len(times)) - 1]
                    shown_seconds = row[f"{kind}, {name} (s)"]
                    assert shown_seconds == pytest.approx(true, rel=0.0105), (low, kind, name)
    dots = bars(app, 0)
    assert len(dots) == min(figures.value("COUNT(*)", where=where), 600)
    with_read = int((dots["kind"] == "With a read").sum())
    assert f"{with_read} of them with a read" in alts(app)[0]
    overhead = sorted(
        max(first - prefill, 0.0)
        for first, prefill in figures.rows(
            "SELECT first_token_seconds, prefill_seconds FROM turns",
            where=f"prefill_seconds IS NOT NULL AND {where}",
        )
    )
    drawn = bars(app, 2)
    assert overhead[0] * 1000 - 1e-6 <= drawn["value"].min() <= drawn["value"].max()
    assert drawn["value"].max() <= overhead[-1] * 1000 + 1e-6


def check_turns(figures: Figures, frame: Any, where: str, limit: int) -> None:
    expected = figures.rows(
        f"""SELECT id, outcome, miss_reason, status, workspace_id, model, cache_read_tokens,
            cache_write_5m_tokens + cache_write_1h_tokens, {AUTOMATIC}, input_tokens - {AUTOMATIC},
            output_tokens,
            first_token_seconds, cost_nano, cost_without_cache_nano - cost_nano, name,
            http_request_id, duration_seconds, error, user_agent, engine, automatic_tokens
            FROM turns""",
        where=where,
        clauses=f"ORDER BY opened_ms DESC, id DESC LIMIT {limit}",
    )
    assert list(frame["Id"]) == [row[0] for row in expected]
    names = ["Outcome", "Not read because", "HTTP", "Workspace", "Model", "Read (tokens)"]
    names += ["Written (tokens)", "Reused automatically (tokens)", "Computed, not written (tokens)"]
    names += ["Output (tokens)", "First token (s)"]
    names += ["Cost ($)", "Net saved ($)", "Name", "Request id", "Duration (s)", "Error", "Client"]
    names += ["Engine"]
    for (_, *values, reused), row in zip(expected, frame.to_dict("records"), strict=True):
        note = f"; {reused:,} tokens reused" if reused else ""
        if values[1]:
            title = ADVICE[values[1]].title
            values[1] = (
                f"A later marker: {title[:1].lower()}{title[1:]}" if values[5] else f"{title}{note}"
            )
        values[11:13] = [None if nano is None else nano / 1e9 for nano in values[11:13]]
        for name, value in zip(names, values, strict=True):
            if value is None:
                assert row[name] is None or row[name] != row[name], name
            else:
                assert row[name] == pytest.approx(value), name


def test_requests(figures: Figures) -> None:
    check_turns(figures, table(figures.page("requests"), "Request id"), "1", 200)


def test_requests_of_one_reason(figures: Figures) -> None:
    frame = table(figures.page("requests", reason=ADVICE["ttl_expired"].title), "Request id")
    check_turns(figures, frame, "miss_reason = 'ttl_expired'", 200)


def test_a_request_is_found_by_the_id_of_its_response(figures: Figures) -> None:
    turn_id, request_id, read_tokens = figures.rows(
        "SELECT id, http_request_id, cache_read_tokens FROM turns", clauses="LIMIT 1"
    )[0]
    app = figures.page("requests", request=request_id)
    assert card(app, "Read from cache")[0] == f"{read_tokens:,}"
    assert any(turn_id in element.value for element in app.text)


def test_a_failed_request_says_what_went_wrong(figures: Figures) -> None:
    turn_id, error, client, seconds = figures.rows(
        "SELECT id, error, user_agent, duration_seconds FROM turns",
        where="error IS NOT NULL AND user_agent IS NOT NULL",
        clauses="LIMIT 1",
    )[0]
    app = figures.page("requests", request=turn_id)
    details = {
        row["What"]: row["Value"]
        for element in app.dataframe
        if list(element.value.columns) == ["What", "Value"]
        for row in element.value.to_dict("records")
    }
    assert details["Error"] == error and details["HTTP status"] == "500"
    assert details["Client"] == client and details["Outcome"] == "api_error"
    assert details["Duration"] == formats.seconds(seconds)


def test_what_failed_is_counted_in_the_first_sentence(figures: Figures) -> None:
    failed, num_reads, count = figures.rows(
        """SELECT SUM(outcome LIKE '%\\_error' ESCAPE '\\'), SUM(cache_read_tokens > 0), COUNT(*)
            FROM (SELECT * FROM turns""",
        clauses="ORDER BY opened_ms DESC, id DESC LIMIT 200)",
    )[0]
    text = said(figures.page("requests"), "markdown")
    assert (
        f"{num_reads:,} of the newest {count:,} requests" in text and f"{failed:,} failed" in text
    )


def test_misses(figures: Figures) -> None:
    app = figures.page("why")
    nothing = "cache_read_tokens = 0"
    check_turns(figures, table(app, "Request id"), f"miss_reason IS NOT NULL AND {nothing}", 100)
    frame = table(figures.page("why", reason=ADVICE["cold"].title), "Request id")
    check_turns(figures, frame, f"miss_reason = 'cold' AND {nothing}", 100)


def test_fleet_says_what_restarts_cost_and_where_hits_are_lost(figures: Figures) -> None:
    app = figures.page("fleet")
    restarts = table(app, "Turns that read less for it")
    assert sorted(restarts["Engine"]) == ["engine-0", "engine-1"], "one restart of each"
    captured_sql = "MAX(captured_tokens, cache_read_tokens + automatic_tokens)"
    available, captured, delivered, prompt, count = figures.row(
        f"""SUM(MAX(available_tokens, {captured_sql})), SUM({captured_sql}),
            SUM(cache_read_tokens + automatic_tokens), SUM({PROMPT}), COUNT(*)""",
        where="available_tokens IS NOT NULL",
    )
    assert delivered <= captured <= available
    assert card(app, "Read of what was held")[0] == formats.percent(delivered / available)
    assert alts(app)[0] == (
        f"Of the prompt tokens of {count:,} requests"
        f" {formats.percent(available / prompt)} were available,"
        f" {formats.percent(captured / prompt)} captured,"
        f" {formats.percent(delivered / prompt)} delivered."
    )
    drawn = bars(app, 0)
    assert (drawn["share"] <= 1).all()


def test_prefixes_are_labelled_by_their_last_request(figures: Figures) -> None:
    frame = table(figures.page("savings"), "Cheaper TTL").set_index("Prefix id")
    last = figures.rows(
        """SELECT prefix, name, cache_read_tokens + cache_write_5m_tokens + cache_write_1h_tokens,
            id, MAX(opened_ms) FROM turns""",
        where="prefix IS NOT NULL",
        clauses="GROUP BY prefix",
    )
    for prefix, name, tokens, turn_id, _ in last:
        row = frame.loc[prefix]
        assert row["Prefix"] == (name or f"{tokens:,} tokens · {prefix[:6]}")
        assert row["Last request"] == turn_id and row["Tokens"] == tokens
