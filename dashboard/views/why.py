"""Why did this miss? A request beside the one before it: where they differ, and what it cost."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import streamlit as st

from dashboard.client import AdminClient, NotThere, segment
from dashboard.ui import filters, formats, live, parts
from dashboard.ui.charts import Row
from dashboard.ui.filters import Selection
from dashboard.ui.reasons import Advice, advice, chosen_reason, reason_filter
from dashboard.views.requests import NO_SUCH, draw_marks, turn_details, turn_table
from gateway.structs.usage import Turn, TurnDivergence, TurnPage

NUM_MISSES = 100
_NEW_CONVERSATION = "Nothing, if it is another conversation. Otherwise only ever append to it."


_AFTER_A_WHILE = (
    "Nothing in the prompt. Use the one-hour TTL where Savings says that it is cheaper, and give"
    " engines a store that outlives restarts."
)


class View(NamedTuple):
    """What the page shows."""

    misses: TurnPage
    # Turns that read something, but not up to a later marker.
    parts: TurnPage
    # Whether the range has a request, whatever became of it.
    was_asked: bool
    turn: Turn | None = None
    # None where a prompt left no fingerprint.
    divergence: TurnDivergence | None = None
    earlier: Turn | None = None
    # The newest request with the same marked prefix.
    before: Turn | None = None
    # There is no such request.
    is_missing: bool = False


class Verdict(NamedTuple):
    """What a turn's counts and the comparison come to."""

    is_good: bool
    advice: Advice
    # Where the prompt left the earlier one, if that explains the verdict.
    difference: TurnDivergence | None = None


def controls() -> None:
    """The ids' parameters are named for this page: Streamlit drops other pages' widgets."""
    with filters.folded("why_filters", lambda: "Request and reason"):
        for key, label in (("miss", "Request id"), ("earlier", "Compare with (optional)")):
            st.text_input(
                label,
                key=key,
                placeholder="msg_… or req_…" if key == "miss" else "the most similar before it",
                max_chars=64,
                width=330,
                bind="query-params",
            )
        reason_filter("Any reason")


def read(client: AdminClient, chosen: Selection) -> View:
    query = {**chosen.params(), "miss_reason": chosen_reason() or "any", "limit": NUM_MISSES}
    path = "/admin/v1/turns/search"
    misses = client.get(path, TurnPage, {**query, "has_read": False})
    in_part = client.get(path, TurnPage, {**query, "has_read": True})
    was_asked = bool(misses.turns or in_part.turns)
    if not was_asked:
        newest = client.get(path, TurnPage, {**chosen.params(), "limit": 1})
        was_asked = bool(newest.turns)
    turn_id = (st.session_state.get("miss") or "").strip()
    before = (st.session_state.get("earlier") or "").strip()
    if not turn_id:
        return View(misses, in_part, was_asked)
    try:
        turn = client.get(f"/admin/v1/turns/{segment(turn_id)}", Turn)
    except NotThere:
        return View(misses, in_part, was_asked, is_missing=True)
    path = f"/admin/v1/turns/{segment(turn.id)}/divergence"
    try:
        divergence = client.get(path, TurnDivergence, {"from": before or None})
        earlier = None
        if divergence.earlier is not None:
            earlier = client.get(f"/admin/v1/turns/{segment(divergence.earlier)}", Turn)
    except NotThere:
        return View(misses, in_part, was_asked, turn, is_missing=bool(before))
    before_it = None
    if turn.miss_reason == "cold" and turn.prefix is not None:
        same = {"since_ms": 0, "until_ms": turn.opened_ms, "prefix": turn.prefix, "limit": 1}
        page = client.get("/admin/v1/turns/search", TurnPage, same)
        before_it = next(iter(page.turns), None)
    return View(misses, in_part, was_asked, turn, divergence, earlier, before_it)


def draw(view: View, chosen: Selection) -> None:
    if view.is_missing:
        parts.empty(NO_SUCH, ":material/search_off:")
    if view.turn is None:
        draw_most_frequent(view, chosen)
    else:
        draw_verdict(view.turn, view.divergence, view.before)
        draw_marks(view.turn)
        draw_side_by_side(view.turn, view.earlier)
    draw_lists(view, chosen)


def draw_side_by_side(turn: Turn, earlier: Turn | None) -> None:
    """The fields that differ between the two, or all fields. Without an earlier request these are
    the fields of this one that have a value."""
    parts.heading("Side by side" if earlier else "The request")
    rows = compared_fields(_fields(turn), _fields(earlier) if earlier else {})
    shows_all = st.toggle("Show also what is the same", key="all_fields") if earlier else False
    if not shows_all:
        rows = [row for row in rows if row["This request"] != row["Earlier"]]
    parts.table(
        rows,
        "side_by_side",
        "The two requests field by field.",
        height=360,
        hidden=() if earlier else ("Earlier",),
    )


