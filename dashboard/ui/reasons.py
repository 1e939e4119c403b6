"""The title of each reason of a miss, what the reason means, and what to change.

The reasons are those of the ledger's `miss_reason` and of `GET /admin/v1/turns/{id}/divergence`.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

import streamlit as st


class Advice(NamedTuple):
    """A reason in words."""

    title: str
    # A sentence on what the reason means.
    means: str
    # A sentence on what to change.
    change: str


MAX_REASON = 32
_TABLE = Path(__file__).with_suffix(".toml").read_text("utf-8")
ADVICE = {reason: Advice(*words) for reason, words in tomllib.loads(_TABLE).items()}
UNKNOWN = Advice(
    "Another reason", "A reason that this dashboard does not know yet.", "See the gateway's README."
)


def advice(reason: str) -> Advice:
    return ADVICE.get(reason, UNKNOWN)


def reason_title(reason: str) -> str:
    """The title of a reason. A reason that is not known here is its own title."""
    return ADVICE[reason].title if reason in ADVICE else reason


def reason_filter(unset: str) -> None:
    """Draw a choice of miss reasons by their titles. The URL has the chosen title as `reason`.
    `unset` is the label of the choice of no reason."""
    options = ["", *(words.title for words in ADVICE.values())]
    linked_title = st.query_params.get("reason", "")
    if linked_title not in options and len(linked_title) <= MAX_REASON:
        options.append(linked_title)
    st.selectbox(
        "Not read because",
        options,
        format_func=lambda option: option or unset,
        key="reason",
        width=290,
        bind="query-params",
    )


def chosen_reason() -> str | None:
    """The chosen reason, by the ledger's word for it; None if none is chosen. A title that is not
    known here is taken for the ledger's word."""
    title = st.session_state.get("reason") or None
    reasons = (reason for reason, words in ADVICE.items() if words.title == title)
    return next(reasons, title)
