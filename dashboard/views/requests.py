"""Requests: what happened to one request? A page of turns, and one of them in full."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import streamlit as st

from dashboard.client import AdminClient, NotThere, segment
from dashboard.ui import filters, formats, live, parts, viewer
from dashboard.ui.charts import Row
from dashboard.ui.filters import Selection
from dashboard.ui.formats import dollars, seconds
from dashboard.ui.parts import in_dollars
from dashboard.ui.reasons import advice, chosen_reason, reason_filter, reason_title
from engine.protocol import TTLS
from gateway.structs.usage import (
    KEPT_CONTENTS,
    NOT_DELIVERED,
    Refusal,
    RefusalCount,
    RefusalCounts,
    Turn,
    TurnContent,
    TurnPage,
    is_error,
)

PAGE = 200
NUM_REFUSED = 50
MAX_SHOWN = 20_000
ANY = ""
OUTCOMES = [ANY, "error", "stop", "length", "stop_sequence", "tool_use", "client_disconnect"]
READ_NOTHING = "read nothing"
# The words of the filter, and `has_read` in the admin API's query.
HITS = {ANY: None, "read something": "true", READ_NOTHING: "false"}
SHARES = {"Read at least (%)": "min_read", "Read at most (%)": "max_read"}
"""The filters by the share of the prompt that was read. Both ends are included."""
FILTERS = ("request", "outcome", "hit", "reason", "key", "prefix", "client")
"""The names of this page's filters, in the URL and in the session."""
NOT_READ = "Not read because"
NO_SUCH = "There is no such request, or none that your key may see."


class View(NamedTuple):
    """What the page shows."""

    page: TurnPage
    # The newest error answers.
    refused: list[Refusal]
    # How many requests were refused.
    counts: RefusalCounts
    # The request that was picked.
    picked: "PickedRequest"


class PickedRequest(NamedTuple):
    """One request in full. All fields are empty where no request was picked."""

    turn: Turn | None = None
    # All turns of the request's conversation, this one included.
    conversation: Sequence[Turn] = ()
    # The request's prompt and answer, if they are kept and this key may read them.
    content: TurnContent | None = None
    # The error that was answered, if the request was refused before its turn began.
    refusal: Refusal | None = None
    # Whether there is no such request, or this key may not see it.
    is_missing: bool = False
    # Whether this key may read prompts and answers.
    may_read: bool = False


