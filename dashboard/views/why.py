"""Why did this miss? Where a request differs from the one before it, and what that cost."""

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

    # Turns that read nothing.
    misses: TurnPage
    # Turns that read something, but not all that they marked.
    partial_reads: TurnPage
    # Whether the range has any request.
    has_requests: bool
    examined: "ExaminedTurn"


class ExaminedTurn(NamedTuple):
    """The turn that the page explains, and what it is compared with. If no turn was picked, all
    fields are empty."""

    turn: Turn | None = None
    # Where the turn's prompt differs from the earlier one; None if a prompt left no fingerprint.
    divergence: TurnDivergence | None = None
    # The turn that it is compared with.
    earlier: Turn | None = None
    # The newest earlier turn with the same marked prefix; None unless the turn was cold.
    same_prefix: Turn | None = None
    # Whether there is no such turn.
    is_missing: bool = False


class Verdict(NamedTuple):
    """What the page concludes from a turn's counts and from the comparison."""

    is_good: bool
    advice: Advice
    # Where the prompt differs from the earlier one, if the verdict rests on that.
    difference: TurnDivergence | None = None


def controls() -> None:
    """Draw the filters. The ids have other names in the URL than on the page Requests, because
    Streamlit drops the values of other pages' widgets."""
    with filters.folded("why_filters", lambda: "Request and reason"):
        st.text_input(
            "Request id",
            key="miss",
            placeholder="msg_… or req_…",
            max_chars=64,
            width=330,
            bind="query-params",
        )
        st.text_input(
            "Compare with (optional)",
            key="earlier",
            placeholder="the most similar before it",
            max_chars=64,
            width=330,
            bind="query-params",
        )
        reason_filter("Any reason")


def read(client: AdminClient, selection: Selection) -> View:
    query = {**selection.params(), "miss_reason": chosen_reason() or "any", "limit": NUM_MISSES}
    path = "/admin/v1/turns/search"
    misses = client.get(path, TurnPage, {**query, "has_read": False})
    partial_reads = client.get(path, TurnPage, {**query, "has_read": True})
    has_requests = bool(misses.turns or partial_reads.turns)
    if not has_requests:
        newest = client.get(path, TurnPage, {**selection.params(), "limit": 1})
        has_requests = bool(newest.turns)
    turn_id = (st.session_state.get("miss") or "").strip()
    earlier_id = (st.session_state.get("earlier") or "").strip()
    examined = examine(client, turn_id, earlier_id or None) if turn_id else ExaminedTurn()
    return View(misses, partial_reads, has_requests, examined)


def examine(client: AdminClient, turn_id: str, earlier_id: str | None) -> ExaminedTurn:
    """Compare a turn with the turn `earlier_id`, or with the most similar earlier one if that is
    None. Raise ClientError."""
    try:
        turn = client.get(f"/admin/v1/turns/{segment(turn_id)}", Turn)
    except NotThere:
        return ExaminedTurn(is_missing=True)
    path = f"/admin/v1/turns/{segment(turn.id)}/divergence"
    try:
        divergence = client.get(path, TurnDivergence, {"from": earlier_id})
        earlier = None
        if divergence.earlier is not None:
            earlier = client.get(f"/admin/v1/turns/{segment(divergence.earlier)}", Turn)
    except NotThere:
        return ExaminedTurn(turn, is_missing=earlier_id is not None)
    same_prefix = None
    if turn.miss_reason == "cold" and turn.prefix is not None:
        query = {"since_ms": 0, "until_ms": turn.opened_ms, "prefix": turn.prefix, "limit": 1}
        page = client.get("/admin/v1/turns/search", TurnPage, query)
        same_prefix = next(iter(page.turns), None)
    return ExaminedTurn(turn, divergence, earlier, same_prefix)


def draw(view: View, selection: Selection) -> None:
    examined = view.examined
    turn = examined.turn
    if examined.is_missing:
        parts.empty(NO_SUCH, ":material/search_off:")
    if turn is None:
        draw_most_frequent(view, selection)
    else:
        draw_verdict(turn, examined.divergence, examined.same_prefix)
        draw_marks(turn)
        draw_side_by_side(turn, examined.earlier)
    draw_lists(view)


def draw_side_by_side(turn: Turn, earlier: Turn | None) -> None:
    """Draw the fields in which the two requests differ, or all fields if the reader wants them. If
    there is no earlier request, draw the fields of this one that have a value."""
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
    fields: Mapping[str, str | None], earlier_fields: Mapping[str, str | None]
) -> list[Mapping[str, str | None]]:
    """A row for each field of either request."""
    return [
        {"What": name, "This request": fields.get(name), "Earlier": earlier_fields.get(name)}
        for name in {**fields, **earlier_fields}
    ]


