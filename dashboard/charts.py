"""The charts, as Altair specifications. Pure: rows and a theme in, a chart out."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.ui.colours import GRID, SOFT_TEXT, Palette, Theme

TOKENS_HEIGHT = 300
_LAST_SPACE = "lastindexof(datum.label, ' ')"
_LAST_WORD_BELOW = f"[slice(datum.label, 0, {_LAST_SPACE}), slice(datum.label, {_LAST_SPACE} + 1)]"


def scale(colours: Palette) -> alt.Scale:
    """One colour for each word: what is not drawn is not in the way of the legend."""
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def legend() -> alt.Legend:
    return alt.Legend(title=None, orient="top", symbolType="square", labelLimit=240)


def styled(drawn: Any, theme: Theme) -> Any:
    """Words and lines in colours that can be read: Streamlit's own are too faint for small text."""
    words, lines = SOFT_TEXT[theme], GRID[theme]
    return drawn.configure_axis(
        labelColor=words, titleColor=words, gridColor=lines, domainColor=lines, tickColor=lines
    ).configure_legend(labelColor=words, titleColor=words, symbolBaseStrokeColor=words)


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
        .properties(height=TOKENS_HEIGHT)
    )
    return drawn


def waterfall(rows: Sequence[Mapping[str, Any]], colours: Palette, text: str) -> Any:
    """Bars from `bottom` to `top` with their amounts above; `text` is the colour of words."""
    frame = pd.DataFrame(rows)
    steps = [row["step"] for row in rows]
    x = alt.X(
        "step:N",
        sort=steps,
        title=None,
        scale=alt.Scale(paddingInner=0.3, paddingOuter=0.15),
        axis=alt.Axis(labelAngle=0, grid=False, labelExpr=_LAST_WORD_BELOW, labelLimit=120),
    )
    bars = (
        alt.Chart(frame)
        .mark_bar(cornerRadius=2)
        .encode(
            x=x,
            y=alt.Y("bottom:Q", title="Dollars", axis=alt.Axis(format="$~s", tickCount=5)),
            y2=alt.Y2("top:Q"),
            color=alt.Color("class:N", scale=scale(colours), legend=legend(), sort=None),
            tooltip=[
                alt.Tooltip("step:N", title="Step"),
                alt.Tooltip("amount:Q", title="Dollars", format="$,.6f"),
            ],
        )
    )
    labels = (
        alt.Chart(frame)
        .mark_text(dy=-8, fontSize=13, fontWeight=600, color=text)
        .encode(x=x, y=alt.Y("top:Q"), text=alt.Text("label:N"))
    )
    return alt.layer(bars, labels).properties(height=TOKENS_HEIGHT)