def controls() -> None:
    with filters.folded("request_filters", summary):
        st.text_input(
            "Request id",
            key="request",
            placeholder="msg_…, chatcmpl-…, resp_… or req_…",
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
        reason_filter("Any")
        st.text_input("Key id", key="key", max_chars=32, width=180, bind="query-params")
        st.text_input("Prefix id", key="prefix", max_chars=16, width=180, bind="query-params")
        st.text_input(
            "Client begins with",
            key="client",
            placeholder="Anthropic/Python",
            max_chars=64,
            width=180,
            bind="query-params",
        )
        for label, key in SHARES.items():
            st.number_input(
                label,
                0,
                100,
                None,
                key=key,
                placeholder="any",
                width=150,
                bind="query-params",
            )
        if st.session_state.get("after"):
            st.button("Newest", key="newest", on_click=lambda: st.session_state.pop("after"))


def summary() -> str:
    """How many filters of this page are set."""
    state = st.session_state
    num_set = sum(bool(state.get(name)) for name in FILTERS)
    num_set += sum(state.get(name) is not None for name in SHARES.values())
    return f"Filters of requests: {num_set} set"


def read(client: AdminClient, selection: Selection) -> View:
    page = client.get("/admin/v1/turns/search", TurnPage, search_query(selection))
    newest = {"workspace": selection.workspace, "limit": NUM_REFUSED}
    refused = client.get("/admin/v1/refusals", list[Refusal], newest)
    in_range = {**selection.params("engine", "model"), "limit": NUM_REFUSED}
    counts = client.get("/admin/v1/refusals/counts", RefusalCounts, in_range)
    request_id = _typed("request")
    picked = PickedRequest()
    if request_id is not None:
        picked = read_request(client, selection, request_id)
    return View(page, refused, counts, picked)


def search_query(selection: Selection) -> dict[str, Any]:
    """The query for the page of turns, from the filters."""
    state = st.session_state
    return {
        **selection.params(),
        "outcome": state.get("outcome") or None,
        "has_read": HITS.get(state.get("hit") or ANY),
        "miss_reason": chosen_reason(),
        "key": _typed("key"),
        "prefix": _typed("prefix"),
        "client": _typed("client"),
        **{f"{name}_percent": state.get(name) for name in SHARES.values()},
        "after": state.get("after"),
        "limit": PAGE,
    }


def _typed(name: str) -> str | None:
    """The text of a filter; None where it is empty."""
    return (st.session_state.get(name) or "").strip() or None


def read_request(client: AdminClient, selection: Selection, request_id: str) -> PickedRequest:
    try:
        turn = client.get(f"/admin/v1/turns/{segment(request_id)}", Turn)
    except NotThere:
        query = {"workspace": selection.workspace, "request_id": request_id}
        refusals = client.get("/admin/v1/refusals", list[Refusal], query)
        return PickedRequest(refusal=next(iter(refusals), None), is_missing=not refusals)
    path = f"/admin/v1/turns/{segment(turn.id)}"
    conversation = list[Turn]()
    content = None
    with suppress(NotThere):  # the turn never began, so it has no fingerprint
        conversation = client.get(f"{path}/conversation", list[Turn])
    may_read = viewer.may_change() or not viewer.is_admin()
    if may_read:
        with suppress(NotThere):  # the contents are not kept, or no longer kept
            content = client.get(f"{path}/content", TurnContent)
    return PickedRequest(turn, conversation, content, may_read=may_read)


def draw(view: View, selection: Selection) -> None:
    draw_picked(view.picked)
    turns = view.page.turns
    if view.picked.turn is None and view.picked.refusal is None:
        draw_sentence(turns, selection)
    parts.heading("Requests, the newest first")
    if turns:
        st.caption(
            "Click a row to see all of it. The address of this page then leads to that request."
        )
        alt_text = f"{formats.counted(len(turns), 'request')}, the newest first."
        parts.table(turn_table(turns), "turns", alt_text, on_pick=pick)
    else:
        parts.empty("No requests in this range that match.", key="requests")
    num_searched = view.page.num_searched
    if num_searched is not None:
        st.caption(f"{num_searched:,} requests were looked at. Older goes on from there.")
    cursor = view.page.next
    if cursor:
        st.button("Older", key="older", on_click=lambda: st.session_state.update(after=cursor))
    if view.counts.counts:
        draw_counts(view.counts)
    if view.refused:
        draw_refused(view.refused)


def draw_picked(picked: PickedRequest) -> None:
    if picked.is_missing:
        parts.empty(NO_SUCH, ":material/search_off:")
    if picked.refusal is not None:
        draw_refusal(picked.refusal)
    turn = picked.turn
    if turn is None:
        return
    draw_turn(turn)
    draw_conversation(picked.conversation)
    if picked.content is not None:
        draw_content(picked.content)
    elif picked.may_read and turn.content is not None:
        parts.heading("Prompt and answer")
        st.caption(KEPT_CONTENTS.get(turn.content, turn.content))


def draw_sentence(turns: Sequence[Turn], selection: Selection) -> None:
    if not turns:
        parts.hero(f"**No request** of {selection.words} matches.")
        return
    num_read = sum(turn.cache_read_tokens > 0 for turn in turns)
    num_failed = sum(is_error(turn.outcome) for turn in turns)
    count = formats.counted(len(turns), "request")
    parts.hero(
        f"**{num_read:,} of the newest {count} read from the cache**, {num_failed:,} failed."
    )


def draw_refusal(refusal: Refusal) -> None:
    """Draw a request that was answered with an error before its turn began."""
    with st.container(border=True, key="refusal"):
        st.text(f"{refusal.request_id} · {formats.written_moment(refusal.at_ms)} UTC")
        parts.problem(f"Refused with HTTP {refusal.status}:", refusal.message)
        st.text(f"{refusal.path} · {refusal.type} · {refusal.user_agent or 'unknown client'}")


def draw_refused(refused: Sequence[Refusal]) -> None:
    parts.heading("Error answers of this gateway since its start")
    rows = [
        {
            "Time (UTC)": formats.moment(refusal.at_ms),
            "HTTP": refusal.status,
            "Type": refusal.type,
            "Error": refusal.message,
            "Path": refusal.path,
            "Workspace": refusal.workspace,
            "Key": refusal.key,
            "Limit": refusal.limit,
            "Client": refusal.user_agent,
            "Request id": refusal.request_id,
        }
        for refusal in refused
    ]
    st.caption("Click a row to read all of it.")
    alt_text = f"The newest {len(rows)} error answers."
    parts.table(rows, "refused", alt_text, on_pick=pick)


def draw_counts(counts: RefusalCounts) -> None:
    """Draw the refusals, a row for each minute, key and reason. No other table has them."""
    parts.heading("Refused before they were requests")
    count = formats.counted(counts.requests, "request")
    num_shown = sum(refusal.requests for refusal in counts.counts)
    limit = "" if num_shown == counts.requests else f"; the newest {num_shown:,} are shown"
    st.caption(f"{count} in this range{limit}. They are in no figure of tokens or cost.")
    rows = [refused_row(refusal) for refusal in counts.counts]
    alt_text = f"{count} refused, by minute, key and reason."
    parts.table(rows, "refusal_counts", alt_text)


def refused_row(refusal: RefusalCount) -> Row:
    return {
        "Minute (UTC)": formats.moment(refusal.minute_ms),
        "Reason": refusal.reason,
        "Refused": refusal.requests,
        "Workspace": refusal.workspace,
        "Key": refusal.key,
    }


def pick(row: Row) -> None:
    st.session_state["request"] = row.get("Id") or row["Request id"]


def turn_table(turns: Sequence[Turn]) -> list[Row]:
    """A row for each turn. The column of approximations is there only if a turn is approximate."""
    has_approximate = any(turn.approximate for turn in turns)
    return [_turn_row(turn, has_approximate=has_approximate) for turn in turns]


def _turn_row(turn: Turn, *, has_approximate: bool) -> Row:
    approximate = {parts.APPROXIMATE: turn.approximate or ""} if has_approximate else {}
    return {
        "Time (UTC)": formats.moment(turn.opened_ms),
        "Net saved ($)": in_dollars(turn.saved_nano),
        "Cost ($)": in_dollars(turn.cost_nano),
        "Read (tokens)": turn.cache_read_tokens,
        "Written (tokens)": turn.written_tokens,
        "Id": turn.id,
        **approximate,
        "Outcome": turn.outcome,
        NOT_READ: why_not_read(turn),
        "HTTP": turn.status,
        "Workspace": turn.workspace,
        "Model": turn.model,
        "Reused automatically (tokens)": turn.automatic_input_tokens,
        "Computed, not written (tokens)": turn.computed_input_tokens,
        "Output (tokens)": turn.output_tokens,
        "First token (s)": turn.first_token_seconds,
        "Duration (s)": turn.duration_seconds,
        "Error": turn.error,
        "Engine": turn.engine,
        "Name": turn.name,
        "Client": turn.user_agent,
        "Request id": turn.http_request_id,
    }


def why_not_read(turn: Turn) -> str | None:
    """Why the last marker was not read, in words; None if it was read. A turn that read something
    did not miss: only a later marker was not read."""
    if turn.miss_reason is None:
        return None
    title = reason_title(turn.miss_reason)
    if turn.cache_read_tokens:
        return f"A later marker: {title[:1].lower()}{title[1:]}"
    if turn.automatic_tokens:
        return f"{title}; {formats.counted(turn.automatic_tokens, 'token')} reused"
    return title


def draw_turn(turn: Turn) -> None:
    with st.container(border=True, key="turn"):
        st.text(f"{turn.id} · {formats.written_moment(turn.opened_ms)} UTC")
        if turn.approximate:
            st.badge(f"Approximate: {turn.approximate}", color="orange", icon=":material/blur_on:")
        with st.grid(4, min_column_width=170):
            parts.card("prompt_tokens", f"{turn.prompt_tokens:,}")
            parts.card("cache_read_tokens", f"{turn.cache_read_tokens:,}")
            parts.money_card("saved_nano", turn.saved_nano)
            parts.card("first_token_seconds", seconds(turn.first_token_seconds))
        # The error stands here in full, because a cell of a table cuts it off.
        if turn.error is not None:
            st.text(f"Error: {turn.error}")
        if turn.miss_reason is not None:
            reason = advice(turn.miss_reason)
            words = "A later marker was not read" if turn.cache_read_tokens else "Missed because"
            st.markdown(f"**{words}:** {reason.title}. {reason.means} {reason.change}")
        draw_marks(turn)
        about, amounts = st.columns(2)
        alt_text = "What the ledger knows of this request."
        with about:
            parts.table(value_rows(turn_facts(turn)), "turn_about", alt_text, height="content")
        with amounts:
            parts.table(value_rows(turn_amounts(turn)), "turn_amounts", alt_text, height="content")
        if turn.miss_reason is not None:
            st.page_link(
                "views/why.py",
                label="Why was not all read?" if turn.cache_read_tokens else "Why did this miss?",
                icon=":material/arrow_forward:",
                query_params={"miss": turn.id},
            )


def draw_marks(turn: Turn) -> None:
    """Draw what became of each marker of the request."""
    if not turn.marks:
        return
    rows: list[Row] = [
        {
            "Marker": f"{mark.section}, block {mark.block + 1}",
            "Up to it (tokens)": mark.tokens,
            "TTL": mark.ttl,
            "Read": "yes" if mark.missed is None else "no",
            NOT_READ: None if mark.missed is None else reason_title(mark.missed),
        }
        for mark in turn.marks
    ]
    num_read = sum(mark.missed is None for mark in turn.marks)
    count = formats.counted(len(turn.marks), "marker")
    alt_text = f"Read in full: {num_read} of {count}."
    st.caption(alt_text)
    parts.table(rows, "marks", alt_text, height="content")


def draw_conversation(turns: Sequence[Turn]) -> None:
    if len(turns) < 2:
        return
    parts.heading("Its conversation, turn by turn")
    rows = [
        {
            "Turn": number,
            "Time (UTC)": formats.moment(turn.opened_ms),
            "Net saved ($)": in_dollars(turn.saved_nano),
            "Id": turn.id,
            "Of the prompt": turn.cache_read_tokens / max(turn.prompt_tokens, 1),
            "Read (tokens)": turn.cache_read_tokens,
            "Written (tokens)": turn.written_tokens,
            "Reused automatically (tokens)": turn.automatic_input_tokens,
            "Computed, not written (tokens)": turn.computed_input_tokens,
            "First token (s)": turn.first_token_seconds,
            NOT_READ: why_not_read(turn),
        }
        for number, turn in enumerate(turns, 1)
    ]
    read_tokens = sum(turn.cache_read_tokens for turn in turns)
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    alt_text = (
        f"{len(turns)} turns. They read {read_tokens:,} of their {prompt_tokens:,} prompt tokens."
    )
    parts.table(rows, "conversation", alt_text)


def draw_content(content: TurnContent) -> None:
    """Draw the prompt and the answer that the workspace keeps. Both are shown as plain text."""
    parts.heading("Prompt and answer")
    until = formats.written_moment(content.until_ms)
    st.caption(f"Its workspace keeps them. They are deleted at {until} UTC.")
    with st.expander("Prompt", key="kept_prompt"):
        prompt = json.dumps(content.prompt, indent=2, ensure_ascii=False)
        st.code(prompt[:MAX_SHOWN], language=None, wrap_lines=True)
        if len(prompt) > MAX_SHOWN:
            st.caption(f"The first {MAX_SHOWN:,} of {len(prompt):,} characters.")
    for number, part in enumerate(content.answer):
        with st.container(border=True, key=f"kept_{number}"):
            kind = part.kind.capitalize()
            st.text(f"{kind} {part.name}" if part.name else kind)
            st.code(part.text, language=None, wrap_lines=True)
    if viewer.may_change():
        st.button(
            "Delete prompt and answer", key="delete_content", on_click=_delete, args=(content,)
        )


def _delete(content: TurnContent) -> None:
    with parts.problems_told():
        path = f"/admin/v1/turns/{segment(content.turn)}/content"
        viewer.session().client.change("DELETE", path, Turn)


Value = str | int | float | None


def turn_facts(turn: Turn) -> dict[str, Value]:
    """Who sent the request, what it asked for, and what became of it."""
    return {
        "Workspace": turn.workspace,
        "Key": turn.key_id,
        "Model": turn.model,
        "Engine": turn.engine,
        "API": turn.dialect,
        "Streamed": "yes" if turn.stream else "no",
        "Outcome": turn.outcome,
        "HTTP status": None if turn.status is None else str(turn.status),
        "Error": turn.error,
        "Request id": turn.http_request_id,
        "Client": turn.user_agent,
        "Name": turn.name,
        "Stop reason": turn.stop_reason,
        NOT_READ: why_not_read(turn),
        "Prefix": turn.prefix,
        "TTL": turn.prefix_ttl,
        "Approximate": turn.approximate,
    }


def turn_amounts(turn: Turn) -> dict[str, Value]:
    """Tokens, times and money, in the order of a request's life. An answer that was not delivered
    costs nothing, although the engine has computed its tokens."""
    is_delivered = turn.price != NOT_DELIVERED
    return {
        "Read (tokens)": turn.cache_read_tokens,
        **{f"Written, {TTLS[ttl].words} (tokens)": n for ttl, n in turn.writes.items() if n},
        "Reused automatically (tokens)": turn.automatic_input_tokens,
        "Computed, not written (tokens)": turn.computed_input_tokens,
        "Computed (tokens)": turn.computed_tokens,
        "Output (tokens)": turn.output_tokens,
        "Held by some engine (tokens)": turn.available_tokens,
        "Held by this engine (tokens)": turn.captured_tokens,
        "In the queue": turn.queue_seconds,
        "Prefill": turn.prefill_seconds,
        "First token": turn.first_token_seconds,
        "Decode": turn.decode_seconds,
        "Duration": turn.duration_seconds,
        "Cost": dollars(turn.cost_nano) if is_delivered else f"{NOT_DELIVERED}: nothing is charged",
        "Net saved": dollars(turn.saved_nano) if is_delivered else None,
    }


def turn_details(turn: Turn) -> dict[str, str | None]:
    """The facts and amounts of a turn as text."""
    values = {**turn_facts(turn), **turn_amounts(turn)}
    return {name: _text_of(value) for name, value in values.items()}


def value_rows(values: Mapping[str, Value]) -> list[dict[str, str | None]]:
    return [{"What": name, "Value": _text_of(value)} for name, value in values.items()]


def _text_of(value: Value) -> str | None:
    """A value as text. An int is a count, and a float is a time in seconds."""
    if isinstance(value, float):
        return seconds(value)
    return f"{value:,}" if isinstance(value, int) else value


if __name__ == "__main__":
    parts.title("Requests", "What happened to one request?")
    live.show("requests", read, draw, controls=controls)
