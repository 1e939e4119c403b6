"""Where hits are lost, by engine. Pure."""

from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.style import Rows, legend, scale
from dashboard.ui.colours import Palette

STAGES = ("Available", "Captured", "Delivered")


def attribution_chart(rows: Rows, colours: Palette) -> Any:
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(cornerRadius=2)
        .encode(
            x=alt.X(
                "share:Q",
                title="Share of prompt tokens (%)",
                axis=alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1]),
                scale=alt.Scale(domain=[0, 1], nice=False),
            ),
            y=alt.Y("engine:N", title="Engine", sort=engines, axis=alt.Axis(labelLimit=200)),
            yOffset=alt.YOffset("stage:N", sort=list(STAGES)),
            color=alt.Color("stage:N", scale=scale(colours), legend=legend(), sort=list(STAGES)),
            tooltip=[
                alt.Tooltip("engine:N", title="Engine"),
                alt.Tooltip("stage:N", title="Stage"),
                alt.Tooltip("share:Q", title="Share", format=".1%"),
                alt.Tooltip("tokens:Q", title="Tokens", format=","),
                alt.Tooltip("turns:Q", title="Sampled turns", format=","),
            ],
        )
        .properties(height=80 + 52 * len(engines))
    )
