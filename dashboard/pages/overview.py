"""The Overview page: what the cache saves right now, and what holds the engines' memory.

Text that came from outside (URLs, model names) is shown in table cells, chart labels and `st.text`
only: everything else would read it as Markdown.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import streamlit as st
from pydantic import ValidationError

from dashboard import charts, formats, frames
from dashboard.client import AdminClient, ClientError, Engine, Overview, Totals
from dashboard.settings import Settings

REFRESH = "5s"
RANGES = {"15 min": 900, "1 hour": 3600, "6 hours": 21_600, "24 hours": 86_400}
DEFAULT_RANGE = "1 hour"
HIT_RATE_HELP = (
    "Tokens read from the cache ÷ all prompt tokens (uncached + written + read)."
    " Output is not in it."
)
SAVED_HELP = (
    "The same traffic without a cache, less what it cost. Writing costs more than plain input,"
    " so this is negative until prefixes are read. Models without a price are left out."
)
REQUESTS_HELP = "Turns opened in this range, failed ones included."
READ_HELP = "Prompt tokens whose KV was reused from memory, of all prompt tokens."


@dataclass(frozen=True, slots=True)
class View:
    """One answer of the admin API and when it came."""

    seconds: int
    overview: Overview
    engines: list[Engine]
    at: datetime


def theme() -> charts.Theme:
    return "dark" if st.context.theme.type == "dark" else "light"


def open_client() -> AdminClient:
    """Open one client per session; settings that do not parse end the page with the reason."""
    if "client" not in st.session_state:
        settings = Settings.model_validate({})
        key = settings.admin_key.get_secret_value()
        st.session_state.client = AdminClient(settings.gateway_url, key)
    client: AdminClient = st.session_state.client
    return client


def fetch(client: AdminClient, seconds: int) -> tuple[View | None, str | None]:
    """Ask for a new view; when that fails, the last one stands and the reason comes along."""
    last: View | None = st.session_state.get("view")
    if last is not None and last.seconds != seconds:
        last = None
    try:
        view = View(seconds, client.overview(seconds), client.engines(), datetime.now(UTC))
    except ClientError as error:
        return last, str(error)
    st.session_state.view = view
    return view, None


def draw_status(view: View | None, problem: str | None) -> None:
    """Draw the line below the title: always there, so that trouble moves nothing."""
    if problem is None and view is not None:
        ready = sum(engine.status == "ready" for engine in view.engines)
        text = f"Updated {view.at:%H:%M:%S} UTC · {ready} of {len(view.engines)} engines ready"
        st.caption(text)
    elif view is not None:
        st.warning(f"{problem} Showing what was known at {view.at:%H:%M:%S} UTC.", icon="⚠️")
    else:
        st.error(f"{problem} Trying again every {REFRESH.removesuffix('s')} seconds.", icon="🔌")


def metric(label: str, value: str, trend: list[Any], **options: Any) -> None:
    # A line through fewer than two points is none.
    chart = trend if len(trend) > 1 else None
    st.metric(label, value, border=True, height="stretch", chart_data=chart, **options)


def draw_totals(totals: Totals, overview: Overview) -> None:
    series = overview.series
    saved = overview.net_saved_nano
    with st.grid(4, min_column_width=210, row_height=158):
        metric(
            "Token hit rate",
            formats.percent(overview.rates.token_hit_rate),
            frames.hit_rates(series),
            help=HIT_RATE_HELP,
            chart_type="area",
            delta="read ÷ prompt tokens",
            delta_color="primary",
            delta_arrow="off",
        )
        metric(
            "Net saved",
            f":red[{formats.dollars(saved)}]" if saved and saved < 0 else formats.dollars(saved),
            frames.running_savings(series),
            help=SAVED_HELP,
            delta=f"of {formats.dollars(totals.cost_without_cache_nano)} without a cache",
            delta_color="primary",
            delta_arrow="off",
        )
        metric(
            "Requests",
            formats.compact(totals.requests),
            frames.request_counts(series),
            help=REQUESTS_HELP,
            chart_type="bar",
            delta=f"{totals.errors} failed",
            delta_color="off",
            delta_arrow="off",
        )
        metric(
            "Read from cache",
            formats.compact(totals.cache_read_tokens),
            frames.read_counts(series),
            help=READ_HELP,
            chart_type="bar",
            delta=f"of {formats.compact(totals.prompt_tokens)} prompt tokens",
            delta_color="primary",
            delta_arrow="off",
        )


def draw_tokens(overview: Overview) -> None:
    st.subheader("Prompt tokens by class")
    if not overview.totals.requests:
        st.info("No requests in this range. The first one appears here within seconds.", icon="🌊")
        return
    st.altair_chart(
        charts.tokens_over_time(
            frames.tokens_by_class(overview.series, overview.bucket_seconds),
            overview.bucket_seconds,
            theme(),
        ),
        key="tokens",
        alt="Prompt tokens over time, stacked by class: read, written, uncached",
    )


def draw_pool(engines: list[Engine]) -> None:
    st.subheader("KV blocks by what holds them")
    answering = [engine for engine in engines if engine.blocks is not None]
    if answering:
        st.altair_chart(
            charts.pool_by_state(frames.blocks_by_state(answering), len(answering), theme()),
            key="pool",
            alt="Share of each engine's blocks that is active, leased, best effort, cached or free",
        )
    else:
        st.info("No engine reports its memory. Is one running?", icon="🧱")
    if engines:
        st.dataframe(frames.engine_table(engines), hide_index=True, key="engines", placeholder="–")


@st.fragment(run_every=REFRESH)
def live(client: AdminClient, seconds: int) -> None:
    status = st.container()
    body = st.container()
    if "view" not in st.session_state:
        with body:
            waiting = st.skeleton(height=420)
            view, problem = fetch(client, seconds)
            waiting.empty()
    else:
        view, problem = fetch(client, seconds)
    with status:
        draw_status(view, problem)
    if view is not None:
        with body:
            draw_totals(view.overview.totals, view.overview)
            draw_tokens(view.overview)
            draw_pool(view.engines)


def page() -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.title("Overview", anchor=False)
        chosen = st.segmented_control(
            "Range",
            list(RANGES),
            default=DEFAULT_RANGE,
            key="range",
            label_visibility="collapsed",
            width="content",
            bind="query-params",
        )
    try:
        client = open_client()
    except ValidationError as error:
        st.error("The dashboard's settings are wrong:", icon="🔧")
        for problem in error.errors(include_url=False, include_input=False):
            st.text(f"DASHBOARD_{str(problem['loc'][0]).upper()}: {problem['msg']}")
        return
    live(client, RANGES[chosen or DEFAULT_RANGE])


page()
