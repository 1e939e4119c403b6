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
NO_TURNS = Percentiles(requests=0, p50=None, p95=None, p99=None)
MAX_DOTS = 600
"""The most dots of one chart. A browser takes a second to draw a few thousand."""


class View(NamedTuple):
    """What the page shows. If several models answered, all figures are of one of them."""

    # The model of all figures; None: all models, of which at most one answered.
    model: str | None
    # How many models answered in the range.
    num_models: int
    latency: Latency
    samples: LatencySamples


class Comparison(NamedTuple):
    """Turns of one model and prompt length, with and without a read."""

    model: str
    # The prompt length in words.
    length: str
    hits: Percentiles
    misses: Percentiles

    @property
    def times_sooner(self) -> float | None:
        return self.misses.p50 / self.hits.p50 if self.hits.p50 and self.misses.p50 else None


def read(client: AdminClient, selection: Selection) -> View:
    params = selection.params()
    latency = client.get("/admin/v1/latency", Latency, params)
    num_models = len({cell.model for cell in latency.cells})
    model = selection.model
    if num_models > 1:
        # No figure of this page compares reads of one model with misses of another.
        model = model_to_show(latency)
        params = {**params, "model": model}
        latency = client.get("/admin/v1/latency", Latency, params)
    samples = client.get("/admin/v1/latency/samples", LatencySamples, params)
    return View(model, num_models, latency, samples)


def model_to_show(latency: Latency) -> str:
    """The model of the best comparison. Without a comparison, the model with the most requests."""
    comparison = compared(latency)
    if comparison is not None:
        return comparison.model
    requests = Counter[str]()
    for cell in latency.cells:
        requests[cell.model] += cell.seconds.requests
    return max(requests, key=lambda name: (requests[name], name))


def draw(view: View, selection: Selection) -> None:
    draw_cards(view)
    if view.num_models > 1:
        # A model's name is text from outside.
        st.text(
            f"All figures here are of {view.model}, one of {view.num_models} models that answered."
            " Choose another model above."
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
        draw_percentiles(view.latency, span)
    with right:
        draw_overhead(view.samples, span)
    parts.heading("By prompt length", "first_token_seconds")
    alt_text = "Times to first token by prompt length, with and without a read."
    parts.table(latency_table(view.latency), "latency", alt_text)


def draw_percentiles(latency: Latency, span: tuple[int, int]) -> None:
    rows: list[Row] = []
    for point in latency.series:
        hits = point.hits
        misses = point.misses
        rows += _point(point.start_ms, "With a read", hits.p50, hits.p95)
        rows += _point(point.start_ms, "Without a read", misses.p50, misses.p95)
    title = "Time to first token (seconds)"
    drawn = lines_over_time(rows, charts.HITS[viewer.theme()], title, span, is_log=True)
    alt_text = (
        f"Median and 95th percentile in {len(latency.series)} intervals, with and without a read."
    )
    parts.chart(drawn, "percentiles", alt_text)


def shown_span(view: View) -> tuple[int, int]:
    """The time that both charts show, in milliseconds: the range. If most of the range lies before
    the first answer, the charts begin at that answer (`charts.first_shown`)."""
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
            "**No comparison**: engines of several kinds answered. Requests with a read and"
            " requests without one may be of different engines. Choose an engine above."
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
    comparison: Comparison | None, note: Callable[[Percentiles], str], none: str | None = None
) -> None:
    """Draw two cards: the medians with and without a read. Each card has the words that `note` has
    for its percentiles, or `none` without a comparison."""
    hits = comparison.hits if comparison else None
    misses = comparison.misses if comparison else None
    for label, side in (
        ("First token, with a read", hits),
        ("First token, without a read", misses),
    ):
        parts.card(
            "compared_first_token",
            formats.seconds(side.p50 if side else None),
            label=label,
            delta=note(side) if side else none,
        )


def compared(latency: Latency) -> Comparison | None:
    """The best comparison of hits with misses of one model and prompt length.

    The best one is that whose rarer side has the most turns. It is None if that side has fewer than
    `MIN_TURNS`. Medians over all lengths would compare long prompts, which are cached, with short
    prompts, which are not. Medians over several models, or over engines of several kinds, would
    compare the models or the engines.
    """
    comparisons = [
        comparison
        for comparison in comparisons_of(latency).values()
        if comparison.model not in latency.mixed
    ]
    best = max(comparisons, key=_rarer_turns, default=None)
    if best is None or _rarer_turns(best) < MIN_TURNS:
        return None
    return best


