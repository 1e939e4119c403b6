"""Times to first token against prompt lengths. Pure."""

from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.style import Rows, legend, log_ticks, scale
from dashboard.ui.colours import Palette


def scatter_chart(rows: Rows, colours: Palette) -> Any:
    """Time to first token against prompt length; both logarithmic, since both span decades."""
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_circle(size=26, opacity=0.55)
        .encode(
            x=alt.X(
                "prompt:Q",
                title="Prompt length (tokens)",
                scale=alt.Scale(type="log", nice=False, padding=12),
                axis=alt.Axis(format="~s", values=log_ticks(100, 5)),
            ),
            y=alt.Y(
                "seconds:Q",
                title="Time to first token (seconds)",
                scale=alt.Scale(type="log", padding=8),
                axis=alt.Axis(format="~g", values=log_ticks(0.001, 6)),
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
