"""The charts, as Altair specifications. Pure: rows and a theme in, a chart out."""

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.colours import Palette

TOKENS_HEIGHT = 300


def scale(colours: Palette) -> alt.Scale:
    """One colour for each word: what is not drawn is not in the way of the legend."""
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def legend() -> alt.Legend:
    return alt.Legend(title=None, orient="top", symbolType="square", labelLimit=240)


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
    rows: list[Mapping[str, Any]],
    colours: Palette,
    *,
    title: str,
    seconds: float,
    height: int = TOKENS_HEIGHT,
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
