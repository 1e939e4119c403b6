"""The Overview: is the cache working, and what is it saving?"""

from dataclasses import dataclass

import streamlit as st

from dashboard.admin.client import AdminClient
from dashboard.admin.shapes.engines import EngineReport
from dashboard.admin.shapes.latency import Latency
from dashboard.admin.shapes.savings import Savings
from dashboard.admin.shapes.usage import Usage
from dashboard.charts.axes import times
from dashboard.charts.time import per_bucket, stacked_over_time
from dashboard.rows.engines import in_use_share, leases_kept
from dashboard.rows.latency import compared
from dashboard.rows.usage import hit_rates, miss_reason_table, running_savings, tokens_by_class
from dashboard.ui import formats, live, parts, viewer, week
from dashboard.ui.colours import TOKENS
from dashboard.ui.selection import Selection
from engine.protocol import TTLS, WRITE_FIELDS

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
    draw_hero(view, chosen)
    draw_cards(view)
    draw_tokens(view.usage)
    draw_more_cards(view)
    left, right = st.columns(2, gap="large")
    with left:
        draw_reasons(view.usage)
    with right:
        draw_health(view.engines)


def draw_hero(view: View, chosen: Selection) -> None:
    read_tokens = view.usage.totals.cache_read_tokens
    if not view.usage.totals.requests:
        parts.hero(f"**Nothing was asked** in {chosen.words}.")
        return
    seconds = view.savings.prefill_seconds_avoided
    spared = "" if seconds is None else f", which spared {formats.seconds(seconds)} of GPU time"
    parts.hero(
        f"**{formats.in_words(read_tokens).capitalize()} tokens were not computed again** in"
        f" {chosen.words}{spared}."
    )


def draw_cards(view: View) -> None:
    """One row that answers the page's question: reuse, GPU time, the promise kept, money."""
    usage, series = view.usage, view.usage.series
    now, before = usage.rates.token_hit_rate, usage.rates_before.token_hit_rate
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
            "prefill_seconds_avoided",
            formats.seconds(view.savings.prefill_seconds_avoided),
            trend=[bucket.totals.cache_read_tokens for bucket in series if not bucket.is_partial],
            chart="bar",
            delta=f"{formats.compact(view.savings.prefill_tokens_avoided)} tokens read",
        )
        draw_leases_kept(view.engines)
        draw_saved(view)
    parts.placeholder_prices()


def draw_leases_kept(engines: list[EngineReport] | None) -> None:
    stats = [engine.stats for engine in engines or [] if engine.stats is not None]
    share, lost = leases_kept([each.counters for each in stats])
    told = ", ".join(f"{count:,} {reason}" for reason, count in lost.items())
    delta = None
    if engines is None:
        delta = "an admin key shows it"
    elif not stats:
        delta = "no engine answers"
    elif share is None:
        delta = f"none has ended, {sum(each.num_leases for each in stats):,} held"
    else:
        delta = f"early: {told}" if told else "none ended early"
    parts.card(
        "leases_kept", formats.percent(share), delta=delta, is_good=not told if share else None
    )


def draw_saved(view: View) -> None:
    usage = view.usage
    saved = usage.saved_nano if usage.totals.is_priced else None
    before = usage.saved_nano_before if usage.before.is_priced else None
    parts.card(
        "saved_nano",
        formats.dollars(saved),
        trend=running_savings(usage.series),
        delta=formats.change(saved, before, is_comparable=usage.is_comparable),
        is_good=_is_good(saved, before) if usage.is_comparable else None,
        is_loss=saved is not None and saved < 0,
    )


def _is_good(now: float | None, before: float | None) -> bool | None:
    return None if now is None or before is None else now >= before


def draw_more_cards(view: View) -> None:
    usage = view.usage
    now, before, is_comparable = usage.rates, usage.rates_before, usage.is_comparable
    found = compared(view.latency)
    with st.grid(3, min_column_width=190, row_height=132):
        parts.card(
            "requests",
            formats.compact(usage.totals.requests),
            delta=f"{usage.totals.errors:,} failed",
        )
        for title, side in (
            ("cached", found.hits if found else None),
            ("not cached", found.misses if found else None),
        ):
            parts.card(
                "compared_first_token",
                formats.rough_seconds(side.p50 if side else None),
                label=f"First token, {title}",
                delta=f"{found.length} tokens" if found else "no prompt length has both",
            )
        if view.engines is not None:
            stats = [engine.stats for engine in view.engines if engine.stats is not None]
            parts.card("pool_in_use", formats.percent(in_use_share([s.blocks for s in stats])))
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
    written = ", ".join(
        f"{getattr(totals, name):,} for {TTLS[ttl].words}" for ttl, name in WRITE_FIELDS.items()
    )
    if not totals.prompt_tokens:
        parts.empty(
            "No requests in this range. The first one appears here within seconds.", key="tokens"
        )
        return
    drawn = stacked_over_time(
        tokens_by_class(usage),
        TOKENS[viewer.theme()],
        title=f"Prompt tokens {per_bucket(usage.bucket_seconds)}",
        span=times(usage.since_ms, usage.until_ms),
    )
    parts.chart(
        drawn,
        "tokens",
        f"Prompt tokens over time: {totals.cache_read_tokens:,} read,"
        f" {written.replace('for', 'written for', 1)},"
        f" {totals.automatic_input_tokens:,} automatically reused,"
        f" {totals.computed_input_tokens:,} uncached.",
    )


def draw_reasons(usage: Usage) -> None:
    parts.heading("Why prompts missed")
    found = miss_reason_table(usage.miss_reasons)
    if not found:
        asked = usage.totals.requests
        told = "Nothing missed in this range." if asked else "No requests in this range."
        parts.empty(told, ":material/check_circle:" if asked else ":material/hourglass_empty:")
        return
    for row in found[:NUM_REASONS]:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.page_link(
                "views/requests.py",
                label=row["Reason"] if row["Is known"] else "Another reason",
                query_params={"reason": row["Reason"]},
            )
            st.text(f"{formats.percent(row['Share'])} · {row['Requests']:,} requests")


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
                "Pool in use": in_use_share([engine.stats.blocks]) if engine.stats else None,
            }
            for engine in engines
        ],
        "engines_now",
        alt_text=f"{sum(e.status == 'ready' for e in engines)} of {len(engines)} engines ready.",
        columns={"Pool in use": parts.share_column()},
    )


parts.title("Overview", "Is the cache working, and what is it saving?")
live.show("overview", read, draw)
week.show()
