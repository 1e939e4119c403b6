"""A page that refreshes itself: it reads, draws, and says from when its numbers are.

While the gateway does not answer, the last numbers stay with their time. Refreshing moves nothing:
the same elements are drawn in the same order, and the status line is always there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

import streamlit as st

from dashboard.client import AdminClient, ClientError, KeyEnded, KeyRefused
from dashboard.ui import filters, viewer
from dashboard.ui.filters import Selection

View = TypeVar("View")


@dataclass(frozen=True, slots=True)
class Seen(Generic[View]):
    """An answer, with the question, the client that asked it, and the time when it came."""

    client: AdminClient
    selection: Selection
    view: View
    at: datetime


def show(
    name: str,
    read: Callable[[AdminClient, Selection], View],
    draw: Callable[[View, Selection], None],
    *,
    controls: Callable[[], None] | None = None,
    refresh_seconds: int | None = None,
) -> None:
    """Draw the part of a page that refreshes itself.

    `read` asks the admin API and raises ClientError; `draw` gets its result. `controls` draws
    widgets that do not depend on the answer. `name` is unique among the pages. The part refreshes
    every `refresh_seconds`, by default as the length of the range asks for.
    """

    def refresh() -> None:
        if controls is not None:
            controls()
        status = st.container(key=f"status_{name}")
        body = st.container(key=f"body_{name}")
        chosen = filters.chosen()
        kept: Seen[View] | None = st.session_state.get(f"seen_{name}")
        session = viewer.session()
        # The answer to another key or another selection is not shown.
        if kept and (kept.selection != chosen or kept.client is not session.client):
            kept = None
        # The placeholder is drawn on every run, so that what follows keeps its position.
        placeholder = body.empty()
        if kept is None:
            placeholder.skeleton(height=460)
        seen = kept
        problem = ""
        try:
            view = read(session.client, chosen)
            seen = Seen(session.client, chosen, view, datetime.now(UTC))
        except KeyEnded:
            st.rerun(scope="app")
        except ClientError as error:
            # A key that has ended shows nothing, not even its last numbers.
            seen = None if isinstance(error, KeyRefused) else kept
            problem = str(error)
        placeholder.empty()
        st.session_state[f"seen_{name}"] = seen
        if seen is None:
            status.error(f"{problem} Trying again by itself.", icon=":material/cloud_off:")
            return
        if problem:
            message = f"{problem} Showing what was known at {seen.at:%H:%M:%S} UTC."
            status.warning(message, icon=":material/schedule:")
        else:
            status.caption(f"Updated {seen.at:%H:%M:%S} UTC")
        with body:
            draw(seen.view, chosen)

    every = refresh_seconds or filters.chosen().refresh_seconds
    st.fragment(refresh, run_every=every, key=f"live_{name}")()
