"""Requests: what happened to one request? A page of turns, and one of them in full."""

from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboard.admin.client import AdminClient, NotThere, segment
from dashboard.admin.shapes.turns import Refusal, Turn, TurnPage
from dashboard.rows.turns import refusal_table, turn_details, turn_table
from dashboard.ui import formats, live, parts
from dashboard.ui.selection import Selection

PAGE = 200
NUM_REFUSED = 50
NUM_ABOUT = 16  # of the details: who and what; the rest are tokens, times and money
ANY = ""
OUTCOMES = [ANY, "error", "stop", "length", "stop_sequence", "tool_use", "client_disconnect"]
# As the query of the admin API says it.
HITS = {ANY: None, "read something": "true", "read nothing": "false"}


@dataclass(frozen=True, slots=True)
class View:
    """`is_missing`: there is no such request, or this key may not see it."""

    page: TurnPage
    refused: list[Refusal]
    turn: Turn | None = None
    refusal: Refusal | None = None
    is_missing: bool = False


def controls() -> None:
    with st.container(horizontal=True, vertical_alignment="bottom", key="request_filters"):
        st.text_input(
            "Request id",
            key="request",
            placeholder="msg_… or req_…",
            max_chars=64,
            width=330,
            bind="query-params",
        )
        st.selectbox(
            "Outcome",
            OUTCOMES,
            format_func=lambda option: option or "Any",
            key="outcome",
            width=170,
            accept_new_options=True,
            bind="query-params",
        )
        st.selectbox(
            "Cache",
            list(HITS),
            format_func=lambda option: option or "Any",
            key="hit",
            width=160,
            bind="query-params",
        )
        parts.reason_filter("Any")
        if st.session_state.get("after"):
            st.button("Newest", key="newest", on_click=lambda: st.session_state.pop("after"))


def read(client: AdminClient, chosen: Selection) -> View:
    state = st.session_state
    which = {
        **chosen.params(),
        "outcome": state.get("outcome") or None,
        "has_read": HITS.get(state.get("hit") or ANY),
        "miss_reason": parts.chosen_reason(),
        "after": state.get("after"),
        "limit": PAGE,
    }
    page = client.get("/admin/v1/turns/search", TurnPage, which)
    own = {"workspace": chosen.workspace}
    refused = client.get("/admin/v1/refusals", list[Refusal], {**own, "limit": NUM_REFUSED})
    wanted = (state.get("request") or "").strip()
    if not wanted:
        return View(page, refused)
    try:
        turn = client.get(f"/admin/v1/turns/{segment(wanted)}", Turn)
        return View(page, refused, turn)
    except NotThere:
        known = client.get("/admin/v1/refusals", list[Refusal], {**own, "request_id": wanted})
        return View(page, refused, refusal=next(iter(known), None), is_missing=not known)


def draw(view: View, chosen: Selection) -> None:
    if view.is_missing:
        parts.empty(
            "There is no such request, or none that your key may see.", ":material/search_off:"
        )
    if view.turn is None and view.refusal is None:
        draw_hero(view.page.turns, chosen)
    if view.turn is not None:
        draw_turn(view.turn)
    if view.refusal is not None:
        draw_refusal(view.refusal)
    draw_page(view)
    draw_refused(view.refused)


def draw_hero(turns: list[Turn], chosen: Selection) -> None:
    """What became of the requests that are listed."""
    if not turns:
        parts.hero(f"**No request** of {chosen.words} matches.")
        return
    read = sum(turn.cache_read_tokens > 0 for turn in turns)
    failed = sum(turn.outcome.endswith("_error") for turn in turns)
    parts.hero(
        f"**{read:,} of the newest {formats.counted(len(turns), 'request')} read from the cache**,"
        f" {failed:,} failed."
    )


def draw_page(view: View) -> None:
    parts.heading("Requests, the newest first")
    if not view.page.turns:
        parts.empty("No requests in this range that match.", key="requests")
        return
    st.caption("Click a row to see all of it. The address of this page then leads to that request.")
    parts.table(
        turn_table(view.page.turns),
        "turns",
        alt_text=f"{len(view.page.turns)} requests, the newest first.",
        columns=parts.turn_columns(),
        height=520 if len(view.page.turns) > 14 else "auto",
        picked=pick,
    )
    if view.page.next:
        cursor = view.page.next
        st.button("Older", key="older", on_click=lambda: st.session_state.update(after=cursor))


def draw_refusal(refusal: Refusal) -> None:
    """A request that was answered with an error before its turn began."""
    with st.container(border=True, key="refusal"):
        st.text(f"{refusal.request_id} · {refusal.at:%Y-%m-%d %H:%M:%S} UTC")
        st.error(f"Refused with HTTP {refusal.status}:", icon=":material/block:")
        st.text(refusal.message)
        st.text(f"{refusal.path} · {refusal.type} · {refusal.user_agent or 'unknown client'}")


def draw_refused(refused: list[Refusal]) -> None:
    if not refused:
        return
    parts.heading("Error answers of this gateway since its start")
    parts.table(
        refusal_table(refused),
        "refused",
        alt_text=f"The newest {len(refused)} error answers.",
        columns=parts.turn_columns(),
        height=420 if len(refused) > 10 else "auto",
    )


def pick(row: Any) -> None:
    st.session_state["request"] = row["Id"]


def draw_turn(turn: Turn) -> None:
    with st.container(border=True, key="turn"):
        st.text(f"{turn.id} · {turn.opened:%Y-%m-%d %H:%M:%S} UTC")
        with st.grid(4, min_column_width=170):
            parts.card("prompt_tokens", f"{turn.prompt_tokens:,}")
            parts.card("cache_read_tokens", f"{turn.cache_read_tokens:,}")
            loss = turn.saved_nano is not None and turn.saved_nano < 0
            parts.card("saved_nano", formats.dollars(turn.saved_nano), is_loss=loss)
            parts.card("first_token_seconds", formats.seconds(turn.first_token_seconds))
        details = [{"What": name, "Value": value} for name, value in turn_details(turn)]
        about, amounts = st.columns(2)
        for column, key, found in (
            (about, "about", details[:NUM_ABOUT]),
            (amounts, "amounts", details[NUM_ABOUT:]),
        ):
            with column:
                alt_text = "What the ledger knows of this request."
                parts.table(found, f"turn_{key}", alt_text=alt_text, height="content")
        st.page_link(
            "views/why.py",
            label="Why did this miss?",
            icon=":material/arrow_forward:",
            query_params={"miss": turn.id},
        )


parts.title("Requests", "What happened to one request?")
live.show("requests", read, draw, controls=controls)
