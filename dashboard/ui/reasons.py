"""What each reason of a miss is called and means, and what to change.

The words are those of the ledger's `miss_reason` and of `GET /admin/v1/turns/{id}/divergence`.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

import streamlit as st


class Advice(NamedTuple):
    """A reason in words."""

    title: str
    # What it means, in a sentence.
    means: str
    # What to change, in a sentence.
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
    """The reason in plain words; one that is not known here as it came."""
    return ADVICE[reason].title if reason in ADVICE else reason


def reason_filter(unset: str) -> None:
    """Draw a choice of miss reasons in plain words, which stand in the URL as `reason`. `unset` is
    what the choice of none is called."""
    options = ["", *(words.title for words in ADVICE.values())]
    linked = st.query_params.get("reason", "")
    if linked not in options and len(linked) <= MAX_REASON:
        options.append(linked)
    st.selectbox(
        "Not read because",
        options,
        format_func=lambda option: option or unset,
        key="reason",
        width=290,
        bind="query-params",
    )


def chosen_reason() -> str | None:
    """The reason of the filter, as the ledger has it; None for any. Words that are not known here
    are taken for a reason as they stand."""
    title = st.session_state.get("reason") or None
    reasons = (reason for reason, words in ADVICE.items() if words.title == title)
    return next(reasons, title)
