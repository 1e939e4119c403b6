"""The advice of the last seven days: a few sentences, each with the page that shows the same.

The gateway may compute it for seconds, so a thread asks for it. The page never waits: it shows what
has come, and looks again every few seconds whether there is more.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlencode

import streamlit as st

from dashboard.admin.client import PATIENT_TIMEOUT, AdminClient, ClientError, KeyRefused
from dashboard.admin.shapes.advice import AdviceSummary, SummaryLine
from dashboard.ui import filters, formats, parts, viewer

PATH = "/admin/v1/advice/summary"
ASK_AGAIN_SECONDS = 900.0
_RETRY_SECONDS = 60.0
_LOOK_SECONDS = 3
_NUM_THREADS = 4
_STATE = "week"
_RANGE = "7d"
_PAGES = {"advice": "Advice", "savings": "Savings"}


@dataclass(slots=True)
class _Week:
    """What is known of one workspace (None is all), as one client asked for it."""

    client: AdminClient
    workspace: str | None
    coming: Future[AdviceSummary] | None = None
    seen: AdviceSummary | None = None
    problem: str | None = None
    due: float = 0.0

    def look(self, now: float) -> None:
        """Take what has come, and ask when it is time; `now` is in seconds."""
        if self.coming is not None and self.coming.done():
            try:
                self.seen, self.problem = self.coming.result(), None
                self.due = now + ASK_AGAIN_SECONDS
            except ClientError as error:
                # A key that has ended shows nothing, not even its last lines.
                self.seen = None if isinstance(error, KeyRefused) else self.seen
                self.problem = str(error)
                self.due = now + _RETRY_SECONDS
            self.coming = None
        if self.coming is None and now >= self.due:
            params = {"workspace": self.workspace}
            self.coming = _threads().submit(
                self.client.get, PATH, AdviceSummary, params, 0.0, PATIENT_TIMEOUT
            )


@st.cache_resource
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, "week")


def show() -> None:
    st.fragment(_refresh, run_every=_LOOK_SECONDS, key="week")()


def _refresh() -> None:
    session = viewer.session()
    if session is None:
        return
    parts.heading("Advice of the last 7 days")
    # It is not of the range above, but of the workspace.
    workspace = filters.chosen().workspace
    week: _Week | None = st.session_state.get(_STATE)
    if week is None or week.client is not session.client or week.workspace != workspace:
        week = st.session_state[_STATE] = _Week(session.client, workspace)
    week.look(time.monotonic())
    with st.container(key="week_body"):
        if week.seen is not None:
            _draw(week.seen)
        elif week.problem is not None:
            parts.empty(f"There is no advice now. {week.problem}", ":material/cloud_off:")
        else:
            st.skeleton(height=120)


def _draw(summary: AdviceSummary) -> None:
    if not summary.lines:
        icon = ":material/check_circle:" if summary.num_turns else ":material/hourglass_empty:"
        parts.empty(summary.text, icon)
        return
    for number, line in enumerate(summary.lines):
        _draw_line(number, line)
    more = f" {summary.num_more:,} smaller ones are not shown." if summary.num_more else ""
    st.caption(summary.text + more)


def _draw_line(number: int, line: SummaryLine) -> None:
    """A sentence has names from outside, so it is plain text."""
    said, leads = st.columns([6, 1], vertical_alignment="center")
    worth = "" if line.nano is None else f" Worth {formats.dollars(line.nano)}."
    said.text(line.text + worth)
    page = line.page if line.page in _PAGES else "advice"
    with leads:
        # A new tab takes its filters from the URL. This one would keep those that are set.
        st.link_button(
            _PAGES[page],
            address_of(page, line),
            icon=":material/open_in_new:",
            type="tertiary",
            key=f"week_{number}",
        )


def address_of(page: str, line: SummaryLine) -> str:
    """The page with the line's filters, beside the Overview."""
    wanted = {"range": _RANGE, "workspace": line.workspace, "model": line.model}
    return f"{page}?{urlencode({name: each for name, each in wanted.items() if each})}"
