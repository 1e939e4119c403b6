"""Charts over time: stacked amounts, gains and losses, percentiles. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.style import CHART_HEIGHT, Rows, legend, log_ticks, scale
from dashboard.ui.colours import Palette


def time_axis(seconds: float) -> alt.Axis:
    """Marks of a range that long, in UTC: hours of one day, days of many."""
    form = "%H:%M" if seconds <= 36 * 3600 else "%d %b"
    return alt.Axis(grid=False, format=form, tickCount=8, labelOverlap=True, title="Time (UTC)")


def moment(field: str, seconds: float, **options: Any) -> alt.X:
    """A time axis in UTC, whatever the browser's zone."""
    kind = alt.Scale(type="utc")
    return alt.X(f"{field}:T", axis=time_axis(seconds), scale=kind, **options)


def per_bucket(bucket_seconds: int) -> str:
    """The unit of what one bar counts: per minute, per 5 minutes, per hour."""
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if bucket_seconds >= size:
            count = bucket_seconds // size
            return f"per {unit}" if count == 1 else f"per {count} {unit}s"
    return "per second"


def stacked_over_time(
    rows: Sequence[Mapping[str, Any]],
    colours: Palette,
    *,
    title: str,
    seconds: float,
    height: int = CHART_HEIGHT,
) -> alt.Chart:
    """Stacked rectangles, one for each interval and class; a pause is a gap.

    Rows have `start`, `end`, `class`, `amount`, `bottom`, `top` and `part` (empty, or "partial
    interval"); an interval that the range cuts is drawn paler, as it looks low without being so.
    """
    drawn: alt.Chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_rect(strokeWidth=0)
        .encode(
            x=moment("start", seconds),
            x2=alt.X2("end:T"),
            y=alt.Y("bottom:Q", title=title, axis=alt.Axis(format="~s", tickCount=5)),
            y2=alt.Y2("top:Q"),
            color=alt.Color("class:N", scale=scale(colours), legend=legend(), sort=None),
            opacity=alt.condition("datum.part != ''", alt.value(0.55), alt.value(1)),
            tooltip=[
                alt.Tooltip("start:T", title="From (UTC)", format="%d %b %H:%M", formatType="utc"),
                alt.Tooltip("class:N", title="Class"),
                alt.Tooltip("amount:Q", title="Amount", format=","),
                alt.Tooltip("part:N", title="Note"),
            ],
        )
        .properties(height=height)
    )
    return drawn


def signed_over_time(
    rows: Sequence[Mapping[str, Any]], colours: Palette, *, title: str, seconds: float
) -> alt.Chart:
    """Bars above and below zero, one for each interval: gains and losses in different colours."""
    drawn: alt.Chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_rect(strokeWidth=0)
        .encode(
            x=moment("start", seconds),
            x2=alt.X2("end:T"),
            y=alt.Y("amount:Q", title=title, axis=alt.Axis(format="$~s", tickCount=5)),
            y2=alt.Y2("zero:Q"),
            color=alt.Color(
                "class:N",
                scale=scale({name: colours[name] for name in ("Saved", "Lost")}),
                legend=legend(),
                sort=None,
            ),
            opacity=alt.condition("datum.part != ''", alt.value(0.55), alt.value(1)),
            tooltip=[
                alt.Tooltip("start:T", title="From (UTC)", format="%d %b %H:%M", formatType="utc"),
                alt.Tooltip("amount:Q", title="Net saved ($)", format="$,.4f"),
                alt.Tooltip("part:N", title="Note"),
            ],
        )
        .properties(height=CHART_HEIGHT)
    )
    return drawn


def lines_over_time(
    rows: Rows,
    *,
    field: str,
    title: str,
    seconds: float,
    colours: Palette,
    kind: str | None = "kind",
    log: bool = True,
) -> Any:
    """Lines by kind (colour) and percentile (dash), with a dot where only one point is.

    The dots are a layer of their own: with the lines' own points the legend shows no dashes.
    """
    only = next(iter(colours.values()))
    neutral = only if kind is None else "#7c8896"
    options: dict[str, Any] = {"type": "log"} if log else {"zero": True}
    drawn = alt.Chart(pd.DataFrame(rows)).encode(
        x=moment("start", seconds),
        y=alt.Y(
            f"{field}:Q",
            title=title,
            scale=alt.Scale(**options),
            axis=alt.Axis(format="~g", values=log_ticks(0.001, 6))
            if log
            else alt.Axis(format="~g", tickCount=5),
        ),
        color=alt.Color(f"{kind}:N", scale=scale(colours), legend=legend())
        if kind
        else alt.value(only),
        tooltip=[
            alt.Tooltip("start:T", title="From (UTC)", format="%d %b %H:%M", formatType="utc"),
            alt.Tooltip("percentile:N", title="Percentile"),
            alt.Tooltip(f"{field}:Q", title=title, format=".3~f"),
        ],
    )
    dashes = alt.StrokeDash(
        "percentile:N",
        sort=["Median", "95 %"],
        legend=alt.Legend(
            title=None, orient="top", symbolType="stroke", symbolStrokeColor=neutral, symbolSize=300
        ),
    )
    lines = drawn.mark_line(strokeWidth=2).encode(strokeDash=dashes)
    return alt.layer(lines, drawn.mark_circle(size=22, opacity=1)).properties(height=300)
