"""The Overview: is the cache working, and what is it saving?"""

from dataclasses import dataclass

import streamlit as st

from dashboard.admin.client import AdminClient
from dashboard.admin.shapes.engines import EngineReport
from dashboard.admin.shapes.latency import Latency
from dashboard.admin.shapes.savings import Savings
from dashboard.admin.shapes.usage import Usage
from dashboard.charts.time import per_bucket, stacked_over_time
from dashboard.rows.usage import hit_rates, miss_reason_table, running_savings, tokens_by_class
from dashboard.ui import formats, live, parts, viewer
from dashboard.ui.colours import TOKENS
from dashboard.ui.selection import Selection

NUM_REASONS = 5


@dataclass(frozen=True, slots=True)
class View:
    """`engines` is None for a viewer who may not see them."""

    usage: Usage
    savings: Savings
    latency: Latency
    engines: list[EngineReport] | None


def read(client: AdminClient, chosen: Selection) -> View:
    params = chosen.params()
    session = viewer.session()
    is_admin = session is not None and session.workspace is None
    return View(
        client.get("/admin/v1/usage", Usage, params),
        client.get("/admin/v1/savings", Savings, params),
        client.get("/admin/v1/latency", Latency, params),
        client.get("/admin/v1/engines", list[EngineReport]) if is_admin else None,
    )


def draw(view: View, chosen: Selection) -> None:
    draw_cards(view)
    draw_tokens(view.usage)
    left, right = st.columns(2, gap="large")
    with left:
        draw_reasons(view.usage)
    with right:
        draw_health(view.engines)


def draw_cards(view: View) -> None:
    usage, series = view.usage, view.usage.series
    now, before = usage.rates.token_hit_rate, usage.rates_before.token_hit_rate
    saved = usage.saved_nano if usage.totals.is_priced else None
    saved_before = usage.saved_nano_before if usage.before.is_priced else None
    is_comparable = usage.is_comparable
    with st.grid(4, min_column_width=190, row_height=176):
        parts.card(
            "token_hit_rate",
            formats.percent(now),
            trend=hit_rates(series),
            chart="area",
            delta=formats.points(now, before, is_comparable=is_comparable),
            is_good=_is_good(now, before) if is_comparable else None,
        )
        parts.card(
            "saved_nano",
            formats.dollars(saved),
            trend=running_savings(series),
            delta=formats.change(saved, saved_before, is_comparable=is_comparable),
            is_good=_is_good(saved, saved_before) if is_comparable else None,
            is_loss=saved is not None and saved < 0,
        )
        parts.card(
            "requests",
            formats.compact(usage.totals.requests),
            trend=[bucket.totals.requests for bucket in series if not bucket.is_partial],
            chart="bar",
            delta=f"{usage.totals.errors:,} failed",
        )
        parts.card(
            "prefill_seconds_avoided",
            formats.seconds(view.savings.prefill_seconds_avoided),
            trend=[bucket.totals.cache_read_tokens for bucket in series if not bucket.is_partial],
            chart="bar",
            delta=f"{formats.compact(view.savings.prefill_tokens_avoided)} tokens read",
        )
    draw_more_cards(view)


def _is_good(now: float | None, before: float | None) -> bool | None:
    return None if now is None or before is None else now >= before


def draw_more_cards(view: View) -> None:
    usage = view.usage
    now, before, is_comparable = usage.rates, usage.rates_before, usage.is_comparable
    with st.grid(4, min_column_width=190, row_height=132):
        for title, found in (("hits", view.latency.hits), ("misses", view.latency.misses)):
            parts.card(
                "first_token_seconds",
                formats.seconds(found.p50),
                label=f"First token, {title}",
                delta=f"95 % within {formats.seconds(found.p95)}",
            )
        parts.card(
            "cacheable_hit_rate",
            formats.percent(now.cacheable_hit_rate),
            delta=formats.points(
                now.cacheable_hit_rate, before.cacheable_hit_rate, is_comparable=is_comparable
            ),
        )
        parts.card(
            "request_hit_rate",
            formats.percent(now.request_hit_rate),
            delta=formats.points(
                now.request_hit_rate, before.request_hit_rate, is_comparable=is_comparable
            ),
        )


def draw_tokens(usage: Usage) -> None:
    parts.heading("Prompt tokens by class", "prompt_tokens")
    totals = usage.totals
    if not totals.requests:
        parts.empty("No requests in this range. The first one appears here within seconds.")
        return
    drawn = stacked_over_time(
        tokens_by_class(usage),
        TOKENS[viewer.theme()],
        title=f"Prompt tokens {per_bucket(usage.bucket_seconds)}",
        seconds=(usage.until_ms - usage.since_ms) / 1000,
    )
    parts.chart(
        drawn,
        "tokens",
        f"Prompt tokens over time: {totals.cache_read_tokens:,} read,"
        f" {totals.cache_write_5m_tokens:,} written for 5 minutes,"
        f" {totals.cache_write_1h_tokens:,} for 1 hour, {totals.input_tokens:,} uncached.",
    )


def draw_reasons(usage: Usage) -> None:
    parts.heading("Why prompts missed")
    found = miss_reason_table(usage.miss_reasons)
    if not found:
        parts.empty("Nothing missed in this range.", ":material/check_circle:")
        return
    parts.table(
        found[:NUM_REASONS],
        "miss_reasons",
        alt_text=f"The {min(len(found), NUM_REASONS)} most frequent reasons why prompts missed.",
        columns={"Share": parts.share_column()},
    )


def draw_health(engines: list[EngineReport] | None) -> None:
    if engines is None:
        return
    parts.heading("Engines now")
    if not engines:
        parts.empty("The gateway knows no engine.", ":material/dns:")
        return
    parts.table(
        [
            {
                "Engine": engine.name,
                "State": engine.status,
                "Up": formats.duration(engine.stats.uptime_seconds) if engine.stats else None,
                "Running": engine.stats.running if engine.stats else None,
                "Waiting": engine.stats.waiting if engine.stats else None,
                "Pool in use": 1 - engine.stats.blocks.free / max(engine.stats.blocks.total, 1)
                if engine.stats
                else None,
            }
            for engine in engines
        ],
        "engines_now",
        alt_text=f"{sum(e.status == 'ready' for e in engines)} of {len(engines)} engines ready.",
        columns={"Pool in use": parts.share_column()},
    )


parts.title("Overview", "Is the cache working, and what is it saving?")
live.show("overview", read, draw)
