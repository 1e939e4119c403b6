"""Prefixes and leases: what is held right now, for how long, and is it worth it?"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import streamlit as st

from dashboard.client import AdminClient, ClientError, NotAnswered, NotThere
from dashboard.ui import conditions, formats, live, parts, viewer
from dashboard.ui.charts import Row
from dashboard.ui.filters import Selection
from dashboard.ui.parts import in_dollars
from dashboard.ui.prefix_labels import entry_label, first_words
from dashboard.views.savings import reads_per_write
from engine.protocol import TTLS, BestEffortReason
from engine.protocol.reports import EntryInfo
from gateway.structs.conditions import Condition
from gateway.structs.fleet import Dropped, LiveEntry

REFRESH_SECONDS = 3
NUM_ENTRIES = 500
_COLUMNS = (
    "Prefix",
    "Net saved ($)",
    parts.READS_PER_WRITE,
    "Tokens",
    "State",
    "TTL",
    "Ends in",
    "TTL left",
    parts.REQUESTS_OF,
    "Workspace",
    "Model",
    "Engine",
    "Reads",
    "Last used (UTC)",
    "Client",
    "Blocks",
    "Shared by",
    "Last request",
    "Cached content",
    "Prefix id",
    "Entry",
)
REASONS: dict[BestEffortReason, str] = {
    "automatic": "nobody marked it",
    "over_budget": "over the lease budget",
    "sacrificed": "a running request needed its blocks",
    "yielded": "another workspace needed its share",
    "on_host": "in host memory",
    "on_disk": "on disk",
    "no_hold": "this engine holds nothing",
}
"""Why an entry is best effort."""
_TO_DROP = "lease_to_drop"
_OUTCOME = "drop_outcome"


class View(NamedTuple):
    """What the page shows."""

    # What engines hold, leased or not. The entries that are worth most come first.
    entries: list[LiveEntry]
    # The engines that do not tell now what they hold, and why.
    silent: list[Condition]
    # The first words of prefixes, by the id of their last request.
    words: Mapping[str, str]


def read(client: AdminClient, selection: Selection) -> View:
    query = {"workspace": selection.workspace, "engine": selection.engine, "limit": NUM_ENTRIES}
    entries = client.get("/admin/v1/leases", list[LiveEntry], query)
    entries = sorted(entries, key=worth, reverse=True)
    words = first_words(client, (entry.prefix.look for entry in entries if entry.prefix))
    return View(entries, conditions.silent(client, selection.engine), words)


def draw(view: View, selection: Selection) -> None:
    draw_cards(view.entries, view.silent)
    draw_entries(view)
    st.page_link(
        "views/savings.py",
        label="Savings says of each prefix whether it has paid for its writes",
        icon=":material/arrow_forward:",
    )


def draw_cards(entries: list[LiveEntry], silent: list[Condition]) -> None:
    leased = [entry for entry in entries if entry.entry.state == "leased"]
    draw_sentence(leased, silent)
    if len(entries) >= NUM_ENTRIES:
        st.caption(f"Of the {NUM_ENTRIES:,} largest that are held: there may be more.")
    prefixes = by_prefix(entries)
    # Entries of one prefix, on several engines, have the same savings, which count once.
    nets = [group[0].prefix.saved_nano for group in prefixes if group[0].prefix is not None]
    known_nets = [net for net in nets if net is not None]
    next_end = min((entry.entry.expires_in_seconds for entry in leased), default=None)
    is_known = bool(leased) or not silent
    with st.grid(4, min_column_width=190):
        note = f"{len(entries) - len(leased)} more best effort" if entries else None
        count = formats.compact(len(leased)) if is_known else formats.NO_VALUE
        parts.card("leases", count, delta=note)
        tokens = formats.compact(leased_tokens(leased)) if is_known else formats.NO_VALUE
        parts.card("leased_tokens", tokens)
        parts.card("ttl_left", formats.NO_VALUE if next_end is None else time_left(next_end))
        words = f"{formats.counted(len(prefixes), 'prefix', 'prefixes')}, each once"
        note = words if is_known else None
        parts.money_card("lease_saved_nano", sum(known_nets) if known_nets else None, delta=note)


def draw_sentence(leased: list[LiveEntry], silent: list[Condition]) -> None:
    """Draw the page's sentence: how much is promised, as far as that is known."""
    if leased:
        num_prefixes = len(by_prefix(leased))
        words = formats.counted(num_prefixes, "prefix is", "prefixes are")
        leases = ""
        if num_prefixes != len(leased):
            leases = f", by {formats.counted(len(leased), 'lease')}"
        tokens = formats.in_words(leased_tokens(leased))
        parts.hero(
            f"**{words} promised** right now{leases}: {tokens} tokens that need not be computed"
            " again."
        )
    elif silent:
        parts.hero("**What is promised is not known** right now.")
    else:
        parts.hero("**No prefix is promised** right now.")
    if silent and leased:
        count = formats.counted(len(silent), "engine")
        st.caption(f"{count} can't say now what is held there. That is not counted here.")


