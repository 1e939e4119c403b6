"""Charts of the engines' memory: the block map, the pools, and how entries end. Pure."""

from typing import Any

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from dashboard.charts.axes import amounts
from dashboard.charts.style import BAR_HEIGHT, Rows, legend, scale
from dashboard.rows.memory import CELLS_A_ROW
from dashboard.ui.colours import Palette

CELL_HEIGHT = 9


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
            color=alt.Color("state:N", scale=scale(colours), legend=legend(3), sort=None),
            tooltip=[
                alt.Tooltip("blocks:N", title="Blocks"),
                alt.Tooltip("what:N", title="Holds"),
                alt.Tooltip("shared:Q", title="Shared"),
            ],
        )
        .properties(height=max(lines * CELL_HEIGHT, 60) + 20)
    )


def pool_chart(rows: Rows, colours: Palette) -> Any:
    """One bar for each engine: what holds its blocks, as shares of its pool."""
    engines = len({row["engine"] for row in rows})
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(height={"band": 0.7})
        .encode(
            x=alt.X(
                "share:Q",
                title="Share of the pool (%)",
                scale=alt.Scale(domain=[0, 1], nice=False),
                axis=alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1]),
            ),
            y=alt.Y("engine:N", title="Engine", axis=alt.Axis(labelLimit=200)),
            color=alt.Color("state:N", scale=scale(colours), legend=legend(3), sort=None),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("engine:N", title="Engine"),
                alt.Tooltip("state:N", title="Blocks are"),
                alt.Tooltip("blocks:Q", title="Blocks", format=","),
                alt.Tooltip("share:Q", title="Share", format=".1%"),
            ],
        )
        .properties(height=130 + engines * BAR_HEIGHT)
    )


def ending_chart(rows: Rows, colours: Palette) -> Any:
    axis = amounts((row["entries"] for row in rows), whole=True)
    return (
        alt.Chart(pd.DataFrame([row for row in rows if row["entries"]]))
        .mark_bar(height={"band": 0.7}, cornerRadius=2)
        .encode(
            x=alt.X("entries:Q", title="Entries", scale=axis.scale(), axis=axis.axis()),
            y=alt.Y(
                "reason:N",
                title="Reason",
                scale=alt.Scale(domain=[row["reason"] for row in rows]),
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


def rest_chart(rows: Rows, colours: Palette) -> Any:
    names = list(dict.fromkeys(row["what"] for row in rows))
    times = list(dict.fromkeys(row["time"] for row in rows))
    pair = dict(zip(names, (colours["Hit"], colours["Miss"]), strict=True))
    axis = amounts((row["entries"] for row in rows), whole=True)
    return (
        alt.Chart(pd.DataFrame([row for row in rows if row["entries"]]))
        .mark_bar(cornerRadius=2)
        .encode(
            x=alt.X(
                "time:N",
                title="Time, up to",
                scale=alt.Scale(domain=times),
                axis=alt.Axis(labelAngle=0, labelOverlap=False),
            ),
            xOffset=alt.XOffset("what:N", sort=names),
            y=alt.Y("entries:Q", title="Entries", scale=axis.scale(), axis=axis.axis()),
            color=alt.Color("what:N", scale=scale(pair), legend=legend(1), sort=names),
            tooltip=[
                alt.Tooltip("what:N", title="What"),
                alt.Tooltip("time:N", title="Time"),
                alt.Tooltip("entries:Q", title="Entries", format=","),
            ],
        )
        .properties(height=100 + 5 * BAR_HEIGHT)
    )
