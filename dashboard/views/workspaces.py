"""Workspaces: who uses the cache, how well, and within which limits? An admin changes them here.

What can't be taken back is asked for twice. A new key is shown until it is dismissed or the session
ends, also on a page that is loaded again. It is kept in this process and nowhere else.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, get_args

import streamlit as st

from dashboard.access.sessions import Outcome
from dashboard.client import AdminClient, ClientError, NotAnswered, Refused, segment
from dashboard.ui import formats, live, parts, viewer
from dashboard.ui.charts import Row
from dashboard.ui.filters import CUSTOM, Selection
from dashboard.ui.parts import in_dollars
from dashboard.views.savings import group_table
from gateway.structs.fleet import AutoCacheMode, AutoCacheTtl, KeyInfo, KeyScope, Workspace
from gateway.structs.usage import Group, Limited

_SCOPES = get_args(KeyScope)
_GRACES = {"1 day": 86_400.0, "1 hour": 3600.0, "none: it ends now": 0.0}
_NO_LIMIT = "no limit"
_INSTALLATION = ""
"""Chosen in a form: the installation's setting holds."""
# How many forms were filled in and taken. The next one is new and empty.
_NUM_TAKEN = "num_forms_taken"


class View(NamedTuple):
    """`month` are the turns of this calendar month (UTC), which spend limits count."""

    workspaces: list[Workspace]
    groups: list[Group]
    month: list[Group]
    keys: list[KeyInfo]
    by_key: list[Group]
    limited: list[Limited]


