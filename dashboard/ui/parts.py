"""The parts of a page: headings, cards with definitions, charts with words, tables with CSV.

Streamlit reads labels, captions and metrics as Markdown. So text from outside (names of workspaces,
engines and models) goes into tables, chart labels, options and `st.text` only.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import quote, urlencode

import streamlit as st

from dashboard.client import ClientError, Refused
from dashboard.settings import settings
from dashboard.ui import charts, filters, formats, viewer
from dashboard.ui.charts import Row, Rows
from gateway.structs.fleet import Definition, ListedModel
from gateway.structs.usage import Savings

NUM_ROWS_SHOWN = 10
"""A table with more rows is scrolled."""
START = "scripts/run"
HOURGLASS = ":material/hourglass_empty:"
_CHARACTER_WIDTH = 6
_CELL_PADDING = 28
_WIDEST_TEXT = 460
# A spreadsheet takes a cell that begins like this for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
# Columns of shares from 0 to 1. Each cell has a bar and a percentage: 0.325 is written as 32.5 %.
_SHARES = {"Hit rate", "Pool in use", "Foreign", "Of the limit", "Of the prompt", "Share"}
_SHARES |= {"Reused", "Promise kept", "Share best effort"}
_SHARE_DIGITS = 3
# Ids of workspaces and models that Markdown leaves as they are. Markdown would make a link of one
# that begins with www.
_PLAIN = re.compile(r"(?!www\.)[A-Za-z0-9][A-Za-z0-9._/-]*")
APPROXIMATE = "Approximate"
"""The column that names the approximation behind which a turn was computed. Its cells stand out."""
_STANDS_OUT = "background-color: #f59e0b55"
_GREEN = "background-color: #16a34a40"
_RED = "background-color: #dc262660"
STATE = "State"
"""The column of the state of an engine, a store or a lease."""
_STATES = {
    "ready": _GREEN,
    "on": _GREEN,
    "starting": "background-color: #3b82f640",
    "draining": "background-color: #3b82f640",
    "unsure": _RED,
    "down": _RED,
    "refused": _RED,
    "not known": _RED,
    "off": _STANDS_OUT,
    "can't be written": _RED,
}
# Columns of requests' ids. Each id leads to its request.
_IDS = {"Id", "Last request", "Request id"}
READS_PER_WRITE = "Tokens read per token written"
REQUESTS_OF = "Its requests"
"""The column of links to the requests of a row."""


def title(text: str, question: str) -> None:
    """A page's heading, and the question that the page answers."""
    st.title(text, anchor=False)
    st.caption(question)


def heading(text: str, number: str | None = None) -> None:
    """A section's heading. If the section is about a number, the tooltip is its definition."""
    st.subheader(text, anchor=False, help=None if number is None else meaning(number))


def definition(number: str) -> Definition:
    """The gateway's definition of a number."""
    entry = viewer.session().about.definitions.get(number)
    return entry or Definition(title=number.replace("_", " ").capitalize(), formula="", unit="")


def meaning(number: str) -> str | None:
    """The tooltip of a number: its formula and its unit, as the gateway defines them."""
    entry = definition(number)
    return f"`{entry.formula}`\n\nUnit: {entry.unit}" if entry.formula else None


def card(
    number: str,
    value: str,
    *,
    label: str | None = None,
    note: str | None = None,
    trend: Sequence[float] | None = None,
    chart: Literal["line", "bar", "area"] = "line",
    delta: str | None = None,
    is_good: bool | None = None,
    is_loss: bool = False,
) -> None:
    """A number with a tooltip. The tooltip is `note`, or else the gateway's definition.

    `delta` stands beside the number. `is_good` makes `delta` green if true, and red if false.
    `is_loss` makes the number red.
    """
    colour: Literal["green", "red", "off"] = "off"
    if is_good is not None:
        colour = "green" if is_good else "red"
    st.metric(
        label or definition(number).title,
        f":red[{value}]" if is_loss else value,
        delta,
        delta_color=colour,
        delta_arrow="off",
        help=note or meaning(number),
        border=True,
        height="stretch",
        # A line needs two points.
        chart_data=list(trend) if trend is not None and len(trend) > 1 else None,
        chart_type=chart,
    )


