"""The charts, as Altair specifications. Pure: a table and a theme in, a chart out."""

from typing import Any, Literal

import altair as alt

Theme = Literal["light", "dark"]

TOKEN_COLOURS: dict[Theme, dict[str, str]] = {
    "light": {
        "Read from cache": "#0f766e",
        "Written, 5 minutes": "#d97706",
        "Written, 1 hour": "#9a3412",
        "Uncached": "#94a3b8",
    },
    "dark": {
        "Read from cache": "#2dd4bf",
        "Written, 5 minutes": "#fbbf24",
        "Written, 1 hour": "#f97316",
        "Uncached": "#64748b",
    },
}
BLOCK_COLOURS: dict[Theme, dict[str, str]] = {
    "light": {
        "Active": "#2563eb",
        "Leased": "#0f766e",
        "Best effort": "#7dc4b8",
        "Cached": "#94a3b8",
        "Free": "#e2e8f0",
    },
    "dark": {
        "Active": "#60a5fa",
        "Leased": "#2dd4bf",
        "Best effort": "#1d6f66",
        "Cached": "#64748b",
        "Free": "#263240",
    },
}
TOKENS_HEIGHT = 300
ENGINE_HEIGHT = 36
POOL_FRAME_HEIGHT = 120  # legend and axis


def _scale(colours: dict[str, str]) -> alt.Scale:
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def _legend() -> alt.Legend:
    return alt.Legend(title=None, orient="top", symbolType="square", labelLimit=200)


def tokens_over_time(frame: Any, bucket_seconds: int, theme: Theme) -> alt.Chart:
    """Draw the stacked classes; a bar is one bucket, so a pause is a gap."""
    unit = f"{bucket_seconds // 60} minutes" if bucket_seconds > 60 else "minute"
    if bucket_seconds < 60:
        unit = f"{bucket_seconds} seconds"
    chart: alt.Chart = (
        alt.Chart(frame)
        .mark_rect(strokeWidth=0)
        .encode(
            x=alt.X("start:T", title=None, axis=alt.Axis(grid=False, format="%H:%M", tickCount=8)),
            x2=alt.X2("end:T"),
            y=alt.Y(
                "bottom:Q",
                title=f"Prompt tokens per {unit}",
                axis=alt.Axis(format="~s", tickCount=5),
            ),
            y2=alt.Y2("top:Q"),
            color=alt.Color(
                "class:N", scale=_scale(TOKEN_COLOURS[theme]), legend=_legend(), sort=None
            ),
            tooltip=[
                alt.Tooltip("start:T", title="From", format="%H:%M:%S"),
                alt.Tooltip("class:N", title="Class"),
                alt.Tooltip("tokens:Q", title="Tokens", format=","),
            ],
        )
        .properties(height=TOKENS_HEIGHT)
    )
    return chart


def pool_by_state(frame: Any, num_engines: int, theme: Theme) -> alt.Chart:
    """One bar per engine: what holds its blocks, as shares of its pool."""
    chart: alt.Chart = (
        alt.Chart(frame)
        .mark_bar(size=22)
        .encode(
            x=alt.X(
                "share:Q",
                title="Share of the pool",
                scale=alt.Scale(domain=[0, 1], nice=False),
                axis=alt.Axis(format=".0%", tickCount=5),
            ),
            y=alt.Y("engine:N", title=None, axis=alt.Axis(labelLimit=220)),
            color=alt.Color(
                "state:N", scale=_scale(BLOCK_COLOURS[theme]), legend=_legend(), sort=None
            ),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("engine:N", title="Engine"),
                alt.Tooltip("state:N", title="State"),
                alt.Tooltip("blocks:Q", title="Blocks", format=","),
                alt.Tooltip("share:Q", title="Share", format=".1%"),
            ],
        )
        .properties(height=POOL_FRAME_HEIGHT + ENGINE_HEIGHT * num_engines)
    )
    return chart
