"""The curves of a plan. Pure."""

from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.axes import PLAIN_LABEL, amounts, decades
from dashboard.charts.style import Rows, legend, scale
from dashboard.ui.colours import Palette

_HEIGHT = 280


def share_chart(rows: Rows, colours: Palette, *, title: str) -> Any:
    """Lines of shares by memory or engines; a simulated point is a dot."""
    x = amounts((row["x"] for row in rows), whole=title == "Engines")
    return _lines(
        rows,
        colours,
        alt.X("x:Q", title=title, scale=x.scale(), axis=x.axis()),
        alt.Y(
            "share:Q",
            title="Share of prompt tokens",
            scale=alt.Scale(domain=[0, 1]),
            axis=alt.Axis(format=".0%", tickCount=5),
        ),
        alt.Tooltip("share:Q", title="Share", format=".1%"),
    )


def wait_chart(rows: Rows, colours: Palette, *, title: str) -> Any:
    x = amounts((row["x"] for row in rows), whole=title == "Engines")
    y = decades(row["seconds"] for row in rows)
    return _lines(
        rows,
        colours,
        alt.X("x:Q", title=title, scale=x.scale(), axis=x.axis()),
        alt.Y(
            "seconds:Q",
            title="First token (seconds)",
            scale=y.scale(),
            axis=alt.Axis(values=y.ticks, labelExpr=PLAIN_LABEL),
        ),
        alt.Tooltip("seconds:Q", title="First token (s)", format=".3f"),
    )


def _lines(rows: Rows, colours: Palette, x: alt.X, y: alt.Y, told: alt.Tooltip) -> Any:
    drawn = alt.Chart(pd.DataFrame(rows)).encode(
        x=x,
        y=y,
        color=alt.Color("kind:N", scale=scale(colours), legend=legend(columns=2)),
        tooltip=[alt.Tooltip("kind:N", title="What"), alt.Tooltip("x:Q", title="At"), told],
    )
    dots = drawn.transform_filter("indexof(datum.kind, 'LRU') < 0").mark_circle(size=60)
    return alt.layer(drawn.mark_line(), dots).properties(height=_HEIGHT)
