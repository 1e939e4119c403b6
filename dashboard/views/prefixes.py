"""Prefixes and leases: what is held right now, for how long, and is it worth it?"""

from dataclasses import dataclass

import streamlit as st

from dashboard.admin.client import AdminClient, ClientError, NotThere
from dashboard.admin.shapes.leases import Dropped, Lease
from dashboard.admin.shapes.savings import PrefixReport
from dashboard.rows.leases import lease_label, lease_table, time_left
from dashboard.rows.row import Row
from dashboard.rows.savings import prefix_table
from dashboard.ui import formats, live, parts, viewer
from dashboard.ui.selection import Selection

REFRESH_SECONDS = 3
NUM_LEASES = 500
NUM_PREFIXES = 100
_DOOMED = "lease_to_drop"
_OUTCOME = "drop_outcome"


@dataclass(frozen=True, slots=True)
class View:
    leases: list[Lease]
    prefixes: list[PrefixReport]


def read(client: AdminClient, chosen: Selection) -> View:
    params = {name: value for name, value in chosen.params().items() if name != "engine"}
    held = {"workspace": chosen.workspace, "engine": chosen.engine, "limit": NUM_LEASES}
    return View(
        client.get("/admin/v1/leases", list[Lease], held),
        client.get("/admin/v1/prefixes", list[PrefixReport], {**params, "limit": NUM_PREFIXES}),
    )


def draw(view: View, chosen: Selection) -> None:
    draw_cards(view.leases)
    draw_leases(view.leases)
    draw_prefixes(view.prefixes, chosen, has_leases=bool(view.leases))


def draw_cards(leases: list[Lease]) -> None:
    held = [lease for lease in leases if lease.entry.state == "leased"]
    nets = [lease.prefix.saved_nano for lease in leases if lease.prefix is not None]
    known = [net for net in nets if net is not None]
    net = sum(known) if known else None
    next_end = min((lease.entry.expires_in_seconds for lease in held), default=None)
    tokens = sum(lease.entry.tokens for lease in held)
    if held:
        promised = formats.counted(len(held), "prefix is", "prefixes are")
        parts.hero(
            f"**{promised} promised** right now:"
            f" {formats.in_words(tokens)} tokens that need not be computed again."
        )
    else:
        parts.hero("**No prefix is promised** right now.")
    with st.grid(4, min_column_width=190, row_height=132):
        parts.card(
            "leases",
            formats.compact(len(held)),
            delta=f"{len(leases) - len(held)} more best effort" if leases else None,
        )
        parts.card("leased_tokens", formats.compact(sum(lease.entry.tokens for lease in held)))
        parts.card("ttl_left", formats.NO_VALUE if next_end is None else time_left(next_end))
        parts.card("lease_saved_nano", formats.dollars(net), is_loss=net is not None and net < 0)


def draw_leases(leases: list[Lease]) -> None:
    parts.heading("Held now", "leases")
    if (outcome := st.session_state.get(_OUTCOME)) is not None:
        st.info(outcome, icon=":material/delete:")
    if not leases:
        parts.empty(
            "Nothing is held: no engine is running, or no marked prompt came within its TTL.",
            ":material/lock_open:",
            key="leases",
        )
        return
    number = st.column_config.NumberColumn
    parts.table(
        lease_table(leases),
        "leases",
        alt_text=f"{len(leases)} prefixes that engines hold, the largest first.",
        columns={
            "TTL left": st.column_config.ProgressColumn(
                format=" ", min_value=0, max_value=1, width="small"
            ),
            "Tokens": number(format="localized"),
            "Net saved ($)": parts.money_column(),
            "Entry": None,
            "Last used (UTC)": parts.moment_column(),
        },
        height=min(38 + 35 * len(leases), 420),
        picked=_doom if _is_admin() else None,
    )
    if _is_admin():
        draw_drop(leases)


def _is_admin() -> bool:
    session = viewer.session()
    return session is not None and session.workspace is None


def _doom(row: Row) -> None:
    st.session_state[_DOOMED] = row["Entry"], row["Engine"], row["Workspace"]
    st.session_state.pop(_OUTCOME, None)


def draw_drop(leases: list[Lease]) -> None:
    """What was picked, and the button that really ends it."""
    doomed = st.session_state.get(_DOOMED)
    found = [e for e in leases if doomed and (e.entry.entry, e.engine) == doomed[:2]]
    if not found:
        st.caption("Pick a row to end its lease before its time.")
        return
    (lease,) = found[:1]
    with st.container(border=True, key="drop"):
        st.text(
            f"{lease_label(lease)} · {lease.entry.tokens:,} tokens on"
            f" {lease.engine}, ends by itself in {time_left(lease.entry.expires_in_seconds)}"
        )
        if lease.workspace is None:
            st.caption("It belongs to no workspace of this gateway, so it can't be dropped here.")
            return
        with st.container(horizontal=True):
            st.button(
                "Drop it: the next turn pays for it again",
                key="drop_now",
                type="primary",
                on_click=_drop,
                args=(lease,),
            )
            st.button("Keep it", key="drop_not", on_click=_keep)


def _keep() -> None:
    st.session_state.pop(_DOOMED, None)


def _drop(lease: Lease) -> None:
    """Before a run, so that the run shows what became of it, be it the page's or this part's.

    A run that asks for another one of its part alone fails where it is a run of the whole page.
    """
    path = f"/admin/v1/leases/{lease.entry.entry}"
    params = {"workspace": lease.workspace, "engine": lease.engine}
    try:
        viewer.client().change("DELETE", path, Dropped, params=params)
    except NotThere:
        st.session_state[_OUTCOME] = "It had ended already."
    except ClientError:
        st.session_state[_OUTCOME] = "The gateway could not drop it. Nothing has changed."
    else:
        st.session_state[_OUTCOME] = "Dropped. The engine holds it no more."
    st.session_state.pop(_DOOMED, None)


def draw_prefixes(prefixes: list[PrefixReport], chosen: Selection, *, has_leases: bool) -> None:
    parts.heading(f"Prefixes that came again in {chosen.words}", "better_ttl")
    if not prefixes:
        parts.empty(
            "No marked prefix came twice in this range.",
            ":material/repeat:",
            # One such request is enough on a page.
            key="prefixes" if has_leases else None,
        )
        return
    parts.table(
        prefix_table(prefixes),
        "prefixes",
        alt_text=f"{len(prefixes)} prefixes with their reads, and whether each has paid back.",
        columns={
            "Net ($)": parts.money_column(),
            "It would save ($)": parts.money_column(),
            "Last used (UTC)": parts.moment_column(),
        },
        height=420 if len(prefixes) > 10 else "auto",
    )


parts.title("Prefixes and leases", "What is held right now, for how long, and is it worth it?")
live.show("prefixes", read, draw, refresh_seconds=REFRESH_SECONDS)