def leased_tokens(leased: Sequence[LiveEntry]) -> int:
    """The tokens that leases hold. Engines of one model hold the same tokens, which count once.
    Engines of another model hold other tokens."""
    groups = by_prefix(leased, by_model=True)
    return sum(max(entry.entry.own_tokens for entry in group) for group in groups)


def by_prefix(entries: Sequence[LiveEntry], *, by_model: bool = False) -> list[list[LiveEntry]]:
    """Group entries by prefix, or by prefix and model. An entry whose prefix has no name is grouped
    by its id, which is the same on every engine of a model."""
    groups: dict[tuple[str | None, str | None, str], list[LiveEntry]] = {}
    for entry in entries:
        model = entry.model if by_model else None
        key = (entry.workspace, model, entry.entry.name or entry.entry.entry)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def time_left(seconds: float) -> str:
    """A number of seconds as minutes and seconds, such as 4:07 or 59:30."""
    whole = max(int(seconds), 0)
    return f"{whole // 60}:{whole % 60:02}"


def draw_entries(view: View) -> None:
    entries = view.entries
    silent = view.silent
    may_drop = bool(entries) and viewer.may_change()
    parts.heading("Held now", "leases")
    outcome = st.session_state.get(_OUTCOME)
    if outcome is not None:
        st.info(outcome, icon=":material/delete:")
    if not (entries or silent):
        parts.empty(
            "Nothing is held: no engine is running, or no marked prompt came within its TTL.",
            ":material/lock_open:",
            key="leases",
        )
        return
    parts.table(
        [*silent_rows(silent), *entry_table(entries, view.words)],
        "leases",
        f"{formats.counted(len(entries), 'entry', 'entries')} that engines hold"
        f" of {formats.counted(len(by_prefix(entries)), 'prefix', 'prefixes')}, by their worth.",
        hidden=("Entry",),
        height=min(38 + 35 * (len(entries) + len(silent)), 420),
        on_pick=_choose_to_drop if may_drop else None,
    )
    if may_drop:
        draw_drop(entries, view.words)


def silent_rows(silent: Sequence[Condition]) -> list[Row]:
    """One row for each engine that does not tell what it holds."""
    return [
        {
            **dict.fromkeys(_COLUMNS),
            "Prefix": f"{condition.engine or 'an engine'}: {conditions.not_known(condition)}",
            "Engine": condition.engine,
            "State": "not known",
        }
        for condition in silent
    ]


def worth(entry: LiveEntry) -> tuple[int, int, int]:
    """What entries are sorted by: what their prefix saved, then how often they were read, then
    their size."""
    net = entry.prefix.saved_nano if entry.prefix else None
    return net or 0, entry.entry.reads, entry.entry.tokens


def entry_table(entries: Sequence[LiveEntry], words: Mapping[str, str]) -> list[Row]:
    """One row for each entry, in the same order. An entry has no net savings if its prefix came
    only once, or has no price."""
    return [_entry_row(entry, words) for entry in entries]


def _share_left(info: EntryInfo) -> float:
    """The share of its TTL that is left to an entry. It is at most 1, even if the engine's clock
    differs."""
    return min(max(info.expires_in_seconds / TTLS[info.ttl].seconds, 0.0), 1.0)