def draw_lists(view: View) -> None:
    """Draw the requests that read nothing, and those that read only a part of what they marked."""
    parts.heading("Requests that read nothing, the newest first")
    turns = view.misses.turns
    partial_reads = view.partial_reads.turns
    if view.examined.turn is None and (turns or partial_reads):
        st.caption("Click one to see where its prompt first differs from the one before it.")
    if turns:
        alt_text = f"{formats.counted(len(turns), 'request')} that missed."
        parts.table(turn_table(turns), "misses", alt_text, on_pick=pick)
    else:
        message = "No requests in this range."
        if view.has_requests:
            message = "Nothing missed in this range."
            if chosen_reason() is not None:
                message = "Nothing missed for this reason in this range."
        parts.empty(
            f"{message} A marked prompt that is sent for the first time is shown here as a miss.",
            ":material/check_circle:" if view.has_requests else parts.HOURGLASS,
            key="misses",
        )
    if partial_reads:
        parts.heading("Requests that read a part of what they marked")
        alt_text = f"{formats.counted(len(partial_reads), 'request')} that read in part."
        parts.table(turn_table(partial_reads), "parts", alt_text, on_pick=pick)


def draw_most_frequent(view: View, selection: Selection) -> None:
    """Draw the most frequent reason of the newest misses, and what to change."""
    turns = view.misses.turns
    if not turns:
        words = "Nothing was asked"
        if view.has_requests and chosen_reason() is None:
            words = "Nothing missed"
        elif view.has_requests:
            words = "Nothing missed for this reason"
        parts.hero(f"**{words}** in {selection.words}.")
        return
    reasons = Counter(turn.miss_reason for turn in turns)
    reason, num_turns = reasons.most_common(1)[0]
    explanation = advice(reason or "")
    count = formats.counted(len(turns), "miss", "misses")
    parts.hero(
        f"Of the newest {count} **{num_turns:,}** {'has' if num_turns == 1 else 'have'} one reason:"
        f" **{explanation.title.lower()}**. {explanation.change}"
    )


def pick(row: Row) -> None:
    st.session_state["miss"] = row["Id"]
    st.session_state["earlier"] = ""


def verdict(
    turn: Turn, divergence: TurnDivergence | None, same_prefix: Turn | None = None
) -> Verdict:
    """Judge a turn by its own counts first, then by the comparison. `same_prefix` is the newest
    earlier turn with the same marked prefix."""
    difference = costly_difference(turn, divergence)
    if turn.miss_reason == "cold" and same_prefix is not None:
        return Verdict(False, with_reuse(_sent_before(same_prefix), turn))
    if turn.miss_reason is not None:
        return _verdict_of_miss(turn, turn.miss_reason, difference)
    return _verdict_of_hit(turn, difference)


def costly_difference(turn: Turn, divergence: TurnDivergence | None) -> TurnDivergence | None:
    """The difference from the earlier prompt; None if there is none or if it cost nothing. A
    difference behind the last marker costs nothing."""
    if divergence is None or divergence.kind is None:
        return None
    marked = turn.cache_read_tokens + turn.written_tokens
    is_behind = marked > 0 and (divergence.shared_tokens or 0) >= marked
    return None if is_behind else divergence


def _sent_before(same_prefix: Turn) -> Advice:
    moment = formats.written_moment(same_prefix.opened_ms)
    means = f"The same prefix came before, last at {moment} UTC. Its engine held it no more."
    return Advice("Sent before, and not held", means, _AFTER_A_WHILE)


def _verdict_of_hit(turn: Turn, difference: TurnDivergence | None) -> Verdict:
    """Judge a turn of which no marker missed."""
    read_tokens = turn.cache_read_tokens
    written_tokens = turn.written_tokens
    if not read_tokens:
        means = "This request had nothing to read, and no marker missed."
        return Verdict(True, Advice("No miss", means, "Nothing."))
    if not written_tokens:
        means = f"All {read_tokens:,} tokens up to the last marker were read."
        return Verdict(True, Advice("A hit", means, "Nothing."))
    if difference is None:
        means = (
            f"{read_tokens:,} tokens were read. {written_tokens:,} new ones behind them were"
            " written for the next turn."
        )
        return Verdict(True, Advice("A hit that grew", means, "Nothing."))
    explanation = advice(difference.kind or "")
    means = (
        f"{explanation.means} {read_tokens:,} tokens before it were read, {written_tokens:,} behind"
        " them were written anew."
    )
    change = explanation.change
    if difference.kind == "messages_changed":
        change = _NEW_CONVERSATION
    return Verdict(False, Advice(explanation.title, means, change), difference)


