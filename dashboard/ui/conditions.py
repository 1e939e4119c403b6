"""The strip above every page: what is wrong now, since when, why, and what to do.

The conditions are those of the gateway's `GET /admin/v1/conditions`. Their causes are text from
outside, so all text is escaped. Text between backticks is shown as code.
"""

import html
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import streamlit as st

from dashboard.client import AdminClient, ClientError, KeyEnded
from dashboard.ui import viewer
from gateway.structs.conditions import Condition, ConditionKind, Severity

REFRESH_SECONDS = 3
NUM_SHOWN = 4
"""How many kinds of conditions are shown at once. The others are behind a click."""
_NUM_SENTENCES = 6
_CODE = re.compile("`([^`]+)`")
_PATH = "/admin/v1/conditions"


class _Shown(NamedTuple):
    icon: str
    colour: Literal["red", "orange", "blue"]


_SHOWN: dict[Severity, _Shown] = {
    "critical": _Shown(":material/error:", "red"),
    "warning": _Shown(":material/warning:", "orange"),
    "info": _Shown(":material/info:", "blue"),
}
# An engine with a condition of these kinds does not tell what it holds.
_SILENT = {
    "engine_not_answering",
    "engine_starting",
    "engine_failing",
    "engine_out_of_memory",
    "another_model",
}


def strip() -> None:
    """Draw the strip, which refreshes itself. It is empty while the gateway does not answer. The
    page's own status says that."""

    def refresh() -> None:
        with st.container(key="conditions"):
            try:
                conditions = read(viewer.session().client)
            except KeyEnded:
                st.rerun(scope="app")
            except ClientError:
                return
            groups = by_kind(conditions)
            for group in groups[:NUM_SHOWN]:
                _draw(group)
            hidden_groups = groups[NUM_SHOWN:]
            if hidden_groups:
                count = sum(len(group) for group in hidden_groups)
                with st.expander(f"{count} more", key="conditions_more"):
                    for group in hidden_groups:
                        _draw(group)

    st.fragment(refresh, run_every=REFRESH_SECONDS, key="live_conditions")()


def read(client: AdminClient, *, with_new: bool = False) -> list[Condition]:
    """What is wrong now, the worst first. `with_new` adds conditions that are too new for the
    strip. Raise ClientError."""
    return client.get(_PATH, list[Condition], {"with_new": True} if with_new else None)


def silent(client: AdminClient, engine: str | None = None) -> list[Condition]:
    """The conditions of engines that do not tell now what they hold: of all engines, or only of
    `engine`. The list is empty if the gateway does not answer. Raise KeyEnded."""
    try:
        conditions = read(client, with_new=True)
    except KeyEnded:
        raise
    except ClientError:
        return []
    return [
        condition
        for condition in conditions
        if condition.kind in _SILENT and engine in (None, condition.engine)
    ]


def not_known(condition: Condition) -> str:
    """What a page says in place of what such an engine holds."""
    return f"not known since {condition.since}: {condition.cause}"


def by_kind(conditions: Sequence[Condition]) -> list[list[Condition]]:
    """Group conditions by kind, because all conditions of a kind have the same remedy. The kind of
    the worst condition comes first."""
    groups: dict[ConditionKind, list[Condition]] = {}
    for condition in conditions:
        groups.setdefault(condition.kind, []).append(condition)
    return list(groups.values())


def _draw(group: Sequence[Condition]) -> None:
    """Draw conditions of one kind in the colour of their severity. A badge names the severity."""
    kind = group[0].kind
    severity = group[0].severity
    with st.container(key=f"condition_{severity}_{kind}", horizontal=True, gap="small"):
        style = _SHOWN[severity]
        st.badge(severity.capitalize(), icon=style.icon, color=style.colour)
        with st.container(gap=None):
            with st.container(key=f"sentences_{kind}", gap=None):
                for condition in group[:_NUM_SENTENCES]:
                    _draw_text(condition.sentence)
                if len(group) > _NUM_SENTENCES:
                    st.text(f"and {len(group) - _NUM_SENTENCES} more")
            if group[0].remedy:
                _draw_text(group[0].remedy)


def _draw_text(text: str) -> None:
    """Draw a sentence. A `the` at its beginning gets a capital letter, but a name there stays as it
    is. Text between backticks is shown as code."""
    text = f"The {text[4:]}" if text.startswith("the ") else text
    st.html(f"<p>{as_html(text)}</p>")


def as_html(text: str) -> str:
    """Escape the text. Text between backticks becomes a `code` element. There are no other
    elements."""
    return _CODE.sub(r"<code>\1</code>", html.escape(text))
