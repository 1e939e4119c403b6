"""Times to first token against prompt lengths. Pure."""

from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.axes import PLAIN_LABEL, SHORT_LABEL, decades
from dashboard.charts.style import Rows, legend, scale
from dashboard.ui.colours import Palette


def scatter_chart(rows: Rows, colours: Palette) -> Any:
    """Time to first token against prompt length; both logarithmic, since both span decades."""
    prompts = decades(row["prompt"] for row in rows)
    seconds = decades(row["seconds"] for row in rows)
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_circle(size=34, opacity=0.6)
        .encode(
            x=alt.X(
                "prompt:Q",
                title="Prompt length (tokens)",
                scale=prompts.scale(),
                axis=alt.Axis(values=prompts.ticks, labelExpr=SHORT_LABEL),
            ),
            y=alt.Y(
                "seconds:Q",
                title="Time to first token (seconds)",
                scale=seconds.scale(),
                axis=alt.Axis(values=seconds.ticks, labelExpr=PLAIN_LABEL),
            ),
            color=alt.Color("kind:N", scale=scale(colours), legend=legend()),
            tooltip=[
                alt.Tooltip("kind:N", title="Read from cache"),
                alt.Tooltip("prompt:Q", title="Prompt tokens", format=","),
                alt.Tooltip("seconds:Q", title="First token (s)", format=".3f"),
                alt.Tooltip("share:Q", title="Of it read", format=".0%"),
                alt.Tooltip("id:N", title="Request"),
            ],
        )
        .properties(height=380)
    )
