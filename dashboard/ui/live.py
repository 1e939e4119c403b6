"""A page that refreshes itself: it reads, draws, and says from when its numbers are.

While the gateway does not answer, the last numbers stay with their time. Refreshing moves nothing:
the same elements are drawn in the same order, and the status line is always there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

import streamlit as st

from dashboard.admin.client import AdminClient, ClientError, KeyRefused
from dashboard.ui import filters, viewer
from dashboard.ui.selection import Selection

View = TypeVar("View")


@dataclass(frozen=True, slots=True)
class Seen(Generic[View]):
    """An answer, with the question, the client that asked it, and the time when it came."""

    client: AdminClient
    asked: Selection
    view: View
    at: datetime


def show(
    name: str,
    read: Callable[[AdminClient, Selection], View],
    draw: Callable[[View, Selection], None],
    *,
    controls: Callable[[], None] | None = None,
    refresh_seconds: int | None = None,
    skeleton_height: int = 460,
) -> None:
    """Draw a page's living part.

    `read` asks the admin API and raises ClientError; `draw` gets its result. `controls` draws
    widgets that do not depend on the answer. `name` is unique among the pages. The page refreshes
    every `refresh_seconds`, by default as often as the range is worth it.
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
        if kept and (kept.asked != chosen or session is None or kept.client is not session.client):
            kept = None
        # Its place is there on every run: what follows keeps its own.
        waiting = body.empty()
        if kept is None:
            waiting.skeleton(height=skeleton_height)
        seen, problem = _read(read, chosen, kept)
        waiting.empty()
        st.session_state[f"seen_{name}"] = seen
        with status:
            _draw_status(seen, problem)
        if seen is not None:
            with body:
                draw(seen.view, chosen)

    every = refresh_seconds or filters.chosen().refresh_seconds
    st.fragment(refresh, run_every=every, key=f"live_{name}")()


def _read(
    read: Callable[[AdminClient, Selection], View], chosen: Selection, kept: Seen[View] | None
) -> tuple[Seen[View] | None, str | None]:
    try:
        client = viewer.client()
        return Seen(client, chosen, read(client, chosen), datetime.now(UTC)), None
    except viewer.SignedOut:
        # The whole page shows it, not this part alone.
        st.rerun(scope="app")
    except KeyRefused as error:
        # A key that has ended shows nothing, not even its last numbers.
        return None, str(error)
    except ClientError as error:
        return kept, str(error)


def _draw_status(seen: Seen[View] | None, problem: str | None) -> None:
    if problem is None and seen is not None:
        st.caption(f"Updated {seen.at:%H:%M:%S} UTC")
    elif seen is not None:
        st.warning(
            f"{problem} Showing what was known at {seen.at:%H:%M:%S} UTC.",
            icon=":material/schedule:",
        )
    else:
        st.error(f"{problem} Trying again by itself.", icon=":material/cloud_off:")
