"""What each reason of a miss is called and means, and what to change.

The words are those of the ledger's `miss_reason` and of `GET /admin/v1/turns/{id}/divergence`.
"""

import re
from typing import NamedTuple

import streamlit as st


class Advice(NamedTuple):
    title: str
    means: str
    change: str


MAX_REASON = 32
_CHANGED = "Move what varies behind the last marker, or keep it byte for byte the same."
# Reason, title, what it means, and what to change.
_TABLE = f"""
cold | First time seen | Nothing was known of this prefix: it had not come before, or long ago. |
    Nothing, if it comes again. Pre-warm it with `max_tokens: 0` where the first one matters.
no_breakpoint | Nothing was marked | The request marks nothing, so nothing is held for it. | Put
    `cache_control` on the last block that stays the same.
no_boundary | The marker has no token boundary | The chat template has no token boundary at the
    marker, or a hybrid model kept no state there. | Move the marker to the end of a message or of
    the system prompt.
below_minimum | Marked prefix too short | The marked prefix is shorter than the shortest that is
    cached. | Mark a longer prefix, or lower `min_cache_tokens` of the model or engine.
ttl_expired | Came after its lease ended | It was there, and its lease ran out before it was read
    again. | Use the one-hour TTL where Savings says that it is cheaper, or send again within the
    TTL.
best_effort_evicted | Had no lease, and made room | It was written without a lease, as the lease
    budget was full, and had to make room. | Give the engine more blocks or a larger `lease_share`,
    or mark fewer prefixes.
sacrificed | Its lease was given up for running requests | Its lease was given up: running requests
    needed the memory to finish. | Give the engine more blocks, or let fewer requests run at once.
damaged | Its copy in the engine's store was damaged | It was kept on disk, and a file of it was
    not whole when it was read. | Look at the engine's log, and at the disk if it happens again.
dropped | Dropped by an operator | An operator dropped it. | Nothing: the next request writes it
    again.
lookback_exceeded | More than 20 blocks behind the marker | There is an entry, more than 20 blocks
    before the marker. | Put a second marker nearer to the end of what was written before.
in_progress_race | The same prefix was still being computed | Another request was still computing
    the same prefix when this one came. | Wait for the first answer to begin before sending the
    others of a batch.
not_told | Its server does not say what it reused | The server behind the engine does not say what
    it reused, so nothing counts as read. | Start it so that it tells: the engine's guarantees in
    Fleet say how.
engine_restart | Its engine was restarted | It stood on an engine that has been restarted since. |
    Nothing in the prompt. Pre-warm after restarts; see Fleet.
routed_elsewhere | Went to another engine | It stands on another engine, which was too busy or
    away. | Nothing in the prompt. Look at the load in Fleet; a lower HOLDFAST_ROUTING_LOAD_WEIGHT
    follows prefixes more.
model_changed | Another model | Another model: no two models share a prefix. | Send the
    conversation to one model.
tools_changed | The tools changed | The list of tools differs: order, names, descriptions or
    schemas. | Send tools always in the same order. {_CHANGED}
system_changed | The system prompt changed | The system prompt differs: often a date, a user's name
    or a request id in it. | {_CHANGED}
messages_changed | An earlier message changed | An earlier message differs: edited, shortened or in
    another order. | Only ever append to a conversation. {_CHANGED}
unavailable | Asked for in another way | Not the text differs but how it is asked for: tool choice,
    thinking, effort or betas. | Keep these parameters the same through a conversation.
"""
ADVICE = {
    reason: Advice(*words)
    for row in re.split(r"\n(?! )", _TABLE.strip())
    for reason, *words in (" ".join(row.split()).split(" | "),)
}
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
        "Missed because",
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
    known = (reason for reason, each in ADVICE.items() if each.title == title)
    return next(known, title) or None
