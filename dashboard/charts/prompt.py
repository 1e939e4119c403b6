"""One prompt, by what became of its tokens. Pure."""

from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.axes import amounts
from dashboard.charts.style import Rows, legend, scale
from dashboard.ui.colours import Palette


def ribbon_chart(rows: Rows, colours: Palette) -> Any:
    """A prompt from its first token to its last, by what became of it."""
    total = max([row["end"] for row in rows], default=1)
    ticks = [tick for tick in amounts([total], whole=True).ticks if tick <= total]
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(size=40)
        .encode(
            x=alt.X(
                "start:Q",
                title="Prompt (tokens)",
                axis=alt.Axis(format=",d", values=ticks, grid=False),
                scale=alt.Scale(domain=[0, total], nice=False),
            ),
            x2=alt.X2("end:Q"),
            color=alt.Color("class:N", scale=scale(colours), legend=legend(2), sort=None),
            tooltip=[
                alt.Tooltip("class:N", title="Class"),
                alt.Tooltip("tokens:Q", title="Tokens", format=","),
            ],
        )
        .properties(height=200)
    )
