"""The strip above every page: what is wrong now, since when, why, and what to do.

It is the gateway's list, `GET /admin/v1/conditions`. Causes are text from outside, so they are
plain.
"""

from typing import Literal, NamedTuple

import streamlit as st

from dashboard.client import AdminClient, ClientError, KeyEnded
from dashboard.ui import viewer
from gateway.structs.conditions import Condition, Severity

REFRESH_SECONDS = 3
NUM_SHOWN = 4
"""How many of them stand open; the others are behind a click."""
_PATH = "/admin/v1/conditions"


class _Shown(NamedTuple):
    icon: str
    colour: Literal["red", "orange", "blue"]


_SHOWN: dict[Severity, _Shown] = {
    "critical": _Shown(":material/error:", "red"),
    "warning": _Shown(":material/warning:", "orange"),
    "info": _Shown(":material/info:", "blue"),
}
# An engine with one of these tells nothing of what it holds.
_SILENT = {
    "engine_not_answering",
    "engine_starting",
    "engine_failing",
    "engine_out_of_memory",
    "another_model",
}


def strip() -> None:
    """Draw it, and again by itself. While the gateway does not answer, the page's own status says
    so."""

    def refresh() -> None:
        with st.container(key="conditions"):
            try:
                found = read(viewer.session().client)
            except KeyEnded:
                st.rerun(scope="app")
            except ClientError:
                return
            for number, condition in enumerate(found[:NUM_SHOWN]):
                _draw(condition, number)
            if more := found[NUM_SHOWN:]:
                with st.expander(f"{len(more)} more", key="conditions_more"):
                    for number, condition in enumerate(more, NUM_SHOWN):
                        _draw(condition, number)

    st.fragment(refresh, run_every=REFRESH_SECONDS, key="live_conditions")()


def read(client: AdminClient) -> list[Condition]:
    """The worst first. Raise ClientError."""
    return client.get(_PATH, list[Condition])


def silent(client: AdminClient, engine: str | None = None) -> list[Condition]:
    """The engines that tell nothing now of what they hold, and why; none where the gateway does not
    say. With `engine` that one alone. Raise KeyEnded."""
    try:
        found = read(client)
    except KeyEnded:
        raise
    except ClientError:
        return []
    return [
        condition
        for condition in found
        if condition.kind in _SILENT and engine in (None, condition.engine)
    ]


def not_known(condition: Condition) -> str:
    """What stands in the place of what such an engine holds."""
    return f"not known since {condition.since}: {condition.cause}"


def _draw(condition: Condition, number: int) -> None:
    """In the colour of its severity, which a badge says in words too."""
    key = f"condition_{condition.severity}_{number}"
    with st.container(key=key, horizontal=True, gap="small"):
        shown = _SHOWN[condition.severity]
        st.badge(condition.severity.capitalize(), icon=shown.icon, color=shown.colour)
        with st.container(gap=None):
            st.text(condition.sentence)
            if condition.remedy:
                st.text(condition.remedy)