def compared_fields(
    here: Mapping[str, str | None], there: Mapping[str, str | None]
) -> list[Mapping[str, str | None]]:
    """A row for each field of either request."""
    return [
        {"What": name, "This request": here.get(name), "Earlier": there.get(name)}
        for name in {**here, **there}
    ]


def draw_lists(view: View, chosen: Selection) -> None:
    """The requests that read nothing, and those that read a part of what was marked."""
    parts.heading("Requests that read nothing, the newest first")
    turns = view.misses.turns
    if view.turn is None and (turns or view.parts.turns):
        st.caption("Click one to see where its prompt first differs from the one before it.")
    if turns:
        alt_text = f"{formats.counted(len(turns), 'request')} that missed."
        parts.table(turn_table(turns), "misses", alt_text, picked=pick)
    else:
        message = "No requests in this range."
        if view.was_asked:
            message = "Nothing missed in this range." if chosen_reason() is None else "None for it."
        parts.empty(
            f"{message} A marked prompt that is sent for the first time is shown here as a miss.",
            ":material/check_circle:" if view.was_asked else parts.HOURGLASS,
            key="misses",
        )
    if view.parts.turns:
        parts.heading("Requests that read a part of what they marked")
        alt_text = f"{formats.counted(len(view.parts.turns), 'request')} that read in part."
        parts.table(turn_table(view.parts.turns), "parts", alt_text, picked=pick)


def draw_most_frequent(view: View, chosen: Selection) -> None:
    """The most frequent reason among the newest misses, and what to change."""
    misses = view.misses
    counted = Counter(turn.miss_reason for turn in misses.turns)
    if not counted:
        none = "Nothing missed" if chosen_reason() is None else "Nothing missed for this reason"
        parts.hero(f"**{none if view.was_asked else 'Nothing was asked'}** in {chosen.words}.")
        return
    ((most, times),) = counted.most_common(1)
    explanation = advice(most or "")
    count = formats.counted(len(misses.turns), "miss", "misses")
    parts.hero(
        f"Of the newest {count} **{times:,}** {'has' if times == 1 else 'have'} one reason:"
        f" **{explanation.title.lower()}**. {explanation.change}"
    )


def pick(row: Row) -> None:
    st.session_state["miss"] = row["Id"]
    st.session_state["earlier"] = ""


def verdict(turn: Turn, divergence: TurnDivergence | None, before: Turn | None = None) -> Verdict:
    """Judge a turn by its own counts first, then by the comparison.

    `cold` says only that nothing was known of the prefix, so a first difference says more. A
    difference behind the last marker costs nothing.
    """
    read = turn.cache_read_tokens
    written = turn.written_tokens
    difference = divergence if divergence is not None and divergence.kind is not None else None
    if (
        difference is not None
        and read + written
        and (difference.shared_tokens or 0) >= read + written
    ):
        difference = None
    why = advice(difference.kind or "") if difference else None
    if turn.miss_reason == "cold" and before is not None:
        moment = formats.written_moment(before.opened_ms)
        means = f"The same prefix came before, last at {moment} UTC. Its engine held it no more."
        explanation = Advice("Sent before, and not held", means, _AFTER_A_WHILE)
        return Verdict(False, with_reuse(explanation, turn))
    if why and difference is not None and turn.miss_reason in ("cold", difference.kind):
        return Verdict(False, with_reuse(why, turn), difference)
    if (
        turn.miss_reason == "no_breakpoint"
        and why
        and difference is not None
        and is_early(difference)
    ):
        explanation = advice("no_breakpoint")
        change = f"{why.change} Then mark the last block that stays the same."
        return Verdict(False, with_reuse(explanation._replace(change=change), turn), difference)
    if turn.miss_reason is not None:
        explanation = with_reuse(advice(turn.miss_reason), turn)
        if read:
            means = f"{read:,} tokens were read. A later marker was not: {explanation.means}"
            explanation = explanation._replace(means=means)
        return Verdict(False, explanation)
    if not read:
        means = "This request had nothing to read, and no marker missed."
        return Verdict(True, Advice("No miss", means, "Nothing."))
    if not written:
        means = f"All {read:,} tokens up to the last marker were read."
        return Verdict(True, Advice("A hit", means, "Nothing."))
    if difference is None or why is None:
        means = (
            f"{read:,} tokens were read. {written:,} new ones behind them were written for the"
            " next turn."
        )
        return Verdict(True, Advice("A hit that grew", means, "Nothing."))
    means = (
        f"{why.means} {read:,} tokens before it were read, {written:,} behind them were written"
        " anew."
    )
    change = _NEW_CONVERSATION if difference.kind == "messages_changed" else why.change
    return Verdict(False, Advice(why.title, means, change), difference)


