"""Latency: how much sooner does a cached prompt answer?"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import altair as alt
import streamlit as st

from dashboard.client import AdminClient
from dashboard.ui import charts, formats, live, parts, viewer
from dashboard.ui.charts import Palette, Row, Rows
from dashboard.ui.filters import Selection
from gateway.structs.usage import Latency, LatencyCell, LatencySamples, Percentiles

MIN_TURNS = 5
"""Medians of fewer turns are not compared."""
TOO_FEW = f"no length has {MIN_TURNS} of each"
MAX_DOTS = 600
"""Dots of one chart: a browser takes a second to draw a few thousand."""


class View(NamedTuple):
    """All of one model, where turns of one can be told from those of others."""

    model: str | None
    num_models: int
    latency: Latency
    samples: LatencySamples


class Compared(NamedTuple):
    """Turns of one model and prompt length, with and without a read. `length` is that length in
    words."""

    model: str
    length: str
    hits: Percentiles
    misses: Percentiles

    @property
    def times_sooner(self) -> float | None:
        return self.misses.p50 / self.hits.p50 if self.hits.p50 and self.misses.p50 else None


def read(client: AdminClient, chosen: Selection) -> View:
    params = chosen.params()
    latency = client.get("/admin/v1/latency", Latency, params)
    models = Counter[str]()
    for cell in latency.cells:
        models[cell.model] += cell.seconds.requests
    comparison = compared(latency)
    model = chosen.model
    if len(models) > 1:
        # Nothing on this page compares one model's reads with another's misses.
        model = (
            comparison.model if comparison else max(models, key=lambda name: (models[name], name))
        )
        params = {**params, "model": model}
        latency = client.get("/admin/v1/latency", Latency, params)
    samples = client.get("/admin/v1/latency/samples", LatencySamples, params)
    return View(model, len(models), latency, samples)


def draw(view: View, chosen: Selection) -> None:
    draw_cards(view)
    if view.num_models > 1:
        # A model's name is text from outside.
        st.text(
            f"{view.model}, one of {view.num_models} models that answered. No figure here is of"
            " several: choose another model above."
        )
    if not view.samples.samples:
        parts.empty(
            "No answered requests in this range. The first one appears within seconds.",
            key="latency",
        )
        return
    parts.heading("Time to first token against prompt length", "sampled_first_token")
    samples = view.samples
    answered = formats.counted(len(samples.samples), "answered request")
    st.caption(formats.sampled(answered, samples.num_turns, is_whole=samples.is_whole))
    draw_scatter(view)
    span = shown_span(view)
    left, right = st.columns(2, gap="large")
    with left:
        parts.heading("Over time", "first_token_seconds")
        series = view.latency.series
        rows = [
            row
            for point in series
            for kind, side in (("With a read", point.hits), ("Without a read", point.misses))
            for row in _point(point.start_ms, kind, side.p50, side.p95)
        ]
        title = "Time to first token (seconds)"
        drawn = lines_over_time(rows, charts.HITS[viewer.theme()], title, span, is_log=True)
        summary = f"Median and 95th percentile in {len(series)} intervals, with and without a read."
        parts.chart(drawn, "percentiles", summary)
    with right:
        draw_overhead(view.samples, span)
    parts.heading("By prompt length", "first_token_seconds")
    alt_text = "Times to first token by prompt length, with and without a read."
    parts.table(latency_table(view.latency), "latency", alt_text)


def shown_span(view: View) -> tuple[int, int]:
    """What both charts over time span: the range, from the first answer on where most of it came
    before that."""
    since_ms = view.samples.since_ms
    until_ms = view.samples.until_ms
    starts = [
        point.start_ms
        for point in view.latency.series
        if point.hits.requests or point.misses.requests
    ]
    starts += [point.start_ms for point in view.samples.overhead]
    return charts.first_shown(starts, since_ms, until_ms), until_ms


def draw_cards(view: View) -> None:
    comparison = compared(view.latency)
    sooner = comparison.times_sooner if comparison else None
    if comparison is not None and sooner is not None:
        parts.hero(
            f"A prompt of {comparison.length} tokens with a read answers"
            f" **{sooner:.2g} times** as soon as one without."
        )
    elif view.latency.mixed:
        parts.hero(
            "**No comparison**: engines of several kinds answered, and those with a read may not be"
            " those without. Choose an engine above."
        )
    else:
        parts.hero(
            "**No comparison yet**: it takes prompts of about one length with and without a read."
        )
    with st.grid(4, min_column_width=190):
        first_token_cards(comparison, lambda side: f"95 % within {formats.seconds(side.p95)}")
        times = f"{sooner:.2g}×" if sooner else formats.NO_VALUE
        size = f"{comparison.length} tokens" if comparison else why_none(view.latency)
        parts.card("compared_first_token", times, label="Sooner with a read", delta=size)
        samples = view.samples
        most = formats.seconds(samples.overhead_p95)
        parts.card(
            "overhead_seconds",
            formats.seconds(samples.overhead_p50),
            delta=None if samples.overhead_p95 is None else f"95 % within {most}",
        )


def first_token_cards(
    comparison: Compared | None, figure: Callable[[Percentiles], str], none: str | None = None
) -> None:
    """The medians with and without a read, and what is `told` of each side."""
    for name, side in (
        ("with a read", comparison.hits if comparison else None),
        ("without a read", comparison.misses if comparison else None),
    ):
        parts.card(
            "compared_first_token",
            formats.seconds(side.p50 if side else None),
            label=f"First token, {name}",
            delta=figure(side) if side else none,
        )


def compared(latency: Latency) -> Compared | None:
    """The model and prompt length that most hits and misses both had; None where too few had one.
    Medians over all lengths compare long prompts that are cached with short ones that are not, and
    medians over all models, or over engines of several kinds, compare these."""
    pairs = [
        Compared(hit.model, _length(hit), hit.seconds, miss.seconds)
        for hit in latency.cells
        for miss in latency.cells
        if hit.is_hit
        and not miss.is_hit
        and (hit.model, hit.above_tokens) == (miss.model, miss.above_tokens)
        and hit.model not in latency.mixed
    ]
    best = max(pairs, key=lambda p: min(p.hits.requests, p.misses.requests), default=None)
    if best is None or min(best.hits.requests, best.misses.requests) < MIN_TURNS:
        return None
    return best


def why_none(latency: Latency) -> str:
    """In a few words, why there is no comparison."""
    if any(cell.model in latency.mixed for cell in latency.cells):
        return "engines of several kinds"
    return TOO_FEW if latency.cells else "no answer yet"


def _length(cell: LatencyCell) -> str:
    if cell.up_to_tokens is None:
        return f"above {cell.above_tokens:,}"
    return f"{cell.above_tokens:,} to {cell.up_to_tokens:,}"


def draw_scatter(view: View) -> None:
    """Time to first token against prompt length; both logarithmic, since both span decades. At most
    `MAX_DOTS` of the sampled turns, the same ones each time."""
    samples = sorted(view.samples.samples, key=lambda sample: sample.order)[:MAX_DOTS]
    rows: list[Row] = [
        {
            "prompt": max(sample.prompt_tokens, 1),
            "seconds": max(sample.first_token_seconds, 0.001),
            "kind": "With a read" if sample.cache_read_tokens else "Without a read",
            "share": sample.cache_read_tokens / max(sample.prompt_tokens, 1),
            "id": sample.id,
        }
        for sample in samples
    ]
    drawn = (
        alt.Chart(charts.frame(rows))
        .mark_circle(size=34, opacity=0.6)
        .encode(
            x=charts.decades(alt.X, "prompt:Q", "Prompt length (tokens)"),
            y=charts.decades(alt.Y, "seconds:Q", "Time to first token (seconds)"),
            color=charts.colour("kind:N", charts.HITS[viewer.theme()]),
            tooltip=[
                *charts.tips("kind:N=Read from cache", "prompt:Q=Prompt tokens|,"),
                *charts.tips("seconds:Q=First token (s)|.3f", "share:Q=Of it read|.0%"),
                *charts.tips("id:N=Request"),
            ],
        )
        .properties(height=380)
    )
    hits = sum(row["kind"] == "With a read" for row in rows)
    alt_text = (
        f"{formats.counted(len(rows), 'request')}, {hits} of them with a read. Median time to"
        f" first token: {formats.seconds(view.latency.hits.p50)} with a read,"
        f" {formats.seconds(view.latency.misses.p50)} without."
    )
    parts.chart(drawn, "scatter", alt_text)


def _point(start_ms: int, kind: str, p50: float | None, p95: float | None) -> list[Row]:
    start = formats.moment(start_ms)
    return [
        {"start": start, "kind": kind, "percentile": name, "value": value}
        for name, value in (("Median", p50), ("95 %", p95))
        if value is not None
    ]


def draw_overhead(samples: LatencySamples, span: tuple[int, int]) -> None:
    parts.heading("Gateway overhead", "overhead_seconds")
    overhead = samples.overhead
    if not overhead:
        parts.empty("The engines told no times of these requests.")
        return
    rows = [
        row
        for point in overhead
        for row in _point(point.start_ms, "Gateway", point.p50 * 1000, point.p95 * 1000)
    ]
    colours = {"Gateway": charts.PLAIN[viewer.theme()]}
    title = "Added by the gateway (milliseconds)"
    drawn = lines_over_time(rows, colours, title, span, is_log=False)
    low = min(point.p50 for point in overhead)
    high = max(point.p50 for point in overhead)
    alt_text = f"Median overhead between {formats.seconds(low)} and {formats.seconds(high)}."
    parts.chart(drawn, "overhead", alt_text)


def lines_over_time(
    rows: Rows, colours: Palette, title: str, span: tuple[int, int], *, is_log: bool
) -> Any:
    """Lines by kind (colour) and percentile (dash), with a dot where only one point is. The dots
    are a layer of their own: with the lines' own points the legend shows no dashes."""
    y = alt.Y("value:Q", title=title, scale=charts.ZERO, axis=charts.amounts())
    if is_log:
        y = charts.decades(alt.Y, "value:Q", title)
    only = next(iter(colours.values()))
    is_one = len(colours) == 1
    drawn = alt.Chart(charts.frame(rows)).encode(
        x=charts.moment(*span, has_ends=False),
        y=y,
        color=alt.value(only) if is_one else charts.colour("kind:N", colours, 1),
        tooltip=[
            charts.FROM,
            *charts.tips("percentile:N=Percentile", f"value:Q={title}|.2~r"),
        ],
    )
    dashes = alt.StrokeDash(
        "percentile:N",
        sort=["Median", "95 %"],
        legend=alt.Legend(
            title=None,
            orient="top",
            symbolType="stroke",
            symbolStrokeColor=only if is_one else "#7c8896",
            symbolSize=300,
        ),
    )
    lines = drawn.mark_line(strokeWidth=2).encode(strokeDash=dashes)
    dots = drawn.mark_circle(size=34, opacity=1)
    return alt.layer(lines, dots, charts.ends(*span)).properties(height=charts.CHART_HEIGHT)


