"""Why did this miss? A request beside the one before it: where they part, and what it cost."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboard.admin.client import AdminClient, NotThere, segment
from dashboard.admin.shapes.turns import Turn, TurnDivergence, TurnPage
from dashboard.rows.turns import turn_details, turn_table
from dashboard.rows.verdict import Verdict, verdict
from dashboard.ui import formats, live, parts
from dashboard.ui.advice import advice
from dashboard.ui.selection import Selection

NUM_MISSES = 100


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
    if view.turn is None:
        draw_hero(view.misses, chosen)
    else:
        draw_verdict(view.turn, view.found)
        draw_pair(view)
    draw_misses(view)


def draw_hero(misses: TurnPage, chosen: Selection) -> None:
    """The most frequent reason among the newest misses, and what to change."""
    counted = Counter(each.miss_reason for each in misses.turns)
    if not counted:
        parts.hero(f"**Nothing missed** in {chosen.words}.")
        return
    ((most, times),) = counted.most_common(1)
    said = advice(most or "")
    parts.hero(
        f"Of the newest {len(misses.turns):,} misses **{times:,}** have one reason:"
        f" **{said.title.lower()}**. {said.change}"
    )


def draw_misses(view: View) -> None:
    parts.heading("Requests that missed, the newest first")
    if not view.misses.turns:
        parts.empty(
            "Nothing missed in this range. A marked prompt that is sent for the first time is shown"
            " here as a miss.",
            ":material/check_circle:",
            key="misses",
        )
        return
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
    """One verdict; the cards show where the prompts part if that is what it rests on."""
    judged = verdict(turn, found)
    with st.container(border=True, key="verdict"):
        st.badge(
            "Hit" if judged.is_good else "Miss" if turn.miss_reason else "Read in part",
            icon=":material/check_circle:" if judged.is_good else ":material/report:",
            color="green" if judged.is_good else "orange",
        )
        parts.hero(f"**{judged.said.title}.** {judged.said.means}")
        if not judged.is_good:
            st.markdown(f"**What to change:** {judged.said.change}")
            st.page_link(
                "views/advice.py",
                label="Advice says which markers would pay for requests like this one",
                icon=":material/lightbulb:",
            )
        if judged.difference is not None:
            draw_cost(judged.difference)
        st.caption(compared_with(found, judged))


def compared_with(found: TurnDivergence | None, judged: Verdict) -> str:
    """What the comparison with an earlier prompt adds to the verdict."""
    if found is None:
        return "There is no other prompt to compare it with."
    if found.earlier is None:
        return "No earlier prompt of its workspace begins like this one."
    if found.kind is None:
        return (
            "Everything of the most similar earlier prompt is in this one: nothing in the prompt"
            " is to blame."
        )
    if judged.difference is None:
        return "Where it differs from the most similar earlier prompt is not what decided it."
    if not found.shared_tokens:
        return (
            "The two prompts have the same shape and about the same length, but no long prefix in"
            " common. How much of it would have been read is not known."
        )
    return "Compared with the earlier prompt that begins most like it."


def draw_cost(found: TurnDivergence) -> None:
    with st.grid(4, min_column_width=170, row_height=132):
        section, block = place(found)
        parts.card("first_difference", section, delta=block)
        whole = found.earlier_tokens
        parts.card(
            "shared_tokens",
            count(found.shared_tokens),
            delta=None if whole is None else f"of {whole:,} in the earlier prompt",
        )
        parts.card("missed_tokens", count(found.missed_tokens))
        parts.card("missed_nano", formats.dollars(found.missed_nano))


def count(number: int | None) -> str:
    return formats.NO_VALUE if number is None else f"{number:,}"


def plain(word: str) -> str:
    """A reason as the gateway's fixed lists have it: other characters are left out."""
    return "".join(letter for letter in word if letter.isalnum() or letter == "_")[:40]


def place(found: TurnDivergence) -> tuple[str, str | None]:
    """Section, and the block within it and the character within that, counted from 1."""
    if found.section is None or found.block is None:
        return formats.NO_VALUE, None
    where = f"block {found.block + 1}"
    if found.characters:
        where += f", after {found.characters:,} characters"
    return plain(found.section).capitalize(), where


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
