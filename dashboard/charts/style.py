"""What charts have in common: colours, legends, axes and sizes. Pure."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from dashboard.rows.row import Row
from dashboard.ui.colours import GRID, SOFT_TEXT, Palette, Theme

Rows = Sequence[Row]


CHART_HEIGHT = 300
"""Pixels of a chart over time."""
BAR_HEIGHT = 34
"""Pixels that one bar of a bar chart takes."""


def scale(colours: Palette) -> alt.Scale:
    """The colour of each word. The legend shows all words, also those that are not drawn."""
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def legend(columns: int = 0) -> alt.Legend:
    """Above the chart; in so many columns where one line is too long for it."""
    found = alt.Legend(title=None, orient="top", symbolType="square", labelLimit=240)
    if columns:
        found.columns = columns
    return found


def styled(drawn: Any, theme: Theme) -> Any:
    """Words and lines in colours that can be read: Streamlit's own are too faint for small text."""
    words, lines = SOFT_TEXT[theme], GRID[theme]
    return (
        drawn.configure_axis(
            labelColor=words, titleColor=words, gridColor=lines, domainColor=lines, tickColor=lines
        )
        .configure_axisX(
            # The first and the last label stay within the chart.
            labelFlush=True
        )
        .configure_legend(labelColor=words, titleColor=words, symbolBaseStrokeColor=words)
    )
