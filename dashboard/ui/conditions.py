"""The strip above every page: what is wrong now, since when, why, and what to do.

It is the gateway's list, `GET /admin/v1/conditions`. Causes are text from outside: all of it is
escaped, and what stands between backticks is set as code.
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
"""How many kinds stand open; the others are behind a click."""
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
# An engine with one of these tells nothing of what it holds.
_SILENT = {
    "engine_not_answering",
    "engine_starting",
    "engine_failing",
    "engine_out_of_memory",
    "another_model",
}


def strip() -> None:
    """Draw the strip, which refreshes itself. While the gateway does not answer it is empty: the
    page's own status says so."""

    def refresh() -> None:
        with st.container(key="conditions"):
            try:
                conditions = read(viewer.session().client)
            except KeyEnded:
                st.rerun(scope="app")
            except ClientError:
                return
            groups = by_kind(conditions)
            for same in groups[:NUM_SHOWN]:
                _draw(same)
            more = groups[NUM_SHOWN:]
            if more:
                count = sum(len(same) for same in more)
                with st.expander(f"{count} more", key="conditions_more"):
                    for same in more:
                        _draw(same)

    st.fragment(refresh, run_every=REFRESH_SECONDS, key="live_conditions")()


def read(client: AdminClient, *, with_new: bool = False) -> list[Condition]:
    """What is wrong now, the worst first. `with_new` adds conditions that are too new for the
    strip. Raise ClientError."""
    return client.get(_PATH, list[Condition], {"with_new": True} if with_new else None)


def silent(client: AdminClient, engine: str | None = None) -> list[Condition]:
    """The conditions of engines that don't tell now what they hold, of all engines or of one. None
    where the gateway does not answer. Raise KeyEnded."""
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
    """What stands in the place of what such an engine holds."""
    return f"not known since {condition.since}: {condition.cause}"


def by_kind(conditions: Sequence[Condition]) -> list[list[Condition]]:
    """Group conditions by kind, since the remedy of a kind is the same. The kind of the worst
    condition comes first."""
    groups: dict[ConditionKind, list[Condition]] = {}
    for condition in conditions:
        groups.setdefault(condition.kind, []).append(condition)
    return list(groups.values())


def _draw(same: Sequence[Condition]) -> None:
    """Conditions of one kind, in the colour of its severity, which a badge says in words too."""
    kind = same[0].kind
    severity = same[0].severity
    with st.container(key=f"condition_{severity}_{kind}", horizontal=True, gap="small"):
        style = _SHOWN[severity]
        st.badge(severity.capitalize(), icon=style.icon, color=style.colour)
        with st.container(gap=None):
            with st.container(key=f"sentences_{kind}", gap=None):
                for condition in same[:_NUM_SENTENCES]:
                    _draw_text(condition.sentence)
                if len(same) > _NUM_SENTENCES:
                    st.text(f"and {len(same) - _NUM_SENTENCES} more")
            if same[0].remedy:
                _draw_text(same[0].remedy)


def _draw_text(text: str) -> None:
    """Draw a sentence. Its first `the` gets a capital letter; a name that begins it stays as it is.
    What stands between backticks is set as code."""
    text = f"The {text[4:]}" if text.startswith("the ") else text
    st.html(f"<p>{as_html(text)}</p>")


def as_html(text: str) -> str:
    """Escape the text. A pair of backticks becomes a `code` element, and nothing else an
    element."""
    return _CODE.sub(r"<code>\1</code>", html.escape(text))
