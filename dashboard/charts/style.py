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


def legend() -> alt.Legend:
    return alt.Legend(title=None, orient="top", symbolType="square", labelLimit=240)


def styled(drawn: Any, theme: Theme) -> Any:
    """Words and lines in colours that can be read: Streamlit's own are too faint for small text."""
    words, lines = SOFT_TEXT[theme], GRID[theme]
    return drawn.configure_axis(
        labelColor=words, titleColor=words, gridColor=lines, domainColor=lines, tickColor=lines
    ).configure_legend(labelColor=words, titleColor=words, symbolBaseStrokeColor=words)


def log_ticks(first: float, decades: int) -> list[float]:
    """Where a logarithmic axis has its lines: 1 and 3 of each decade."""
    return [first * 10**decade * step for decade in range(decades) for step in (1, 3)]