def money_card(number: str, nano: int | None, label: str | None = None, **options: Any) -> None:
    """A card of an amount of money. A loss is red."""
    is_loss = nano is not None and nano < 0
    card(number, formats.dollars(nano), label=label, is_loss=is_loss, **options)


def time_spared(savings: Savings) -> str | None:
    """The time of the prefill that reads avoided, in words. None: no engine's time for a token is
    known.

    The time is called GPU time only if all of it is time of GPUs.
    """
    seconds = savings.prefill_seconds_avoided
    if seconds is None:
        return None
    timed = [avoided for avoided in savings.avoided if avoided.prefill_seconds is not None]
    is_gpu = all(avoided.gpu_hours is not None for avoided in timed)
    return f"{formats.seconds(seconds)} of {'GPU time' if is_gpu else 'prefill'}"


def tokens_spared(savings: Savings) -> str:
    """The tokens whose prefill was avoided, and how many of them have no known time."""
    text = f"{formats.compact(savings.prefill_tokens_avoided)} tokens read"
    if savings.unmeasured_tokens:
        text += f", {formats.compact(savings.unmeasured_tokens)} of them not timed"
    return text


def chart(drawn: Any, key: str, alt_text: str) -> None:
    """Draw a chart. A screen reader says `alt_text`: what the chart shows, with its numbers."""
    st.altair_chart(charts.styled(drawn, viewer.theme()), key=key, alt=alt_text)


def empty(text: str, icon: str = HOURGLASS, *, key: str | None = None) -> None:
    """Say that there is nothing to show yet, and how that changes.

    With a `key`, which is unique on its page, this also shows a command. The command sends requests
    that give the place something to show. There is no command if no request can do that.
    """
    st.info(text, icon=icon)
    session = viewer.session()
    if key is None or session.about.sample:
        return
    model = filters.request_for(viewer.about(session))
    if model is None:
        return
    with st.container(key=f"first_{key}"):
        command = "this command"
        if filters.chosen().workspace:
            command += " with a key of the chosen workspace"
        st.caption(
            f"To see numbers here, run {command}. It sends a marked prompt twice: the second"
            " request reads what the first one wrote."
        )
        st.code(first_request(settings().gateway_url, model), language=None, wrap_lines=True)


def first_request(gateway_url: str, model: str) -> str:
    """A shell command that sends a marked prompt twice. The prompt is long enough to be cached.

    The command takes the key from the variable HOLDFAST_API_KEY, so that no shell's history has it.
    """
    block = {"type": "text", "text": "$BOOK", "cache_control": {"type": "ephemeral"}}
    question = {"role": "user", "content": "What is a lease?"}
    body = {"model": model, "max_tokens": 32, "system": [block], "messages": [question]}
    data = json.dumps(body).replace('"', '\\"')
    return (
        "BOOK=$(printf 'A lease holds a marked prefix until its time is over. %.0s' $(seq 150))\n"
        f"for turn in 1 2; do curl -s {gateway_url}/v1/messages \\\n"
        '  -H "x-api-key: $HOLDFAST_API_KEY" -H "anthropic-version: 2023-06-01" \\\n'
        '  -H "content-type: application/json" \\\n'
        f'  -d "{data}"; echo; done'
    )


def no_engine(text: str, key: str) -> None:
    """Say that no engine answers, and how one is started."""
    st.info(text, icon=":material/dns:")
    with st.container(key=f"start_{key}"):
        st.caption("This starts a gateway, an engine with a small model, and this dashboard:")
        st.code(START, language=None)


