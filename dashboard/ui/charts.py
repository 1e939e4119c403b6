"""What charts have in common: the meaning of colours, legends, sizes, and time. Pure.

The colours of neighbours in a stack differ in lightness too, for readers with a colour vision
deficiency.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import altair as alt
import pandas as pd  # type: ignore[import-untyped]

from engine.protocol import TTLS, Ttl

Theme = Literal["light", "dark"]
Palette = dict[str, str]
X = TypeVar("X", alt.X, alt.Y)
Row = Mapping[str, Any]
"""Values by column. A column is a title that a table shows, or a field that a chart draws."""
Rows = Sequence[Row]


def _themes(colours: Mapping[str, tuple[str, str]]) -> dict[Theme, Palette]:
    """The colours of words on a light and on a dark ground."""
    return {
        "light": {word: pair[0] for word, pair in colours.items()},
        "dark": {word: pair[1] for word, pair in colours.items()},
    }


# Each colour for a light and for a dark ground.
_TEAL = ("#0f766e", "#2dd4bf")
_BLUE = ("#2563eb", "#60a5fa")
_AMBER = ("#b45309", "#fbbf24")
_SLATE = ("#64748b", "#94a3b8")
_PALE = ("#94a3b8", "#64748b")
WRITTEN = "Written, "
"""What the names of the TTL classes begin with."""
_WRITTEN_COLOURS: dict[Ttl, tuple[str, str]] = {
    "5m": ("#d97706", "#fbbf24"),
    "30m": ("#b45309", "#fb923c"),
    "1h": ("#9a3412", "#f97316"),
    "12h": ("#6b1d0c", "#ea580c"),
}
TOKENS = _themes(
    {
        "Read from cache": _TEAL,
        **{f"{WRITTEN}{TTLS[ttl].words}": _WRITTEN_COLOURS[ttl] for ttl in TTLS},
        "Reused automatically": ("#a8c3c8", "#4d6b73"),
        "Computed, not written": ("#64748b", "#8595a8"),
    }
)
BLOCKS = _themes(
    {
        "Active": _BLUE,
        "Leased": _TEAL,
        "Leased in the store": ("#0ea5e9", "#0369a1"),
        "Shared": ("#7c3aed", "#a78bfa"),
        "Best effort": ("#7dc4b8", "#1d6f66"),
        "Without an entry": _PALE,
        "Free": ("#e2e8f0", "#263240"),
    }
)
HITS = _themes({"With a read": _TEAL, "Without a read": _AMBER})
# The stages of a hit. It can be lost between any two of them.
STAGES = _themes({"Available": _PALE, "Captured": _BLUE, "Delivered": _TEAL})
# What was paid, what was saved, what was lost.
MONEY = _themes({"Cost": ("#475569", "#94a3b8"), "Saved": _TEAL, "Lost": ("#b42318", "#ff8a7a")})
LRU_EXACT = "LRU, no leases (exact)"
"""What one memory without leases would have reused."""
READ_SIMULATED = "Read (simulated)"
REUSED_SIMULATED = "Reused (simulated)"
"""All that a simulated fleet reused, with or without a promise."""
PLANS = _themes({LRU_EXACT: _SLATE, READ_SIMULATED: _TEAL, REUSED_SIMULATED: _AMBER})
# What engines have in memory, and where requests wait.
LOAD = _themes({"Leased": _TEAL, "Active": _BLUE, "At engines": _AMBER, "At this gateway": _SLATE})
WAITS = _themes({"p50": _TEAL, "p95": _AMBER})
# The colour of marks that have no meaning of their own.
PLAIN: dict[Theme, str] = {"light": "#2563eb", "dark": "#60a5fa"}
TEXT: dict[Theme, str] = {"light": "#17212b", "dark": "#e6edf3"}
_SOFT_TEXT: dict[Theme, str] = {"light": "#4a5866", "dark": "#a9b7c4"}
_GRID: dict[Theme, str] = {"light": "#dfe4ea", "dark": "#2a3642"}
CHART_HEIGHT = 300
"""Pixels of a chart over time."""
BAR_HEIGHT = 34
"""Pixels that one bar of a bar chart takes."""
SHARES = alt.Scale(domain=[0, 1], nice=False)
"""The scale of an axis of shares, from none to all."""
ZERO = alt.Scale(zero=True)
FROM = alt.Tooltip("start:T", title="From (UTC)", format="%d %b %H:%M", formatType="utc")


def frame(rows: Rows) -> Any:
    return pd.DataFrame(list(rows))


def colour(field: str, colours: Palette, columns: int = 0, **options: Any) -> alt.Color:
    """A colour for each word, with a legend above the chart. The legend shows every word, drawn or
    not. It has so many `columns`, if it is too long for one line; 0: it is one line."""
    legend = alt.Legend(title=None, orient="top", symbolType="square", labelLimit=240)
    if columns:
        legend.columns = columns
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(field, scale=scale, legend=legend, **options)


def with_tokens(colours: Palette, classes: Iterable[str]) -> Palette:
    """The colours of `TOKENS` for a chart that draws these `classes`. Its legend names a TTL class
    only if the class is drawn, and names all other classes."""
    drawn = set(classes)
    return {
        name: code
        for name, code in colours.items()
        if name in drawn or not name.startswith(WRITTEN)
    }


def drawn_of(colours: Palette, names: Iterable[str]) -> Palette:
    """The colours of the words that a chart draws. Its legend names no other word."""
    drawn = set(names)
    return {name: code for name, code in colours.items() if name in drawn}


def tips(*columns: str) -> list[alt.Tooltip]:
    """The tooltip of a mark. Each column is `field:type=Title`, or `field:type=Title|format`."""
    tooltips = []
    for column in columns:
        field, _, title = column.partition("=")
        title, _, form = title.partition("|")
        tooltips.append(alt.Tooltip(field, title=title, format=form or alt.Undefined))
    return tooltips


def share_axis(title: str) -> alt.X:
    axis = alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1])
    return alt.X("share:Q", title=title, scale=SHARES, axis=axis)


def styled(drawn: Any, theme: Theme) -> Any:
    """The chart with its words and lines in readable colours. Streamlit's own colours are too faint
    for small text."""
    words = _SOFT_TEXT[theme]
    lines = _GRID[theme]
    return (
        drawn.configure_axis(
            labelColor=words, titleColor=words, gridColor=lines, domainColor=lines, tickColor=lines
        )
        # A label within 40 pixels of the axis' end is aligned with that end, so that it is not
        # clipped. 40 pixels are half of the widest label.
        .configure_axisX(labelFlush=40)
        .configure_legend(labelColor=words, titleColor=words, symbolBaseStrokeColor=words)
    )


def moment(since_ms: int, until_ms: int, *, has_ends: bool = True) -> alt.X:
    """A time axis in UTC that spans the whole range, whatever the browser's time zone is.

    For a chart of lines Vega draws no axis whose ends are set. Such a chart sets `has_ends` to
    false, and has the layer `ends`.
    """
    days = (until_ms - since_ms) / 86_400_000
    # A range of a day begins and ends at the same time of day, so its labels name the day too.
    forms = {0.01: "%H:%M:%S", 0.9: "%H:%M", 5: "%d %b %H:%M", 300: "%d %b"}
    form = next((form for most, form in forms.items() if days <= most), "%b %Y")
    axis = alt.Axis(grid=False, tickCount=6, format=form, labelOverlap=True, title="Time (UTC)")
    domain = [since_ms, until_ms] if has_ends else alt.Undefined
    return alt.X("start:T", axis=axis, scale=alt.Scale(type="utc", domain=domain, nice=False))


LEAST_SHOWN = 0.1
"""The least share of a range that a chart over time spans."""


def first_shown(
    starts: Iterable[int], since_ms: int, until_ms: int, least_ms: int | None = None
) -> int:
    """When a chart over time begins, in milliseconds.

    It begins with the range. If most of the range lies before the first interval with something to
    show, the chart begins with that interval.

    `starts` are the beginnings of the intervals that have something to show. The chart spans at
    least `least_ms`, or at least `LEAST_SHOWN` of the range if that is None.
    """
    span = until_ms - since_ms
    first = min(starts, default=since_ms)
    if 2 * (first - since_ms) <= span:
        return since_ms
    least = int(LEAST_SHOWN * span) if least_ms is None else min(least_ms, span)
    return min(first, until_ms - least)


def ends(since_ms: int, until_ms: int) -> alt.Chart:
    """An invisible layer that makes a time axis span the whole range."""
    rows = [
        {"start": datetime.fromtimestamp(moment_ms / 1000, UTC)}
        for moment_ms in (since_ms, until_ms)
    ]
    drawn: alt.Chart = alt.Chart(frame(rows)).mark_point(opacity=0).encode(x="start:T")
    return drawn


def amounts(unit: str = "", *, whole: bool = False) -> alt.Axis:
    """A linear axis with labels such as 0.05, 500 and 20k. Vega's own labels would be $300m for 30
    cents. With `whole` only whole numbers have labels."""
    small = f"{unit},.4~r"
    large = f"{unit}~s"
    expression = f"format(datum.value, abs(datum.value) < 1000 ? '{small}' : '{large}')"
    expression = f"datum.value == 0 ? '{unit}0' : {expression}"
    return alt.Axis(labelExpr=expression, tickCount=5, tickMinStep=1 if whole else alt.Undefined)


def decades(channel: type[X], field: str, title: str) -> X:
    """A logarithmic axis with 1 and 3 of each power of ten."""
    ticks = [round(10.0**power * step, 12) for power in range(-6, 9) for step in (1, 3)]
    expression = "format(datum.value, datum.value < 1000 ? '~r' : '~s')"
    axis = alt.Axis(values=ticks, labelExpr=expression)
    return channel(field, title=title, scale=alt.Scale(type="log"), axis=axis)


def per_bucket(bucket_seconds: int) -> str:
    """The interval of one bar in words, such as per minute, per 5 minutes or per hour."""
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if bucket_seconds >= size:
            count = bucket_seconds // size
            return f"per {unit}" if count == 1 else f"per {count} {unit}s"
    return "per second" if bucket_seconds == 1 else f"per {bucket_seconds} seconds"


def stacked(row: Row, amounts: Mapping[str, float], unit: str = "") -> list[Row]:
    """A row for each class of one interval. The amounts stand one above the other. `row` has the
    columns that say when the interval is."""
    rows: list[Row] = []
    top = 0.0
    for name, amount in amounts.items():
        bottom = top
        top += amount
        rows.append(
            {
                **row,
                "class": name,
                "amount": amount,
                "bottom": bottom,
                "top": top,
                "words": f"{amount:,}{unit}",
            }
        )
    return rows


def bars_over_time(
    rows: Rows, colours: Palette, *, title: str, x: alt.X, unit: str = "", height: int
) -> alt.Chart:
    """Rectangles from `bottom` to `top`, one for each interval and class. An interval without an
    amount is a gap.

    Rows have `start`, `end`, `class`, `bottom`, `top`, `words` (the amount in words) and `part`: a
    note on an interval that the range cuts. Such an interval is drawn paler, because its amounts
    are only those of a part. `unit` is `$` for money, and empty for counts.
    """
    drawn: alt.Chart = (
        # A rectangle of no height is no mark.
        alt.Chart(frame([row for row in rows if row["top"] != row["bottom"]]))
        .mark_rect(strokeWidth=0)
        .encode(
            x=x,
            x2=alt.X2("end:T"),
            y=alt.Y("bottom:Q", title=title, scale=ZERO, axis=amounts(unit, whole=not unit)),
            y2=alt.Y2("top:Q"),
            color=colour("class:N", colours, 2 if len(colours) > 2 else 0, sort=None),
            opacity=alt.condition("datum.part != ''", alt.value(0.55), alt.value(1)),
            tooltip=[FROM, *tips("class:N=Class", "words:N=Amount", "part:N=Note")],
        )
        .properties(height=height)
    )
    return drawn
