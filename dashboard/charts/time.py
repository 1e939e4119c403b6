"""Charts over time: stacked amounts, gains and losses, percentiles. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.axes import PLAIN_LABEL, Times, amounts, decades
from dashboard.charts.style import CHART_HEIGHT, Rows, legend, scale
from dashboard.ui.colours import Palette


def moment(field: str, span: Times) -> alt.X:
    """The range as a time axis in UTC, whatever the browser's zone. It spans the whole range."""
    axis = alt.Axis(
        grid=False,
        values=[_utc(tick) for tick in span.ticks],
        format=span.form,
        labelOverlap=True,
        title="Time (UTC)",
    )
    ends = [_utc(span.since), _utc(span.until)]
    return alt.X(f"{field}:T", axis=axis, scale=alt.Scale(type="utc", domain=ends, nice=False))


def _utc(each: datetime) -> alt.DateTime:
    return alt.DateTime(
        year=each.year,
        month=each.month,
        date=each.day,
        hours=each.hour,
        minutes=each.minute,
        seconds=each.second,
        utc=True,
    )


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
    span: Times,
    height: int = CHART_HEIGHT + 40,
) -> alt.Chart:
    """Stacked rectangles, one for each interval and class; a pause is a gap.

    Rows have `start`, `end`, `class`, `amount`, `bottom`, `top` and `part` (empty, or "partial
    interval"); an interval that the range cuts is drawn paler, as it looks low without being so.
    """
    axis = amounts((row["top"] for row in rows), whole=True)
    drawn: alt.Chart = (
        # A rectangle of no height is no mark.
        alt.Chart(pd.DataFrame([row for row in rows if row["amount"]]))
        .mark_rect(strokeWidth=0)
        .encode(
            x=moment("start", span),
            x2=alt.X2("end:T"),
            y=alt.Y("bottom:Q", title=title, scale=axis.scale(), axis=axis.axis()),
            y2=alt.Y2("top:Q"),
            color=alt.Color("class:N", scale=scale(colours), legend=legend(2), sort=None),
            opacity=alt.condition("datum.part != ''", alt.value(0.55), alt.value(1)),
            tooltip=[
                alt.Tooltip("start:T", title="From (UTC)", format="%d %b %H:%M", formatType="utc"),
                alt.Tooltip("class:N", title="Class"),
                alt.Tooltip("amount:Q", title="Tokens", format=","),
                alt.Tooltip("part:N", title="Note"),
            ],
        )
        .properties(height=height)
    )
    return drawn


def signed_over_time(
    rows: Sequence[Mapping[str, Any]], colours: Palette, *, title: str, span: Times
) -> alt.Chart:
    """Bars above and below zero, one for each interval: gains and losses in different colours."""
    axis = amounts((row["amount"] for row in rows), unit="$")
    drawn: alt.Chart = (
        alt.Chart(pd.DataFrame([row for row in rows if row["amount"]]))
        .mark_rect(strokeWidth=0)
        .encode(
            x=moment("start", span),
            x2=alt.X2("end:T"),
            y=alt.Y("amount:Q", title=title, scale=axis.scale(), axis=axis.axis()),
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
                alt.Tooltip("said:N", title="Net saved"),
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
    span: Times,
    colours: Palette,
    kind: str | None = "kind",
    log: bool = True,
) -> Any:
    """Lines by kind (colour) and percentile (dash), with a dot where only one point is.

    The dots are a layer of their own: with the lines' own points the legend shows no dashes.
    """
    only = next(iter(colours.values()))
    neutral = only if kind is None else "#7c8896"
    values = [row[field] for row in rows]
    if log:
        found = decades(values)
        y = alt.Y(
            f"{field}:Q",
            title=title,
            scale=found.scale(),
            axis=alt.Axis(values=found.ticks, labelExpr=PLAIN_LABEL),
        )
    else:
        linear = amounts(values)
        y = alt.Y(f"{field}:Q", title=title, scale=linear.scale(), axis=linear.axis())
    drawn = alt.Chart(pd.DataFrame(rows)).encode(
        x=moment("start", span),
        y=y,
        color=alt.Color(f"{kind}:N", scale=scale(colours), legend=legend())
        if kind
        else alt.value(only),
        tooltip=[
            alt.Tooltip("start:T", title="From (UTC)", format="%d %b %H:%M", formatType="utc"),
            alt.Tooltip("percentile:N", title="Percentile"),
            alt.Tooltip(f"{field}:Q", title=title, format=".2~r"),
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
    return alt.layer(lines, drawn.mark_circle(size=34, opacity=1)).properties(height=300)
