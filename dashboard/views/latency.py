"""Latency: how much sooner does a cached prompt answer?"""

from dataclasses import dataclass

import streamlit as st

from dashboard.admin.client import AdminClient
from dashboard.admin.shapes.latency import Latency, LatencySamples
from dashboard.charts.axes import times
from dashboard.charts.latency import scatter_chart
from dashboard.charts.time import lines_over_time
from dashboard.rows.latency import (
    compared,
    latency_table,
    overhead_rows,
    percentiles_over_time,
    scatter_rows,
)
from dashboard.ui import formats, live, parts, viewer
from dashboard.ui.colours import HITS, PLAIN
from dashboard.ui.selection import Selection


@dataclass(frozen=True, slots=True)
class View:
    latency: Latency
    samples: LatencySamples


def read(client: AdminClient, chosen: Selection) -> View:
    params = chosen.params()
    return View(
        client.get("/admin/v1/latency", Latency, params),
        client.get("/admin/v1/latency/samples", LatencySamples, params),
    )


def draw(view: View, chosen: Selection) -> None:
    draw_cards(view)
    if not view.samples.samples:
        parts.empty(
            "No answered requests in this range. The first one appears within seconds.",
            key="latency",
        )
        return
    draw_scatter(view)
    left, right = st.columns(2, gap="large")
    with left:
        draw_percentiles(view)
    with right:
        draw_overhead(view)
    parts.heading("By prompt length", "first_token_seconds")
    seconds = st.column_config.NumberColumn(format="localized")
    times = [f"{kind} {name} (s)" for kind in ("Hit", "Miss") for name in ("median", "95 %")]
    parts.table(
        latency_table(view.latency),
        "latency",
        alt_text="Times to first token by prompt length, hits and misses side by side.",
        columns={
            **dict.fromkeys(times, seconds),
            "Times shorter": st.column_config.NumberColumn(format="%g×"),
        },
    )


def draw_cards(view: View) -> None:
    found = compared(view.latency)
    if found is not None and found.times_sooner is not None:
        parts.hero(
            f"A cached prompt of {found.length} tokens answers"
            f" **{found.times_sooner:.2g} times** as soon as one that is not."
        )
    else:
        parts.hero(
            "**No comparison yet**: it takes cached and uncached prompts of about the same length."
        )
    with st.grid(4, min_column_width=190, row_height=132):
        for name, side in (
            ("cached", found.hits if found else None),
            ("not cached", found.misses if found else None),
        ):
            parts.card(
                "compared_first_token",
                formats.rough_seconds(side.p50 if side else None),
                label=f"First token, {name}",
                delta=f"95 % within {formats.rough_seconds(side.p95)}" if side else None,
            )
        parts.card(
            "compared_first_token",
            f"{found.times_sooner:.2g}×" if found and found.times_sooner else formats.NO_VALUE,
            label="Sooner when cached",
            delta=f"{found.length} tokens" if found else "no prompt length has both",
        )
        ordered = sorted(view.samples.overhead, key=lambda each: each.p50)
        middle = ordered[len(ordered) // 2] if ordered else None
        parts.card(
            "overhead_seconds",
            formats.seconds(middle.p50) if middle else formats.NO_VALUE,
            delta=f"95 % within {formats.seconds(max(o.p95 for o in ordered))}" if middle else None,
        )


def draw_scatter(view: View) -> None:
    parts.heading("Time to first token against prompt length", "sampled_first_token")
    dots = scatter_rows(view.samples)
    hits = sum(dot["kind"] == "Hit" for dot in dots)
    parts.chart(
        scatter_chart(dots, HITS[viewer.theme()]),
        "scatter",
        f"{len(dots)} sampled requests, {hits} of them hits. Median time to first token:"
        f" hits {formats.rough_seconds(view.latency.hits.p50)},"
        f" misses {formats.rough_seconds(view.latency.misses.p50)}.",
    )


def draw_percentiles(view: View) -> None:
    parts.heading("Over time", "first_token_seconds")
    drawn = lines_over_time(
        percentiles_over_time(view.latency),
        field="seconds",
        title="Time to first token (seconds)",
        span=times(view.samples.since_ms, view.samples.until_ms),
        colours=HITS[viewer.theme()],
    )
    parts.chart(
        drawn,
        "percentiles",
        f"Median and 95th percentile in {len(view.latency.series)} intervals, hits and misses.",
    )


def draw_overhead(view: View) -> None:
    parts.heading("Gateway overhead", "overhead_seconds")
    found = view.samples.overhead
    if not found:
        parts.empty("The engines told no times of these requests.")
        return
    drawn = lines_over_time(
        overhead_rows(view.samples),
        field="ms",
        title="Added by the gateway (milliseconds)",
        span=times(view.samples.since_ms, view.samples.until_ms),
        colours={"Gateway": PLAIN[viewer.theme()]},
        kind=None,
        log=False,
    )
    low, high = min(each.p50 for each in found), max(each.p50 for each in found)
    parts.chart(
        drawn,
        "overhead",
        f"Median overhead between {formats.seconds(low)} and {formats.seconds(high)}.",
    )


parts.title("Latency", "How much sooner does a cached prompt answer?")
live.show("latency", read, draw)
