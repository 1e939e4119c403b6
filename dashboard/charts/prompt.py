"""One prompt, by what became of its tokens. Pure."""

from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.style import Rows, legend, scale
from dashboard.ui.colours import Palette


def ribbon_chart(rows: Rows, colours: Palette) -> Any:
    """A prompt from its first token to its last, by what became of it."""
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_rect(cornerRadius=2)
        .encode(
            x=alt.X(
                "start:Q",
                title="Prompt (tokens)",
                axis=alt.Axis(format=",d", tickCount=5),
                scale=alt.Scale(nice=False),
            ),
            x2=alt.X2("end:Q"),
            y=alt.value(0),
            y2=alt.value("height"),
            color=alt.Color("class:N", scale=scale(colours), legend=legend(), sort=None),
            tooltip=[
                alt.Tooltip("class:N", title="Class"),
                alt.Tooltip("tokens:Q", title="Tokens", format=","),
            ],
        )
        .properties(height=130)
    )
