"""Prefixes and leases: what is held right now, for how long, and is it worth it?"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import streamlit as st

from dashboard.client import AdminClient, ClientError, NotAnswered, NotThere
from dashboard.ui import conditions, formats, live, parts, viewer
from dashboard.ui.charts import Row
from dashboard.ui.filters import Selection
from dashboard.ui.parts import in_dollars
from dashboard.views.savings import first_words, held_label, reads_per_write
from engine.protocol import TTLS, BestEffortReason
from engine.protocol.reports import EntryInfo
from gateway.structs.conditions import Condition
from gateway.structs.fleet import Dropped, LiveEntry

REFRESH_SECONDS = 3
NUM_LEASES = 500
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
_DOOMED = "lease_to_drop"
_OUTCOME = "drop_outcome"


class View(NamedTuple):
    """What the page shows."""

    leases: list[LiveEntry]
    # The engines whose leases are not known now, and why.
    silent: list[Condition]
    # The first words of prefixes, by the id of their last request.
    words: Mapping[str, str]


def read(client: AdminClient, chosen: Selection) -> View:
    held = {"workspace": chosen.workspace, "engine": chosen.engine, "limit": NUM_LEASES}
    leases = client.get("/admin/v1/leases", list[LiveEntry], held)
    ordered = sorted(leases, key=worth, reverse=True)
    words = first_words(client, (lease.prefix.look for lease in ordered if lease.prefix))
    return View(ordered, conditions.silent(client, chosen.engine), words)


def draw(view: View, chosen: Selection) -> None:
    draw_cards(view.leases, view.silent)
    draw_leases(view)
    st.page_link(
        "views/savings.py",
        label="Savings says of each prefix whether it has paid for its writes",
        icon=":material/arrow_forward:",
    )


def draw_cards(leases: list[LiveEntry], silent: list[Condition]) -> None:
    held = [lease for lease in leases if lease.entry.state == "leased"]
    promised = by_prefix(held)
    all_held = by_prefix(leases)
    # Several leases, on several engines, may hold one prefix: its savings count once.
    nets = [lease.prefix.saved_nano for (lease, *_) in all_held if lease.prefix is not None]
    known_nets = [net for net in nets if net is not None]
    next_end = min((lease.entry.expires_in_seconds for lease in held), default=None)
    # Engines of one model hold the same tokens; those of another model hold others.
    tokens = sum(
        max(lease.entry.own_tokens for lease in same) for same in by_prefix(held, by_model=True)
    )
    if held:
        words = formats.counted(len(promised), "prefix is", "prefixes are")
        by = "" if len(promised) == len(held) else f", by {formats.counted(len(held), 'lease')}"
        parts.hero(
            f"**{words} promised** right now{by}:"
            f" {formats.in_words(tokens)} tokens that need not be computed again."
        )
    elif silent:
        parts.hero("**What is promised is not known** right now.")
    else:
        parts.hero("**No prefix is promised** right now.")
    if silent and held:
        count = formats.counted(len(silent), "engine")
        st.caption(f"Without what {count} may hold that can't say so now.")
    if len(leases) >= NUM_LEASES:
        st.caption(f"Of the {NUM_LEASES:,} largest that are held: there may be more.")
    with st.grid(4, min_column_width=190):
        note = f"{len(leases) - len(held)} more best effort" if leases else None
        is_known = bool(held) or not silent
        count = formats.compact(len(held)) if is_known else formats.NO_VALUE
        parts.card("leases", count, delta=note)
        parts.card("leased_tokens", formats.compact(tokens) if is_known else formats.NO_VALUE)
        parts.card("ttl_left", formats.NO_VALUE if next_end is None else time_left(next_end))
        prefixes = f"{formats.counted(len(all_held), 'prefix', 'prefixes')}, each once"
        note = prefixes if is_known else None
        parts.money_card("lease_saved_nano", sum(known_nets) if known_nets else None, delta=note)


def by_prefix(leases: Sequence[LiveEntry], *, by_model: bool = False) -> list[list[LiveEntry]]:
    """The leases of each prefix, of all models together or apart. A prefix without a name goes by
    its entry, which is the same on every engine of a model."""
    groups: dict[tuple[str | None, str | None, str], list[LiveEntry]] = {}
    for lease in leases:
        model = lease.model if by_model else None
        key = lease.workspace, model, lease.entry.name or lease.entry.entry
        groups.setdefault(key, []).append(lease)
    return list(groups.values())


def time_left(seconds: float) -> str:
    """The time that is left in minutes and seconds: 4:07, 59:30."""
    whole = max(int(seconds), 0)
    return f"{whole // 60}:{whole % 60:02}"


def draw_leases(view: View) -> None:
    leases = view.leases
    silent = view.silent
    parts.heading("Held now", "leases")
    outcome = st.session_state.get(_OUTCOME)
    if outcome is not None:
        st.info(outcome, icon=":material/delete:")
    if not (leases or silent):
        parts.empty(
            "Nothing is held: no engine is running, or no marked prompt came within its TTL.",
            ":material/lock_open:",
            key="leases",
        )
        return
    parts.table(
        [*silent_rows(silent), *lease_table(leases, view.words)],
        "leases",
        f"{formats.counted(len(leases), 'entry', 'entries')} that engines hold"
        f" of {formats.counted(len(by_prefix(leases)), 'prefix', 'prefixes')}, by their worth.",
        hidden=("Entry",),
        height=min(38 + 35 * (len(leases) + len(silent)), 420),
        picked=_doom if leases and viewer.may_change() else None,
    )
    if leases and viewer.may_change():
        draw_drop(leases, view.words)


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


def worth(lease: LiveEntry) -> tuple[int, int, int]:
    """The order of leases, the most first: what their prefix saved, then how often they were read,
    then their size."""
    net = lease.prefix.saved_nano if lease.prefix else None
    return net or 0, lease.entry.reads, lease.entry.tokens


def lease_table(leases: Sequence[LiveEntry], words: Mapping[str, str]) -> list[Row]:
    """One row for each lease, in their order. Prefixes that came once, or have no price, have
    no net savings."""
    return [_lease_row(lease, words) for lease in leases]


def _lease_row(lease: LiveEntry, words: Mapping[str, str]) -> Row:
    entry = lease.entry
    look = lease.prefix.look if lease.prefix else None
    return {
        "Prefix": lease_label(lease, words),
        "Net saved ($)": in_dollars(lease.prefix.saved_nano if lease.prefix else None),
        parts.READS_PER_WRITE: reads_per_write(lease.prefix) if lease.prefix else None,
        "Tokens": entry.tokens,
        "State": state_of(entry),
        # Cached contents end when their clients said.
        "TTL": entry.ttl if entry.expires_in_seconds <= TTLS[entry.ttl].seconds else "its own",
        "Ends in": time_left(entry.expires_in_seconds),
        # At most all of it, also where an engine's clock differs.
        "TTL left": min(max(entry.expires_in_seconds / TTLS[entry.ttl].seconds, 0.0), 1.0),
        parts.REQUESTS_OF: parts.requests_of(entry.name, lease.workspace) if look else None,
        "Workspace": lease.workspace,
        "Model": lease.model,
        "Engine": lease.engine,
        "Reads": entry.reads,
        "Last used (UTC)": formats.moment(look.last_ms) if look else None,
        "Client": look.user_agent if look else None,
        "Blocks": entry.blocks,
        "Shared by": entry.shared_by,
        "Last request": look.last_turn if look else None,
        "Cached content": lease.cached_content,
        "Prefix id": (entry.name or entry.entry)[:16],
        "Entry": entry.entry,
    }


def state_of(entry: EntryInfo) -> str:
    """The state in words, with the reason where nothing holds the entry."""
    state = entry.state.replace("_", " ")
    return f"{state}: {REASONS[entry.reason]}" if entry.reason else state


def lease_label(lease: LiveEntry, words: Mapping[str, str]) -> str:
    """What a person can recognise the lease by."""
    look = lease.prefix.look if lease.prefix else None
    entry = lease.entry
    return held_label(look, entry.tokens, entry.name or entry.entry, words)


def _doom(row: Row) -> None:
    st.session_state[_DOOMED] = row["Entry"], row["Engine"]
    st.session_state.pop(_OUTCOME, None)


def draw_drop(leases: list[LiveEntry], words: Mapping[str, str]) -> None:
    """What was picked, and the button that really ends it."""
    doomed = st.session_state.get(_DOOMED)
    lease = next(
        (candidate for candidate in leases if (candidate.entry.entry, candidate.engine) == doomed),
        None,
    )
    if lease is None:
        st.caption("Pick a row to end its lease before its time.")
        return
    with st.container(border=True, key="drop"):
        st.text(
            f"{lease_label(lease, words)} · {lease.entry.tokens:,} tokens on"
            f" {lease.engine}, ends by itself in {time_left(lease.entry.expires_in_seconds)}"
        )
        if lease.workspace is None:
            st.caption("It belongs to no workspace of this gateway, so it can't be dropped here.")
            return
        with st.container(horizontal=True):
            help_text = "Drop it: the next turn pays for it again"
            keep = st.session_state.pop
            st.button(help_text, key="drop_now", on_click=_drop, args=(lease,))
            st.button("Keep it", key="drop_not", on_click=keep, args=(_DOOMED, None))


def _drop(lease: LiveEntry) -> None:
    """Drop a lease. This is called before a run, so that the run shows the outcome, whether it is a
    run of the page or of this part. A run of the whole page that asked for another run of its part
    would fail."""
    path = f"/admin/v1/leases/{lease.entry.entry}"
    params = {"workspace": lease.workspace, "engine": lease.engine}
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
    st.session_state.pop(_DOOMED, None)


if __name__ == "__main__":
    parts.title("Prefixes and leases", "What is held right now, for how long, and is it worth it?")
    live.show("prefixes", read, draw, refresh_seconds=REFRESH_SECONDS)
