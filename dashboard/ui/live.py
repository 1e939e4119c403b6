"""A page that refreshes itself. It reads, draws, and says from when its numbers are.

While the gateway does not answer, the last numbers stay, with the time from which they are.
Refreshing moves nothing: the same elements are drawn in the same order, and the status line is
always there.
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
class Answer(Generic[View]):
    """What a page shows, and where it comes from."""

    # The client that asked for it.
    client: AdminClient
    # What was selected when it was asked for.
    selection: Selection
    view: View
    # When it came.
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

    `name` is unique among the pages. `read` asks the admin API, or raises ClientError. `draw` gets
    the result of `read`. `controls` draws widgets that do not depend on the answer. The part
    refreshes every `refresh_seconds`. By default the length of the range decides how often.
    """

    def refresh() -> None:
        if controls is not None:
            controls()
        status = st.container(key=f"status_{name}")
        body = st.container(key=f"body_{name}")
        selection = filters.chosen()
        last_answer: Answer[View] | None = st.session_state.get(f"seen_{name}")
        session = viewer.session()
        # An answer to another key, or to another selection, is not shown.
        if last_answer and (
            last_answer.selection != selection or last_answer.client is not session.client
        ):
            last_answer = None
        # The placeholder is drawn on every run, so that what follows keeps its position.
        placeholder = body.empty()
        if last_answer is None:
            placeholder.skeleton(height=460)
        answer = last_answer
        problem = ""
        try:
            view = read(session.client, selection)
            answer = Answer(session.client, selection, view, datetime.now(UTC))
        except KeyEnded:
            st.rerun(scope="app")
        except ClientError as error:
            # A viewer whose key was refused sees nothing, not even the last numbers.
            answer = None if isinstance(error, KeyRefused) else last_answer
            problem = str(error)
        placeholder.empty()
        st.session_state[f"seen_{name}"] = answer
        if answer is None:
            status.error(f"{problem} Trying again by itself.", icon=":material/cloud_off:")
            return
        if problem:
            message = f"{problem} Showing what was known at {answer.at:%H:%M:%S} UTC."
            status.warning(message, icon=":material/schedule:")
        else:
            status.caption(f"Updated {answer.at:%H:%M:%S} UTC")
        with body:
            draw(answer.view, selection)

    seconds = refresh_seconds or filters.chosen().refresh_seconds
    st.fragment(refresh, run_every=seconds, key=f"live_{name}")()