def unseen_images(num_images: int, model: str | None, listed: Sequence[ListedModel]) -> None:
    """Warn that a request's model will not see its images. A `model` that is not listed counts as
    one that sees them if any listed model does."""
    seeing_ids = {entry.id for entry in listed if entry.sees}
    ids = {entry.id for entry in listed}
    may_see = model in seeing_ids if model in ids else bool(seeing_ids)
    if not num_images or may_see:
        return
    images = formats.counted(num_images, "image")
    pronoun = "it" if num_images == 1 else "them"
    st.warning(
        f"{images} in this request: this model will not see {pronoun}. A placeholder stands there,"
        " or the gateway refuses the request (HOLDFAST_UNREADABLE).",
        icon=":material/hide_image:",
    )


def problem(what: str, text: str, icon: str = ":material/block:") -> None:
    """Show an error. `text` comes from the gateway or from a reader, so it is plain text."""
    st.error(what, icon=icon)
    st.text(text)


@contextmanager
def problems_told() -> Iterator[None]:
    """Show an error in place of an answer that the gateway did not give."""
    try:
        yield
    except Refused as error:
        problem("The gateway refuses that:", str(error))
    except ClientError as error:
        st.error(str(error), icon=":material/cloud_off:")


def hero(sentence: str) -> None:
    """The page's answer in plain words, above its numbers. It is Markdown, so it has no text from
    outside."""
    with st.container(key="hero"):
        st.markdown(sentence)


def plain(name: str | None) -> str | None:
    """The name if it can stand where Streamlit reads Markdown. None if Markdown could change it."""
    return name if name is not None and _PLAIN.fullmatch(name) else None


def placeholder_prices() -> None:
    """A badge that says that money is counted at the shipped reference price."""
    if viewer.session().about.has_placeholder_prices:
        st.badge(
            "Placeholder prices",
            icon=":material/sell:",
            color="orange",
            help="No prices were given, so money counts the shipped reference price: $1 for a"
            " million tokens. Set HOLDFAST_PRICES to a file with your own.",
        )


def table(
    rows: Rows,
    key: str,
    alt_text: str,
    *,
    height: int | Literal["auto", "content"] | None = None,
    hidden: Collection[str] = (),
    wide: Collection[str] = (),
    on_pick: Callable[[Row], None] | None = None,
) -> None:
    """A table, and a button below it for its CSV.

    The end of a column's title says how its values are written: `($)`, `(UTC)`, `(s)`. A column
    without any value is in the CSV only. A column of money always stays, because its dashes say
    that the money is not known. `on_pick` gets the row that a reader clicks, before the next run.
    """

    def pick() -> None:
        numbers = st.session_state[key]["selection"]["rows"]
        if on_pick is not None and numbers and numbers[0] < len(rows):
            on_pick(rows[numbers[0]])

    options: dict[str, Any] = {"on_select": pick, "selection_mode": "single-row"}
    drawn = charts.frame(rows)
    for name in _SHARES & set(drawn):
        if drawn[name].notna().any():
            drawn[name] = drawn[name].astype(float).round(_SHARE_DIGITS)
    for name in _IDS & set(drawn):
        drawn[name] = [row[name] and f"requests?request={quote(row[name])}" for row in rows]
    columns = {name: _column(name, rows) for name in (rows[0] if rows else ())}
    if APPROXIMATE in drawn:
        drawn = drawn.style.map(lambda value: value and _STANDS_OUT, subset=[APPROXIMATE])
    elif STATE in drawn:
        drawn = drawn.style.map(_state_colour, subset=[STATE])
    columns |= dict.fromkeys([*hidden, *without_value(rows)])
    columns |= {name: st.column_config.TextColumn(width="large") for name in wide}
    st.dataframe(
        drawn,
        hide_index=True,
        key=key,
        height=height or ("auto" if len(rows) <= NUM_ROWS_SHOWN else 420),
        placeholder=formats.NO_VALUE,
        column_config=columns,
        alt=alt_text,
        **(options if on_pick else {}),
    )
    as_download(rows, key)