def _verdict_of_miss(turn: Turn, reason: str, difference: TurnDivergence | None) -> Verdict:
    """Judge a turn by the reason of its miss, or by the difference if that says more. The reason
    `cold` says only that nothing was known of the prefix."""
    if difference is not None:
        cause = advice(difference.kind or "")
        if reason in ("cold", difference.kind):
            return Verdict(False, with_reuse(cause, turn), difference)
        if reason == "no_breakpoint" and is_early(difference):
            change = f"{cause.change} Then mark the last block that stays the same."
            explanation = advice("no_breakpoint")._replace(change=change)
            return Verdict(False, with_reuse(explanation, turn), difference)
    explanation = with_reuse(advice(reason), turn)
    if turn.cache_read_tokens:
        means = (
            f"{turn.cache_read_tokens:,} tokens were read. A later marker was not:"
            f" {explanation.means}"
        )
        explanation = explanation._replace(means=means)
    return Verdict(False, explanation)


def is_early(divergence: TurnDivergence) -> bool:
    """Whether the prompts differ already in the first half of the earlier one. A marker behind such
    a place costs its write, and is never read."""
    shared_tokens = divergence.shared_tokens or 0
    earlier_tokens = divergence.earlier_tokens or 0
    return 2 * shared_tokens < earlier_tokens and divergence.kind != "model_changed"


def with_reuse(explanation: Advice, turn: Turn) -> Advice:
    """The advice with the number of tokens that were reused from memory without a promise."""
    if not turn.automatic_tokens:
        return explanation
    note = f" {turn.automatic_tokens:,} of its tokens were in memory all the same, and reused."
    return explanation._replace(means=explanation.means + note)


def draw_verdict(turn: Turn, divergence: TurnDivergence | None, same_prefix: Turn | None) -> None:
    """Draw the verdict. If it rests on a difference of the prompts, cards show that difference."""
    judgement = verdict(turn, divergence, same_prefix)
    with st.container(border=True, key="verdict"):
        if judgement.difference is not None:
            draw_difference(judgement.difference, turn)
            if judgement.difference.segment is not None:
                st.caption(known_to(judgement.difference))
        if judgement.is_good:
            st.badge("Hit", icon=":material/check_circle:", color="green")
        else:
            label = "Read in part" if turn.cache_read_tokens else "Miss"
            st.badge(label, icon=":material/report:", color="orange")
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
        return "No earlier prompt of its workspace begins like this one."
    if divergence.kind is None:
        return (
            "This prompt has all of the most similar earlier prompt: nothing in the prompt is to"
            " blame."
        )
    if judgement.difference is None:
        return "It differs from the most similar earlier prompt, but that did not decide this."
    if not divergence.shared_tokens:
        return (
            "The two prompts have the same shape and about the same length, but no long prefix in"
            " common. How much would have been read is not known."
        )
    return "Compared with the earlier prompt that begins most like it."


def draw_difference(divergence: TurnDivergence, turn: Turn) -> None:
    """Draw where the prompts differ, what was read before that place, and what was lost behind it.

    The place is a section, the block within the section (counted from 1) and the character within
    the block.
    """
    section = formats.NO_VALUE
    place = None
    if divergence.section is not None and divergence.block is not None:
        section = (parts.plain(divergence.section) or "").capitalize()
        place = f"block {divergence.block + 1}{_characters(divergence)}"
    earlier_tokens = divergence.earlier_tokens
    with st.grid(5, min_column_width=170):
        parts.card("first_difference", section, delta=place)
        of_prompt = f"of {turn.prompt_tokens:,} in the prompt"
        parts.card("cache_read_tokens", formats.whole(turn.cache_read_tokens), delta=of_prompt)
        parts.card("missed_tokens", formats.whole(divergence.missed_tokens))
        parts.card("missed_nano", formats.dollars(divergence.missed_nano))
        note = None
        if earlier_tokens is not None:
            note = f"of {earlier_tokens:,} in the earlier prompt"
        shared = formats.whole(divergence.shared_tokens)
        below = divergence.shared_tokens_below
        if not divergence.is_exact and below is not None:
            shared = f"{shared} to {below:,}"
        parts.card("shared_tokens", shared, delta=note)


def known_to(divergence: TurnDivergence) -> str:
    """A sentence on how exactly the place is known."""
    if divergence.is_exact or divergence.grid_characters is None:
        return "The place is exact: the workspace keeps prompts, which were compared."
    return (
        f"The place is known to within {divergence.grid_characters:,} characters, or to a block's"
        " end: the workspace keeps no prompts to compare."
    )


def _characters(divergence: TurnDivergence) -> str:
    """How many characters of the block stand before the difference: exactly, or by its bounds."""
    least = divergence.characters or 0
    most = divergence.characters_below
    if divergence.is_exact:
        return f", after {formats.counted(least, 'character')}"
    if most is not None:
        return f", after {least:,} to {most:,} characters"
    return f", after at least {formats.counted(least, 'character')}" if least else ""


def _fields(turn: Turn) -> dict[str, str | None]:
    moment = formats.written_moment(turn.opened_ms)
    return {"Id": turn.id, "Time (UTC)": moment, **turn_details(turn)}


if __name__ == "__main__":
    parts.title("Why did this miss", "Where does this prompt first differ from the one before it?")
    live.show("why", read, draw, controls=controls)