def is_early(divergence: TurnDivergence) -> bool:
    """Whether the prompts part before half of the earlier one. A marker behind that only costs."""
    shared = divergence.shared_tokens or 0
    whole = divergence.earlier_tokens or 0
    return 2 * shared < whole and divergence.kind != "model_changed"


def with_reuse(explanation: Advice, turn: Turn) -> Advice:
    """The advice, with what of the prompt was reused from memory without a promise."""
    if not turn.automatic_tokens:
        return explanation
    reused = f" {turn.automatic_tokens:,} of its tokens were in memory all the same, and reused."
    return explanation._replace(means=explanation.means + reused)


def draw_verdict(turn: Turn, divergence: TurnDivergence | None, before: Turn | None) -> None:
    """Draw the verdict. Cards show where the prompts part, if the verdict rests on that."""
    judgement = verdict(turn, divergence, before)
    with st.container(border=True, key="verdict"):
        if judgement.difference is not None:
            draw_difference(judgement.difference, turn)
            if judgement.difference.segment is not None:
                st.caption(known_to(judgement.difference))
        st.badge(
            "Hit" if judgement.is_good else "Read in part" if turn.cache_read_tokens else "Miss",
            icon=":material/check_circle:" if judgement.is_good else ":material/report:",
            color="green" if judgement.is_good else "orange",
        )
        parts.hero(f"**{judgement.advice.title}.** {judgement.advice.means}")
        if not judgement.is_good:
            st.markdown(f"**What to change:** {judgement.advice.change}")
            st.page_link(
                "views/advice.py",
                label="Advice says which markers would pay for requests like this one",
                icon=":material/lightbulb:",
            )
        st.caption(compared_with(divergence, judgement))


def compared_with(divergence: TurnDivergence | None, judgement: Verdict) -> str:
    """What the comparison with an earlier prompt adds to the verdict."""
    if divergence is None:
        return "There is no other prompt to compare it with."
    if divergence.earlier is None:
        return "It differs from its first block on: no earlier prompt of its workspace begins so."
    if divergence.kind is None:
        return (
            "Everything of the most similar earlier prompt is in this one: nothing in the prompt"
            " is to blame."
        )
    if judgement.difference is None:
        return "Where it differs from the most similar earlier prompt is not what decided it."
    if not divergence.shared_tokens:
        return (
            "The two prompts have the same shape and about the same length, but no long prefix in"
            " common. How much of it would have been read is not known."
        )
    return "Compared with the earlier prompt that begins most like it."


def draw_difference(divergence: TurnDivergence, turn: Turn) -> None:
    """Where the prompts part, what was read before that place, and what was lost behind it. The
    place is a section, the block within it and the character within that, counted from 1."""
    section = formats.NO_VALUE
    where = None
    if divergence.section is not None and divergence.block is not None:
        section = (parts.plain(divergence.section) or "").capitalize()
        where = f"block {divergence.block + 1}"
        where += _characters(divergence)
    whole = divergence.earlier_tokens
    with st.grid(5, min_column_width=170):
        parts.card("first_difference", section, delta=where)
        of_prompt = f"of {turn.prompt_tokens:,} in the prompt"
        parts.card("cache_read_tokens", formats.whole(turn.cache_read_tokens), delta=of_prompt)
        parts.card("missed_tokens", formats.whole(divergence.missed_tokens))
        parts.card("missed_nano", formats.dollars(divergence.missed_nano))
        note = None if whole is None else f"of {whole:,} in the earlier prompt"
        shared = formats.whole(divergence.shared_tokens)
        below = divergence.shared_tokens_below
        if not divergence.is_exact and below is not None:
            shared = f"{shared} to {below:,}"
        parts.card("shared_tokens", shared, delta=note)


def known_to(divergence: TurnDivergence) -> str:
    """How exact the place is."""
    if divergence.is_exact or divergence.grid_characters is None:
        return "The place is exact: the workspace keeps what was asked."
    return (
        f"The place is known to {divergence.grid_characters:,} characters, or to a block's end: the"
        " workspace keeps no contents to compare."
    )


def _characters(divergence: TurnDivergence) -> str:
    """How far into the block the difference is, exactly or between which bounds."""
    least = divergence.characters or 0
    below = divergence.characters_below
    if divergence.is_exact:
        return f", after {formats.counted(least, 'character')}"
    if below is not None:
        return f", after {least:,} to {below:,} characters"
    return f", after at least {formats.counted(least, 'character')}" if least else ""


def _fields(turn: Turn) -> dict[str, str | None]:
    moment = formats.written_moment(turn.opened_ms)
    return {"Id": turn.id, "Time (UTC)": moment, **turn_details(turn)}


if __name__ == "__main__":
    parts.title("Why did this miss", "Where does this prompt first differ from the one before it?")
    live.show("why", read, draw, controls=controls)
