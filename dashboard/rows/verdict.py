"""The one verdict on a request: hit, read in part, or missed, and what follows from it. Pure."""

from dataclasses import dataclass

from dashboard.admin.shapes.turns import Turn, TurnDivergence
from dashboard.ui.advice import Advice, advice

_NEW_CONVERSATION = "Nothing, if it is another conversation. Otherwise only ever append to it."


@dataclass(frozen=True, slots=True)
class Verdict:
    """`difference` is the place where the prompt left the earlier one, where that explains it."""

    is_good: bool
    said: Advice
    difference: TurnDivergence | None = None


def verdict(turn: Turn, found: TurnDivergence | None) -> Verdict:
    """Judge a turn by its own counts first, and by the comparison where these leave it open.

    `cold` says only that nothing was known of the prefix, so a first difference says more. A
    difference behind the last marker costs nothing and is no part of the verdict.
    """
    written = turn.cache_write_5m_tokens + turn.cache_write_1h_tokens
    marked = turn.cache_read_tokens + written
    differs = found if found is not None and found.kind is not None else None
    if differs is not None and marked and (differs.shared_tokens or 0) >= marked:
        differs = None
    if turn.miss_reason is not None:
        if turn.miss_reason == "cold" and differs is not None:
            return Verdict(False, advice(differs.kind or ""), differs)
        return Verdict(False, advice(turn.miss_reason))
    if not turn.cache_read_tokens:
        return Verdict(True, _nothing_marked())
    if not written:
        return Verdict(True, _hit(turn))
    if differs is None:
        return Verdict(True, _grew(turn, written))
    return Verdict(False, _in_part(turn, written, differs), differs)


def _nothing_marked() -> Advice:
    return Advice("No miss", "This request had nothing to read, and no marker missed.", "Nothing.")


def _hit(turn: Turn) -> Advice:
    read = f"All {turn.cache_read_tokens:,} tokens up to the last marker were read."
    return Advice("A hit", read, "Nothing.")


def _grew(turn: Turn, written: int) -> Advice:
    means = (
        f"{turn.cache_read_tokens:,} tokens were read. {written:,} new ones behind them were"
        " written for the next turn."
    )
    return Advice("A hit that grew", means, "Nothing.")


def _in_part(turn: Turn, written: int, found: TurnDivergence) -> Advice:
    why = advice(found.kind or "")
    means = (
        f"{why.means} {turn.cache_read_tokens:,} tokens before it were read,"
        f" {written:,} behind them were written anew."
    )
    is_message = found.kind == "messages_changed"
    change = _NEW_CONVERSATION if is_message else why.change
    return Advice(why.title, means, change)
