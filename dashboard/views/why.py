"""Why did this miss? A request beside the one before it: where they part, and what it cost."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboard.admin.client import AdminClient, NotThere, segment
from dashboard.admin.shapes.turns import Turn, TurnDivergence, TurnPage
from dashboard.rows.turns import turn_details, turn_table
from dashboard.ui import formats, live, parts
from dashboard.ui.advice import ADVICE, Advice, advice
from dashboard.ui.selection import Selection

NUM_MISSES = 100
CHUNK_CHARACTERS = 8192  # the gateway names prefixes that far apart within a block


@dataclass(frozen=True, slots=True)
class View:
    """`found` is None where a prompt left no fingerprint; `is_missing`: no such request."""

    misses: TurnPage
    turn: Turn | None = None
    found: TurnDivergence | None = None
    earlier: Turn | None = None
    is_missing: bool = False


def controls() -> None:
    """The ids' parameters are named for this page: Streamlit drops other pages' widgets."""
    with st.container(horizontal=True, vertical_alignment="bottom", key="why_filters"):
        for key, label in (("miss", "Request id"), ("earlier", "Compare with (optional)")):
            st.text_input(
                label,
                key=key,
                placeholder="msg_… or req_…" if key == "miss" else "the most similar before it",
                max_chars=64,
                width=330,
                bind="query-params",
            )
        parts.reason_filter("Any reason")


def read(client: AdminClient, chosen: Selection) -> View:
    reason = parts.chosen_reason() or "any"
    asked = {**chosen.params(), "miss_reason": reason, "limit": NUM_MISSES}
    misses = client.get("/admin/v1/turns/search", TurnPage, asked)
    wanted = (st.session_state.get("miss") or "").strip()
    before = (st.session_state.get("earlier") or "").strip()
    if not wanted:
        return View(misses)
    try:
        turn = client.get(f"/admin/v1/turns/{segment(wanted)}", Turn)
    except NotThere:
        return View(misses, is_missing=True)
    path = f"/admin/v1/turns/{segment(turn.id)}"
    try:
        found = client.get(f"{path}/divergence", TurnDivergence, {"from": before or None})
        earlier = None
        if found.earlier is not None:
            earlier = client.get(f"/admin/v1/turns/{segment(found.earlier)}", Turn)
    except NotThere:
        return View(misses, turn, is_missing=bool(before))
    return View(misses, turn, found, earlier)


def draw(view: View, chosen: Selection) -> None:
    if view.is_missing:
        parts.empty(
            "There is no such request, or none that your key may see.", ":material/search_off:"
        )
    if view.turn is not None:
        draw_verdict(view.turn, view.found)
        draw_pair(view)
    parts.heading("Requests that missed, the newest first")
    if not view.misses.turns:
        parts.empty("Nothing missed in this range.", ":material/check_circle:")
        return
    counted = Counter(each.miss_reason for each in view.misses.turns)
    ((most, times),) = counted.most_common(1)
    if view.turn is None and most in ADVICE:
        parts.hero(
            f"Of the newest {len(view.misses.turns):,} misses **{times:,}** have one reason:"
            f" **{advice(most).title.lower()}**. {advice(most).change}"
        )
    if view.turn is None:
        st.caption("Click one to see where it stopped being the prompt before it.")
    parts.table(
        turn_table(view.misses.turns),
        "misses",
        alt_text=f"{len(view.misses.turns)} requests that missed.",
        columns=parts.turn_columns(),
        height=420 if len(view.misses.turns) > 10 else "auto",
        picked=pick,
    )


def pick(row: Any) -> None:
    st.session_state["miss"] = row["Id"]
    st.session_state["earlier"] = ""


def draw_verdict(turn: Turn, found: TurnDivergence | None) -> None:
    """One verdict: the ledger's reason, or where that knows none the first difference."""
    said = verdict(turn, found)
    with st.container(border=True, key="verdict"):
        if said is None:
            st.success("The last marker was read, or merely grew: this request did not miss.")
        else:
            st.markdown(f"**{said.title}.** {said.means}")
            st.markdown(f"**What to change:** {said.change}")
        if found is None:
            st.caption("There is no other prompt to compare it with.")
        elif found.earlier is None:
            st.caption("No earlier prompt of its workspace begins like this one.")
        elif found.kind is not None or said is None:
            draw_cost(found)
        else:
            st.caption(
                "Everything of the most similar earlier prompt is in this one: nothing in the"
                " prompt is to blame."
            )


def verdict(turn: Turn, found: TurnDivergence | None) -> Advice | None:
    """What to tell of a miss; None for a hit.

    `cold` says only that nothing was known of the prefix: the first difference says more.
    """
    if turn.miss_reason is None:
        return None
    if turn.miss_reason == "cold" and found is not None and found.kind is not None:
        return advice(found.kind)
    return advice(turn.miss_reason)


def draw_cost(found: TurnDivergence) -> None:
    with st.grid(4, min_column_width=170, row_height=132):
        if found.kind is not None:
            section, block = place(found)
            parts.card("first_difference", section, delta=block)
        whole = found.earlier_tokens
        parts.card(
            "shared_tokens",
            count(found.shared_tokens),
            delta=None if whole is None else f"of {whole:,} in the earlier prompt",
        )
        if found.kind is not None:
            parts.card("missed_tokens", count(found.missed_tokens))
            parts.card("missed_nano", formats.dollars(found.missed_nano))


def count(number: int | None) -> str:
    return formats.NO_VALUE if number is None else f"{number:,}"


def plain(word: str) -> str:
    """A reason as the gateway's fixed lists have it: other characters are left out."""
    return "".join(letter for letter in word if letter.isalnum() or letter == "_")[:40]


def place(found: TurnDivergence) -> tuple[str, str | None]:
    """Section, and the block and chunk within it, counted from 1."""
    if found.section is None or found.block is None:
        return formats.NO_VALUE, None
    chunk = (found.characters or 0) // CHUNK_CHARACTERS
    return plain(found.section).capitalize(), f"block {found.block + 1}, chunk {chunk + 1}"


def draw_pair(view: View) -> None:
    assert view.turn is not None
    parts.heading("Side by side")
    mine = turn_details(view.turn)
    others = dict(turn_details(view.earlier)) if view.earlier else {}
    first = ("Id", view.turn.id, view.earlier.id if view.earlier else None)
    time = (
        "Time (UTC)",
        f"{view.turn.opened:%Y-%m-%d %H:%M:%S}",
        f"{view.earlier.opened:%Y-%m-%d %H:%M:%S}" if view.earlier else None,
    )
    pairs = [first, time, *((name, value, others.get(name)) for name, value in mine)]
    parts.table(
        [{"What": name, "This request": here, "Earlier": there} for name, here, there in pairs],
        "side_by_side",
        alt_text="The two requests field by field.",
        height=360,
    )


parts.title("Why did this miss", "Where did this prompt stop being the one before it?")
live.show("why", read, draw, controls=controls)