def section(
    text: str,
    rows: Rows,
    key: str,
    alt_text: str,
    *,
    number: str | None = None,
    none: str | None = None,
    icon: str = HOURGLASS,
    **options: Any,
) -> None:
    """A heading and its table. If there is no row, the text `none` stands below the heading. If
    there is no `none` either, nothing is drawn."""
    if rows or none:
        heading(text, number)
    if rows:
        table(rows, key, alt_text, **options)
    elif none:
        empty(none, icon)


def _state_colour(state: object) -> str:
    """The colour of a state. Only the beginning of the state decides: a reason may follow."""
    if not isinstance(state, str):
        return ""
    return next((colour for name, colour in _STATES.items() if state.startswith(name)), "")


def as_download(rows: Rows, key: str) -> None:
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


def without_value(rows: Rows) -> list[str]:
    """The columns without a value in any row. The first column and columns of money never count."""
    names = list(rows[0])[1:] if rows else []
    return [
        name
        for name in names
        if not name.endswith("($)") and all(row.get(name) in (None, "") for row in rows)
    ]


def text_width(name: str, rows: Rows) -> int | None:
    """The width of a column in pixels; None leaves it to the grid. The grid looks at the first
    rows only, so a column needs a width if its longest text is in a later row."""
    lengths = [len(row[name]) for row in rows if isinstance(row[name], str)]
    longest = max(lengths, default=0)
    if longest <= max(lengths[:NUM_ROWS_SHOWN], default=0):
        return None
    return min(_CELL_PADDING + _CHARACTER_WIDTH * longest, _WIDEST_TEXT)


def _column(name: str, rows: Rows) -> Any:
    columns = st.column_config
    if name == "TTL left":
        return columns.ProgressColumn(format=" ", min_value=0, max_value=1, width="small")
    if name in _IDS:
        return columns.LinkColumn(display_text="request=(.*)")
    if name == REQUESTS_OF:
        return columns.LinkColumn(display_text="see")
    if name in _SHARES:
        return columns.ProgressColumn(format="percent", min_value=0, max_value=1)
    if name.endswith("(UTC)"):
        return columns.DatetimeColumn(format="D MMM HH:mm:ss", timezone="UTC")
    if name.endswith("($)"):
        # Small amounts have enough digits, and no amount ends with zeros that say nothing.
        return columns.NumberColumn(format="%.6g")
    if name.endswith("(s)") or name == READS_PER_WRITE:
        return columns.NumberColumn(format="%.4g")
    if name.endswith("MiB"):
        return columns.NumberColumn(format="%.1f")
    # The digits of whole numbers are grouped as the reader's language groups them.
    if any(type(row[name]) is int for row in rows):
        return columns.NumberColumn(format="localized")
    return columns.Column(width=text_width(name, rows))


def as_csv(rows: Rows) -> str:
    """The rows as CSV. A cell that begins like a formula gets an apostrophe before it."""
    file = io.StringIO()
    if rows:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            texts = {name: value for name, value in row.items() if isinstance(value, str)}
            unsafe = (name for name, text in texts.items() if text.startswith(_FORMULA))
            writer.writerow({**row, **{name: f"'{texts[name]}" for name in unsafe}})
    return file.getvalue()


def requests_of(prefix: str | None, workspace: str | None) -> str | None:
    """The address of the page with all requests of a prefix; None if no request ended with it."""
    if prefix is None or workspace is None:
        return None
    query = {"range": filters.LONGEST_RANGE, "workspace": workspace, "prefix": prefix}
    return f"requests?{urlencode(query)}"


def request_links(ids: Sequence[str]) -> None:
    """Draw a link to each request. The ids are the ledger's own, so they are plain text."""
    with st.container(horizontal=True):
        for turn_id in ids:
            st.page_link("views/requests.py", label=turn_id, query_params={"request": turn_id})


def in_dollars(nano: int | None) -> float | None:
    """An amount of nano-dollars in dollars."""
    return None if nano is None else nano / formats.NANO