def read(client: AdminClient, chosen: Selection) -> View:
    # Sums by key are of all engines.
    params = chosen.params("engine")
    now = datetime.now(UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    of_month = {
        "since_ms": int(month.timestamp() * 1000),
        "until_ms": params["until_ms"] if chosen.range != CUSTOM else int(now.timestamp() * 1000),
        "workspace": chosen.workspace,
        "group_by": "workspace",
    }
    path = "/admin/v1/usage/groups"
    return View(
        client.get("/admin/v1/workspaces", list[Workspace]),
        client.get(path, list[Group], {**params, "group_by": "workspace"}),
        client.get(path, list[Group], of_month),
        client.get("/admin/v1/keys", list[KeyInfo], {"workspace": chosen.workspace}),
        client.get(path, list[Group], {**params, "group_by": "key"}),
        client.get("/admin/v1/refusals/limits", list[Limited], {"workspace": chosen.workspace}),
    )


def draw(view: View, chosen: Selection) -> None:
    selected = [w for w in view.workspaces if chosen.workspace in (None, w.id)]
    draw_cards(view, selected, chosen)
    # Its place is always there, so that the forms below keep what is typed.
    with st.container(key="manage_place"):
        draw_outcome()
    if viewer.may_change():
        draw_forms(view.workspaces, view.keys)
    parts.heading("Use of the cache in this range")
    if view.groups:
        names = {workspace.id: workspace.display_name for workspace in view.workspaces}
        rows = group_table(view.groups, "workspace", "Workspace")
        rows = [{"Workspace": None, "Name": names.get(row["Workspace"]), **row} for row in rows]
        parts.table(
            rows, "workspaces", f"Usage of {formats.counted(len(view.groups), 'workspace')}."
        )
    else:
        parts.empty("No requests in this range.", key="workspaces")
    parts.heading("Limits, and what this month has cost", "month_cost")
    parts.table(
        limit_table(selected, view.month),
        "limits",
        f"Limits of {formats.counted(len(selected), 'workspace')}.",
    )
    if view.limited:
        parts.heading("Refused by a limit since this gateway's start")
        rows = limited_table(view.limited, view.keys)
        parts.table(
            rows,
            "limited",
            f"{formats.counted(len(rows), 'row')} of keys and limits, the most refused first.",
        )
    parts.heading("Keys")
    if view.keys:
        rows = key_table(view.keys, view.by_key)
        parts.table(
            rows, "keys", f"{formats.counted(len(view.keys), 'key')}, with their use in this range."
        )
    else:
        parts.empty("There is no key in the ledger.", ":material/key:")


def draw_cards(view: View, selected: list[Workspace], chosen: Selection) -> None:
    saving = sum(group.saved_nano > 0 for group in view.groups)
    count = formats.counted(len(view.groups), "workspace")
    if view.groups:
        parts.hero(
            f"**{saving:,} of {count}** with requests in {chosen.words}"
            f" {'saves' if saving == 1 else 'save'} by caching."
        )
    else:
        parts.hero(f"**No workspace** sent a request in {chosen.words}.")
    with st.grid(4, min_column_width=190):
        parts.card("workspaces", f"{sum(w.archived_at is None for w in selected):,}")
        parts.card("active_workspaces", f"{len(view.groups):,}")
        for label, pick in (("Best net saved", max), ("Worst net saved", min)):
            group = pick(view.groups, key=lambda usage_group: usage_group.saved_nano, default=None)
            saved = group.saved_nano if group and group.totals.is_priced else None
            name = parts.plain(group.workspace) if group else None
            parts.money_card("saved_nano", saved, label, delta=name)
    parts.placeholder_prices()


def limit_table(workspaces: Sequence[Workspace], month: Sequence[Group]) -> list[Row]:
    spent = {group.workspace: group.totals.cost_nano for group in month}
    return [
        {
            "Workspace": workspace.id,
            "This month ($)": in_dollars(spent.get(workspace.id, 0)),
            "Spend limit ($)": in_dollars(workspace.monthly_spend_nano),
            "Name": workspace.display_name,
            "Of the limit": min(spent.get(workspace.id, 0) / workspace.monthly_spend_nano, 1.0)
            if workspace.monthly_spend_nano
            else None,
            "Requests per minute": workspace.requests_per_minute,
            "Tokens per minute": workspace.tokens_per_minute,
            "At once": workspace.max_concurrency,
            "Lease share": workspace.lease_share,
            "Keeps prompts (days)": workspace.keep_days,
            "Archived": workspace.archived_at.date() if workspace.archived_at else None,
        }
        for workspace in workspaces
    ]


def limited_table(limited: Sequence[Limited], keys: Sequence[KeyInfo]) -> list[Row]:
    names = {key.id: key.name for key in keys}
    return [
        {
            "Workspace": limit.workspace,
            "Key": names.get(limit.key, limit.key),
            "Limit": limit.limit,
            "Refused requests": limit.requests,
            "Last (UTC)": formats.moment(limit.last_ms),
        }
        for limit in limited
    ]


def key_table(keys: Sequence[KeyInfo], groups: Sequence[Group]) -> list[Row]:
    """The most used first; a key without a turn in the range has dashes."""
    used = {group.key: group for group in groups}
    rows = [_key_row(key, used.get(key.id)) for key in keys]
    return sorted(rows, key=lambda row: -(row["Requests"] or 0))


def _key_row(key: KeyInfo, group: Group | None) -> Row:
    is_priced = group is not None and group.totals.is_priced
    return {
        "Workspace": key.workspace,
        "Key": key.name,
        "Net saved ($)": in_dollars(group.saved_nano) if group and is_priced else None,
        "Key id": key.id,
        "Scope": key.scope,
        "Last used (UTC)": key.last_used_at,
        "Requests": group.totals.requests if group else None,
        "Failed": group.totals.errors if group else None,
        "Hit rate": group.rates.token_hit_rate if group else None,
        "Ends (UTC)": key.revoked_at or key.expires_at,
    }


def draw_outcome() -> None:
    """What became of the last change. A key stays until it is dismissed."""
    session = viewer.session()
    if session.outcome is None:
        return

    def dismiss() -> None:
        session.outcome = None

    with st.container(key="manage_outcome_box", border=True):
        st.text(session.outcome.said)
        if session.outcome.key:
            st.caption("The key is shown this once, until you dismiss it or sign out:")
            st.code(session.outcome.key, language=None)
        st.button("Dismiss", key="dismiss", on_click=dismiss)


def draw_forms(workspaces: list[Workspace], keys: list[KeyInfo]) -> None:
    """Forms stay as they are filled in while the page refreshes."""
    with st.expander("Make and change workspaces and keys", key="manage", icon=":material/tune:"):
        make, limits, key, end = st.tabs(
            ["New workspace", "Limits", "New or rotated key", "Archive or revoke"],
            key="manage_tabs",
        )
        labels = {
            f"{live_key.workspace} · {live_key.name} · {live_key.id}": live_key.id
            for live_key in keys
            if not live_key.revoked_at
        }
        number = st.session_state.get(_NUM_TAKEN, 0)
        with make, st.form(f"new_workspace_{number}", border=False):
            name = st.text_input(
                "Id", max_chars=64, placeholder="support-desk", key=f"new_id_{number}"
            )
            title = st.text_input(
                "Name (optional)", max_chars=128, key=f"new_name_{number}"
            ).strip()
            if st.form_submit_button("Create workspace") and name.strip():
                body = {"id": name.strip()} | ({"display_name": title} if title else {})
                said = f"The workspace {name.strip()} was made."
                _change("/admin/v1/workspaces", body, said)
        with limits:
            _draw_limits({workspace.id: workspace for workspace in workspaces})
        with key:
            _draw_keys([workspace.id for workspace in workspaces], labels)
        with end:
            _draw_ends(workspaces, labels)


def _draw_limits(workspaces: dict[str, Workspace]) -> None:
    if not workspaces:
        return
    chosen = st.selectbox("Workspace", list(workspaces), key="limit_workspace")
    now = workspaces[chosen]
    with st.form(f"limits_{chosen}", border=False):
        body: dict[str, Any] = {
            field: st.number_input(label, 1, 10**12, value, placeholder=_NO_LIMIT, step=1)
            for field, label, value in (
                ("requests_per_minute", "Requests per minute", now.requests_per_minute),
                ("tokens_per_minute", "Tokens per minute", now.tokens_per_minute),
                ("max_concurrency", "Requests at once", now.max_concurrency),
            )
        }
        dollars = in_dollars(now.monthly_spend_nano)
        spend = st.number_input(
            "Dollars per month", 0.0, 1e9, dollars, placeholder=_NO_LIMIT, format="%.2f"
        )
        body["monthly_spend_nano"] = None if spend is None else round(spend * formats.NANO)
        body["lease_share"] = st.number_input(
            "Share of the leases (0 to 1)", 0.0, 1.0, now.lease_share, placeholder=_NO_LIMIT
        )
        body["keep_days"] = st.number_input(
            "Days for which prompts and answers are kept, encrypted",
            1,
            3650,
            now.keep_days,
            placeholder="none is kept",
            step=1,
        )
        for field, label, options, value in (
            ("auto_cache", "Marks added to requests without any", AutoCacheMode, now.auto_cache),
            ("auto_cache_ttl", "TTL of added marks", AutoCacheTtl, now.auto_cache_ttl),
        ):
            words = [_INSTALLATION, *get_args(options)]
            picked = st.selectbox(
                label,
                words,
                words.index(value or _INSTALLATION),
                format_func=lambda word: word or "as the installation has it",
                key=f"{field}_{chosen}",
            )
            body[field] = picked or None
        body["may_approximate"] = st.checkbox(
            "May ask that only a part of a prefix is kept (approximate answers)",
            now.may_approximate,
        )
        if st.form_submit_button("Set limits"):
            path = f"/admin/v1/workspaces/{segment(chosen)}"
            _change(path, body, f"The limits of {chosen} were set.")


def _draw_keys(ids: list[str], labels: dict[str, str]) -> None:
    left, right = st.columns(2, gap="large")
    number = st.session_state.get(_NUM_TAKEN, 0)
    with left, st.form(f"new_key_{number}", border=False):
        owner = st.selectbox("Workspace of the new key", ids, key="key_workspace")
        name = st.text_input(
            "Its name", max_chars=64, placeholder="unnamed", key=f"key_name_{number}"
        )
        scope = st.selectbox("Its scope", _SCOPES, key="key_scope")
        if st.form_submit_button("Create key") and owner:
            body: dict[str, Any] = {"workspace": owner, "scope": scope}
            body |= {"name": name.strip()} if name.strip() else {}
            _change("/admin/v1/keys", body, f"A key of {owner} was made.")
    with right, st.form("rotate_key", border=False):
        old = st.selectbox("Key to rotate", list(labels), key="rotate_label")
        grace = st.selectbox("The old one works for", list(_GRACES), key="rotate_grace")
        is_sure = st.checkbox("The old key may stop working at once", key="rotate_sure")
        asks = st.form_submit_button("Rotate key")
        if asks and not _GRACES[grace] and not is_sure:
            st.warning(
                "Tick the box, or let the old key work for a while.", icon=":material/warning:"
            )
        elif asks and old:
            path = f"/admin/v1/keys/{segment(labels[old])}/rotate"
            body = {"grace_seconds": _GRACES[grace]}
            _change(path, body, "The key has a successor.")


def _draw_ends(workspaces: list[Workspace], labels: dict[str, str]) -> None:
    left, right = st.columns(2, gap="large")
    with left:
        live = [workspace.id for workspace in workspaces if workspace.archived_at is None]
        chosen = st.selectbox("Workspace to archive", live, index=None, key="archive_id")
        if chosen and _is_confirmed(
            f"archive_{chosen}", "Archive it", "All its keys stop working at once."
        ):
            path = f"/admin/v1/workspaces/{segment(chosen)}/archive"
            _change(path, {}, f"{chosen} was archived.")
        archived = [workspace.id for workspace in workspaces if workspace.archived_at is not None]
        if archived:
            back = st.selectbox("Workspace to restore", archived, index=None, key="restore_id")
            if back and st.button("Restore it", key="restore"):
                path = f"/admin/v1/workspaces/{segment(back)}/restore"
                _change(path, {}, f"{back} was restored.")
    with right:
        key = st.selectbox("Key to revoke", list(labels), index=None, key="revoke_label")
        if key and _is_confirmed(
            f"revoke_{labels[key]}", "Revoke it", "It stops working for good: nothing restores it."
        ):
            path = f"/admin/v1/keys/{segment(labels[key])}/revoke"
            _change(path, {}, "The key was revoked.")


def _is_confirmed(key: str, label: str, warning: str) -> bool:
    """A box to tick, then the button: whether both were done."""
    st.warning(warning, icon=":material/warning:")
    is_sure = st.checkbox("I am sure", key=f"sure_{key}")
    return st.button(label, key=f"do_{key}", type="primary", disabled=not is_sure)


def _change(path: str, body: dict[str, Any], said: str) -> None:
    """Ask the gateway, and tell the outcome above the forms on the next run. What it refuses stays
    in its form."""
    key = ""
    session = viewer.session()
    try:
        # Of all answers, those that make a key have one.
        key = session.client.change("POST", path, dict[str, Any], body).get("key", "")
        st.session_state[_NUM_TAKEN] = st.session_state.get(_NUM_TAKEN, 0) + 1
    except NotAnswered as error:
        said = f"{error} Whether it was changed is not known: the tables tell."
        st.toast("It is not known whether it was changed.")
    except ClientError as error:
        said = str(error) if isinstance(error, Refused) else f"{error} Nothing was changed."
        st.toast("Nothing was changed.")
    session.outcome = Outcome(said, key)
    st.rerun()


if __name__ == "__main__":
    parts.title("Workspaces", "Who uses the cache, how well, and within which limits?")
    live.show("workspaces", read, draw)