def _rarer_turns(comparison: Comparison) -> int:
    """How many turns the side with fewer turns has."""
    return min(comparison.hits.requests, comparison.misses.requests)


def comparisons_of(latency: Latency) -> dict[tuple[str, int], Comparison]:
    """Hits and misses side by side, by model and prompt length. A length's key is the number of
    tokens that it is above. A side without a turn has no requests and no percentiles."""
    comparisons: dict[tuple[str, int], Comparison] = {}
    for cell in latency.cells:
        key = (cell.model, cell.above_tokens)
        comparison = comparisons.get(key)
        if comparison is None:
            comparison = Comparison(cell.model, _length(cell), NO_TURNS, NO_TURNS)
        if cell.is_hit:
            comparisons[key] = comparison._replace(hits=cell.seconds)
        else:
            comparisons[key] = comparison._replace(misses=cell.seconds)
    return comparisons


def why_none(latency: Latency) -> str:
    """Why there is no comparison, in a few words."""
    if any(cell.model in latency.mixed for cell in latency.cells):
        return "engines of several kinds"
    return TOO_FEW if latency.cells else "no answer yet"


def _length(cell: LatencyCell) -> str:
    if cell.up_to_tokens is None:
        return f"above {cell.above_tokens:,}"
    return f"{cell.above_tokens:,} to {cell.up_to_tokens:,}"


def draw_scatter(view: View) -> None:
    """Draw the time to first token against the prompt length. Both axes are logarithmic, because
    both span powers of ten. At most `MAX_DOTS` of the sampled turns are drawn, always the same."""
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
    """The rows of one point of the chart: a row for each percentile that is known."""
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
    """A line for each kind (its colour) and percentile (its dashes).

    A dot marks each point, because a line of one point can't be seen. The dots are a layer of their
    own: if the lines had points, the legend would show no dashes.
    """
    y = alt.Y("value:Q", title=title, scale=charts.ZERO, axis=charts.amounts())
    if is_log:
        y = charts.decades(alt.Y, "value:Q", title)
    first_colour = next(iter(colours.values()))
    is_single = len(colours) == 1
    drawn = alt.Chart(charts.frame(rows)).encode(
        x=charts.moment(*span, has_ends=False),
        y=y,
        color=alt.value(first_colour) if is_single else charts.colour("kind:N", colours, 1),
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
            symbolStrokeColor=first_colour if is_single else "#7c8896",
            symbolSize=300,
        ),
    )
    lines = drawn.mark_line(strokeWidth=2).encode(strokeDash=dashes)
    dots = drawn.mark_circle(size=34, opacity=1)
    return alt.layer(lines, dots, charts.ends(*span)).properties(height=charts.CHART_HEIGHT)


def latency_table(latency: Latency) -> list[Row]:
    """Hits and misses of one model and prompt length side by side."""
    comparisons = comparisons_of(latency)
    rows: list[Row] = []
    for key in sorted(comparisons):
        comparison = comparisons[key]
        is_comparable = comparison.model not in latency.mixed
        rows.append(
            {
                "Model": comparison.model,
                "Prompt tokens": comparison.length,
                **_side_columns("With a read", comparison.hits),
                **_side_columns("Without a read", comparison.misses),
                "Times shorter": _four_digits(comparison.times_sooner) if is_comparable else None,
            }
        )
    return rows


def _side_columns(name: str, side: Percentiles) -> Row:
    return {
        name: side.requests,
        f"{name}, median (s)": _four_digits(side.p50),
        f"{name}, 95 % (s)": _four_digits(side.p95),
    }


def _four_digits(value: float | None) -> float | None:
    """Round to four digits. A percentile is known to within 1 %, so a fifth digit says nothing."""
    return None if value is None else float(f"{value:.4g}")


if __name__ == "__main__":
    parts.title("Latency", "How much sooner does a cached prompt answer?")
    live.show("latency", read, draw)
