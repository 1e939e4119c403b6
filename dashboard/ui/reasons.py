"""What each reason of a miss is called and means, and what to change.

The words are those of the ledger's `miss_reason` and of `GET /admin/v1/turns/{id}/divergence`.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

import streamlit as st


class Advice(NamedTuple):
    title: str
    means: str
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
    """A choice of miss reasons in plain words; the words stand in the URL as `reason`."""
    options = ["", *(advice.title for advice in ADVICE.values())]
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
    """The reason of the filter, as the ledger has it; None for any. Unknown words stand as they
    came."""
    title = st.session_state.get("reason") or ""
    reasons = (reason for reason, advice in ADVICE.items() if advice.title == title)
    return next(reasons, title) or None
