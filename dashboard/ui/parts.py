"""The parts of a page: headings, cards with definitions, charts with words, tables with CSV.

Text from outside (names of workspaces, engines, models) goes into tables, chart labels, options and
`st.text` only. Streamlit reads labels, captions and metrics as Markdown.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pandas as pd  # type: ignore[import-untyped]
import streamlit as st

from dashboard.admin.shapes.about import Definition
from dashboard.charts.style import styled
from dashboard.settings import settings
from dashboard.ui import first_request, formats, viewer
from dashboard.ui.advice import ADVICE, reason_of

MAX_REASON = 32
# Of a share in a table: 0.325 is written as 32.5 %.
SHARE_DIGITS = 3
# A spreadsheet takes a cell that begins like this for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def title(text: str, question: str) -> None:
    """A page's heading, and the question that it answers."""
    st.title(text, anchor=False)
    st.caption(question)


def heading(text: str, number: str | None = None) -> None:
    """A section's heading, with the definition of the number that it is about."""
    st.subheader(text, anchor=False, help=None if number is None else meaning(number))


def definition(number: str) -> Definition:
    """What the gateway says that a number is."""
    session = viewer.session()
    known = session.about.definitions.get(number) if session else None
    return known or Definition(title=number.replace("_", " ").capitalize(), formula="", unit="")


def meaning(number: str) -> str | None:
    """The tooltip: formula and unit, as the gateway defines them."""
    found = definition(number)
    return f"`{found.formula}`\n\nUnit: {found.unit}" if found.formula else None


def card(
    number: str,
    value: str,
    *,
    label: str | None = None,
    trend: Sequence[float] | None = None,
    chart: Literal["line", "bar", "area"] = "line",
    delta: str | None = None,
    is_good: bool | None = None,
    is_loss: bool = False,
) -> None:
    """A number with its definition. `delta` compares it; `is_good` makes that green or red."""
    colour: Literal["green", "red", "off"] = "off"
    if is_good is not None:
        colour = "green" if is_good else "red"
    st.metric(
        label or definition(number).title,
        f":red[{value}]" if is_loss else value,
        delta,
        delta_color=colour,
        delta_arrow="off",
        help=meaning(number),
        border=True,
        height="stretch",
        # A line needs two points.
        chart_data=list(trend) if trend is not None and len(trend) > 1 else None,
        chart_type=chart,
    )


def chart(drawn: Any, key: str, alt_text: str) -> None:
    """`alt_text` is what a screen reader says: the finding, with its numbers."""
    st.altair_chart(styled(drawn, viewer.theme()), key=key, alt=alt_text)


def empty(text: str, icon: str = ":material/hourglass_empty:", *, key: str | None = None) -> None:
    """Say that there is nothing to show yet, and how that changes.

    With a `key`, unique on its page, it shows the request that fills the page.
    """
    st.info(text, icon=icon)
    session = viewer.session()
    if key is None or session is None or session.about.sample:
        return
    with st.container(key=f"first_{key}"):
        st.caption("This request fills it. The second run reads what the first one wrote:")
        model = next(iter(viewer.about(session).served), first_request.MODEL)
        command = first_request.curl(settings().gateway_url, model)
        st.code(command, language=None, wrap_lines=True)


def no_engine(text: str, key: str) -> None:
    """Say that no engine answers, and how one is started."""
    st.info(text, icon=":material/dns:")
    with st.container(key=f"start_{key}"):
        st.caption("This starts a gateway, an engine with a small model, and this dashboard:")
        st.code(first_request.START, language=None)


def hero(sentence: str) -> None:
    """The page's answer in plain words, above its numbers. Takes no text from outside."""
    with st.container(key="hero"):
        st.markdown(sentence)


def placeholder_prices() -> None:
    """A badge that money is counted at a price which is nobody's."""
    session = viewer.session()
    if session is not None and session.about.has_placeholder_prices:
        st.badge(
            "Placeholder prices",
            icon=":material/sell:",
            color="orange",
            help="No prices were given, so money counts the shipped reference price: $1 for a"
            " million tokens. Set HOLDFAST_PRICES to a file with your own.",
        )


def table(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    *,
    alt_text: str,
    columns: Mapping[str, Any] | None = None,
    height: int | Literal["auto", "content"] = "auto",
    picked: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """A table, and below it its CSV. `picked` gets the row that is clicked, before the next run."""

    def pick() -> None:
        numbers = st.session_state[key]["selection"]["rows"]
        if picked is not None and numbers and numbers[0] < len(rows):
            picked(rows[numbers[0]])

    options: dict[str, Any] = {"on_select": pick, "selection_mode": "single-row"}
    frame = pd.DataFrame(list(rows))
    for name, written in (columns or {}).items():
        if written == share_column() and name in frame and frame[name].notna().any():
            frame[name] = frame[name].astype(float).round(SHARE_DIGITS)
    st.dataframe(
        frame,
        hide_index=True,
        key=key,
        height=height,
        placeholder=formats.NO_VALUE,
        column_config={**_counts(rows), **(columns or {})},
        alt=alt_text,
        **(options if picked else {}),
    )
    download(rows, key)


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whole numbers in groups of thousands, as the reader's language writes them."""
    written = st.column_config.NumberColumn(format="localized")
    names = rows[0] if rows else ()
    return {name: written for name in names if any(type(row[name]) is int for row in rows)}


def download(rows: Sequence[Mapping[str, Any]], key: str) -> None:
    st.download_button(
        "CSV",
        lambda: as_csv(rows),
        file_name=f"holdfast-{key}.csv",
        mime="text/csv",
        key=f"csv_{key}",
        icon=":material/download:",
        on_click="ignore",
        type="tertiary",
    )


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A cell that begins like a formula gets an apostrophe."""
    written = io.StringIO()
    if rows:
        writer = csv.DictWriter(written, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([{name: _plain(value) for name, value in row.items()} for row in rows])
    return written.getvalue()


def _plain(value: Any) -> Any:
    is_formula = isinstance(value, str) and value.startswith(_FORMULA)
    return f"'{value}" if is_formula else value


def reason_filter(unset: str) -> None:
    """A choice of miss reasons in plain words; the words stand in the URL as `reason`."""
    options = ["", *(advice.title for advice in ADVICE.values())]
    linked = st.query_params.get("reason", "")
    if linked not in options and len(linked) <= MAX_REASON:
        options.append(linked)
    st.selectbox(
        "Missed because",
        options,
        format_func=lambda option: option or unset,
        key="reason",
        width=290,
        bind="query-params",
    )


def chosen_reason() -> str | None:
    """The reason of the filter, as the ledger has it; None for any."""
    title = st.session_state.get("reason") or ""
    return reason_of(title) if title else None


def share_column() -> Any:
    """A share from 0 to 1 as a bar and a percentage."""
    return st.column_config.ProgressColumn(format="percent", min_value=0, max_value=1)


def turn_columns() -> dict[str, Any]:
    """How a table of requests writes its columns."""
    number = st.column_config.NumberColumn
    return {
        "Time (UTC)": st.column_config.DatetimeColumn(format="D MMM HH:mm:ss"),
        "First token (s)": number(format="%.2f"),
        "Duration (s)": number(format="%.2f"),
        "Cost ($)": number(format="%.6f"),
        "Net saved ($)": number(format="%.6f"),
    }


def moment_column() -> Any:
    """A moment in UTC, as the column's title says."""
    return st.column_config.DatetimeColumn(format="D MMM HH:mm:ss")


def money_column() -> Any:
    """Dollars with enough digits for small amounts. The column's title has the unit."""
    return st.column_config.NumberColumn(format="%.4f")