def latency_table(latency: Latency) -> list[Row]:
    """Hits and misses of one model and prompt length side by side."""
    rows: list[Row] = []
    nothing = Percentiles(requests=0, p50=None, p95=None, p99=None)
    cells: dict[tuple[str, int], list[LatencyCell]] = {}
    for cell in latency.cells:
        cells.setdefault((cell.model, cell.above_tokens), []).append(cell)
    for (model, _), cells_of in sorted(cells.items()):
        sides = {cell.is_hit: cell.seconds for cell in cells_of}
        length = _length(cells_of[0])
        comparison = Compared(model, length, sides.get(True, nothing), sides.get(False, nothing))
        row: dict[str, Any] = {"Model": model, "Prompt tokens": length}
        for name, side in (("With a read", comparison.hits), ("Without a read", comparison.misses)):
            row |= {
                name: side.requests,
                f"{name}, median (s)": _four_digits(side.p50),
                f"{name}, 95 % (s)": _four_digits(side.p95),
            }
        times = None if model in latency.mixed else _four_digits(comparison.times_sooner)
        rows.append({**row, "Times shorter": times})
    return rows


def _four_digits(value: float | None) -> float | None:
    """A percentile is known to within 1 %, so a fifth digit would say nothing."""
    return None if value is None else float(f"{value:.4g}")


if __name__ == "__main__":
    parts.title("Latency", "How much sooner does a cached prompt answer?")
    live.show("latency", read, draw)