def _entry_row(entry: LiveEntry, words: Mapping[str, str]) -> Row:
    info = entry.entry
    look = entry.prefix.look if entry.prefix else None
    return {
        "Prefix": label_of(entry, words),
        "Net saved ($)": in_dollars(entry.prefix.saved_nano if entry.prefix else None),
        parts.READS_PER_WRITE: reads_per_write(entry.prefix) if entry.prefix else None,
        "Tokens": info.tokens,
        "State": state_of(info),
        "TTL": "its own" if entry.has_own_end else info.ttl,
        "Ends in": time_left(info.expires_in_seconds),
        "TTL left": None if entry.has_own_end else _share_left(info),
        parts.REQUESTS_OF: parts.requests_of(info.name, entry.workspace) if look else None,
        "Workspace": entry.workspace,
        "Model": entry.model,
        "Engine": entry.engine,
        "Reads": info.reads,
        "Last used (UTC)": formats.moment(look.last_ms) if look else None,
        "Client": look.user_agent if look else None,
        "Blocks": info.blocks,
        "Shared by": info.shared_by,
        "Last request": look.last_turn if look else None,
        "Cached content": entry.cached_content,
        "Prefix id": (info.name or info.entry)[:16],
        "Entry": info.entry,
    }


def state_of(info: EntryInfo) -> str:
    """The state in words, with the reason if no lease holds the entry."""
    state = info.state.replace("_", " ")
    return f"{state}: {REASONS[info.reason]}" if info.reason else state


def label_of(entry: LiveEntry, words: Mapping[str, str]) -> str:
    """What a person can recognise the entry by."""
    look = entry.prefix.look if entry.prefix else None
    info = entry.entry
    return entry_label(look, info.tokens, info.name or info.entry, words)


def _choose_to_drop(row: Row) -> None:
    st.session_state[_TO_DROP] = (row["Entry"], row["Engine"])
    st.session_state.pop(_OUTCOME, None)


def draw_drop(entries: list[LiveEntry], words: Mapping[str, str]) -> None:
    """Draw the entry that was picked, and the button that really drops it."""
    key = st.session_state.get(_TO_DROP)
    entry = next((entry for entry in entries if (entry.entry.entry, entry.engine) == key), None)
    if entry is None:
        st.caption("Pick a row to end its lease before its time.")
        return
    with st.container(border=True, key="drop"):
        st.text(
            f"{label_of(entry, words)} · {entry.entry.tokens:,} tokens on"
            f" {entry.engine}, ends by itself in {time_left(entry.entry.expires_in_seconds)}"
        )
        if entry.workspace is None:
            st.caption("It belongs to no workspace of this gateway, so it can't be dropped here.")
            return
        with st.container(horizontal=True):
            label = "Drop it: the next turn pays for it again"
            st.button(label, key="drop_now", on_click=_drop, args=(entry,))
            forget = st.session_state.pop
            st.button("Keep it", key="drop_not", on_click=forget, args=(_TO_DROP, None))


def _drop(entry: LiveEntry) -> None:
    """Drop an entry. Streamlit calls this before a run, and the run shows the outcome.

    The run may be one of the whole page or of this part. A run of the whole page would fail if it
    asked for another run of this part.
    """
    path = f"/admin/v1/leases/{entry.entry.entry}"
    params = {"workspace": entry.workspace, "engine": entry.engine}
    outcome = "Dropped. The engine holds it no more."
    try:
        viewer.session().client.change("DELETE", path, Dropped, params=params)
    except NotThere:
        outcome = "It had ended already."
    except NotAnswered as error:
        outcome = f"{error} Whether the engine holds it still is not known: the table tells."
    except ClientError as error:
        outcome = f"{error} Nothing was dropped."
    st.session_state[_OUTCOME] = outcome
    st.session_state.pop(_TO_DROP, None)


if __name__ == "__main__":
    parts.title("Prefixes and leases", "What is held right now, for how long, and is it worth it?")
    live.show("prefixes", read, draw, refresh_seconds=REFRESH_SECONDS)
