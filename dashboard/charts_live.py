"""Charts of what engines hold and how fast they answer. Pure: rows and colours in, chart out."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts import legend, moment, scale
from dashboard.rows_live import CELLS_A_ROW
from dashboard.ui.colours import Palette

Rows = Sequence[Mapping[str, Any]]

BAR_HEIGHT = 34
CELL_HEIGHT = 9
STAGES = ("Available", "Captured", "Delivered")


def _steps(first: float, decades: int) -> list[float]:
    """Where a logarithmic axis has its lines: 1 and 3 of each decade."""
    return [first * 10**decade * step for decade in range(decades) for step in (1, 3)]


def block_map(rows: Rows, colours: Palette, blocks_per_cell: int) -> Any:
    """A square for each cell, read like a page; blocks keep their place."""
    lines = max(len(rows) // CELLS_A_ROW, 1)
    each = "1 block" if blocks_per_cell == 1 else f"{blocks_per_cell} blocks"
    step = CELLS_A_ROW * blocks_per_cell
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_rect(strokeWidth=0)
        .encode(
            x=alt.X(
                "x:O",
                title=f"Cells of {each} each, {CELLS_A_ROW} a row",
                axis=alt.Axis(labels=False, ticks=False, domain=False),
                scale=alt.Scale(paddingInner=0.12),
            ),
            y=alt.Y(
                "y:O",
                title="First block of the row",
                axis=alt.Axis(
                    labelExpr=f"datum.value % {step * 8} == 0 ? format(datum.value, ',') : ''",
                    ticks=False,
                    domain=False,
                    labelOverlap=False,
                ),
                scale=alt.Scale(paddingInner=0.12),
            ),
            color=alt.Color("state:N", scale=scale(colours), legend=legend(), sort=None),
            tooltip=[
                alt.Tooltip("blocks:N", title="Blocks"),
                alt.Tooltip("what:N", title="Holds"),
                alt.Tooltip("shared:Q", title="Shared"),
            ],
        )
        .properties(height=max(lines * CELL_HEIGHT, 60))
    )


def pools(rows: Rows, colours: Palette) -> Any:
    """One bar for each engine: what holds its blocks, as shares of its pool."""
    engines = len({row["engine"] for row in rows})
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(size=20)
        .encode(
            x=alt.X(
                "share:Q",
                title="Share of the pool (%)",
                scale=alt.Scale(domain=[0, 1], nice=False),
                axis=alt.Axis(format=".0%", tickCount=5),
            ),
            y=alt.Y("engine:N", title="Engine", axis=alt.Axis(labelLimit=200)),
            color=alt.Color("state:N", scale=scale(colours), legend=legend(), sort=None),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("engine:N", title="Engine"),
                alt.Tooltip("state:N", title="Blocks are"),
                alt.Tooltip("blocks:Q", title="Blocks", format=","),
                alt.Tooltip("share:Q", title="Share", format=".1%"),
            ],
        )
        .properties(height=90 + engines * BAR_HEIGHT)
    )


def endings(rows: Rows, colours: Palette) -> Any:
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(size=18, cornerRadius=2)
        .encode(
            x=alt.X("entries:Q", title="Entries", axis=alt.Axis(format="~s", tickMinStep=1)),
            y=alt.Y(
                "reason:N",
                title="Reason",
                sort=[row["reason"] for row in rows],
                axis=alt.Axis(labelLimit=180),
            ),
            color=alt.Color(
                "kind:N",
                scale=scale({"Kept": colours["Saved"], "Lost": colours["Lost"]}),
                legend=legend(),
            ),
            tooltip=[
                alt.Tooltip("reason:N", title="Reason"),
                alt.Tooltip("entries:Q", title="Entries", format=","),
            ],
        )
        .properties(height=80 + len(rows) * BAR_HEIGHT)
    )


def rests(rows: Rows, colours: Palette) -> Any:
    names = list(dict.fromkeys(row["what"] for row in rows))
    times = list(dict.fromkeys(row["time"] for row in rows))
    pair = dict(zip(names, (colours["Hit"], colours["Miss"]), strict=True))
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(cornerRadius=2)
        .encode(
            x=alt.X(
                "time:N",
                title="Time, up to",
                sort=times,
                axis=alt.Axis(labelAngle=0, labelOverlap=False),
            ),
            xOffset=alt.XOffset("what:N", sort=names),
            y=alt.Y("entries:Q", title="Entries", axis=alt.Axis(format="~s", tickMinStep=1)),
            color=alt.Color("what:N", scale=scale(pair), legend=legend(), sort=names),
            tooltip=[
                alt.Tooltip("what:N", title="What"),
                alt.Tooltip("time:N", title="Time"),
                alt.Tooltip("entries:Q", title="Entries", format=","),
            ],
        )
        .properties(height=80 + 5 * BAR_HEIGHT)
    )


def scatter(rows: Rows, colours: Palette) -> Any:
    """Time to first token against prompt length; both logarithmic, since both span decades."""
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_circle(size=26, opacity=0.55)
        .encode(
            x=alt.X(
                "prompt:Q",
                title="Prompt length (tokens)",
                scale=alt.Scale(type="log", nice=False, padding=12),
                axis=alt.Axis(format="~s", values=_steps(100, 5)),
            ),
            y=alt.Y(
                "seconds:Q",
                title="Time to first token (seconds)",
                scale=alt.Scale(type="log", padding=8),
                axis=alt.Axis(format="~g", values=_steps(0.001, 6)),
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


def lines_over_time(
    rows: Rows,
    *,
    field: str,
    title: str,
    seconds: float,
    colours: Palette,
    kind: str | None = "kind",
    log: bool = True,
) -> Any:
    """Lines by kind (colour) and percentile (dash), with a dot where only one point is.

    The dots are a layer of their own: with the lines' own points the legend shows no dashes.
    """
    only = next(iter(colours.values()))
    neutral = only if kind is None else "#7c8896"
    options: dict[str, Any] = {"type": "log"} if log else {"zero": True}
    drawn = alt.Chart(pd.DataFrame(rows)).encode(
        x=moment("start", seconds),
        y=alt.Y(
            f"{field}:Q",
            title=title,
            scale=alt.Scale(**options),
            axis=alt.Axis(format="~g", values=_steps(0.001, 6))
            if log
            else alt.Axis(format="~g", tickCount=5),
        ),
        color=alt.Color(f"{kind}:N", scale=scale(colours), legend=legend())
        if kind
        else alt.value(only),
        tooltip=[
            alt.Tooltip("start:T", title="From (UTC)", format="%d %b %H:%M", formatType="utc"),
            alt.Tooltip("percentile:N", title="Percentile"),
            alt.Tooltip(f"{field}:Q", title=title, format=".3~f"),
        ],
    )
    dashes = alt.StrokeDash(
        "percentile:N",
        sort=["Median", "95 %"],
        legend=alt.Legend(
            title=None, orient="top", symbolType="stroke", symbolStrokeColor=neutral, symbolSize=300
        ),
    )
    lines = drawn.mark_line(strokeWidth=2).encode(strokeDash=dashes)
    return alt.layer(lines, drawn.mark_circle(size=22, opacity=1)).properties(height=300)


def attribution(rows: Rows, colours: Palette) -> Any:
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(cornerRadius=2)
        .encode(
            x=alt.X(
                "share:Q",
                title="Share of prompt tokens (%)",
                axis=alt.Axis(format=".0%", tickCount=5),
                scale=alt.Scale(domain=[0, 1]),
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


def ribbon(rows: Rows, colours: Palette) -> Any:
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
