"""The waterfall of costs. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.axes import amounts
from dashboard.charts.style import CHART_HEIGHT, legend, scale
from dashboard.ui.colours import Palette

_LAST_SPACE = "lastindexof(datum.label, ' ')"
_LAST_WORD_BELOW = f"[slice(datum.label, 0, {_LAST_SPACE}), slice(datum.label, {_LAST_SPACE} + 1)]"


def waterfall_chart(rows: Sequence[Mapping[str, Any]], colours: Palette, text: str) -> Any:
    """Bars from `bottom` to `top` with their amounts above; `text` is the colour of words."""
    frame = pd.DataFrame(rows)
    axis = amounts((row[end] for row in rows for end in ("bottom", "top")), unit="$")
    steps = [row["step"] for row in rows]
    x = alt.X(
        "step:N",
        sort=steps,
        title=None,
        scale=alt.Scale(paddingInner=0.3, paddingOuter=0.15),
        axis=alt.Axis(labelAngle=0, grid=False, labelExpr=_LAST_WORD_BELOW, labelLimit=120),
    )
    bars = (
        alt.Chart(pd.DataFrame([row for row in rows if row["amount"]]))
        .mark_bar(cornerRadius=2)
        .encode(
            x=x,
            y=alt.Y("bottom:Q", title="Dollars", scale=axis.scale(), axis=axis.axis()),
            y2=alt.Y2("top:Q"),
            color=alt.Color("class:N", scale=scale(colours), legend=legend(), sort=None),
            tooltip=[
                alt.Tooltip("step:N", title="Step"),
                alt.Tooltip("label:N", title="Amount"),
            ],
        )
    )
    labels = (
        alt.Chart(frame)
        .mark_text(dy=-8, fontSize=13, fontWeight=600, color=text)
        .encode(x=x, y=alt.Y("top:Q"), text=alt.Text("label:N"))
    )
    return alt.layer(bars, labels).properties(height=CHART_HEIGHT)
