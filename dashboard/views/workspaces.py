"""Workspaces: who uses the cache, how well, and within which limits? An admin changes them here.

An admin must confirm what can't be taken back. A new key is shown until the admin dismisses it or
the session ends, also on a page that is loaded again. It is kept in this process and nowhere else.
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
"""The choice in a form by which the installation's setting holds."""
# The session's field for how many changes the gateway has made. The number is in the names of
# forms, so that each form is new and empty after a change.
_NUM_CHANGES = "num_forms_taken"


class View(NamedTuple):
    """What the page shows."""

    workspaces: list[Workspace]
    # The usage of each workspace in the range.
    groups: list[Group]
    # The usage of each workspace in this calendar month (UTC). Spend limits count it.
    month: list[Group]
    keys: list[KeyInfo]
    # The usage of each key in the range.
    by_key: list[Group]
    # What limits have refused since the gateway's start.
    limited: list[Limited]


def read(client: AdminClient, selection: Selection) -> View:
    # Sums by key are of all engines.
    params = selection.params("engine")
    now = datetime.now(UTC)
    month_start = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    month_params = {
        "since_ms": int(month_start.timestamp() * 1000),
        "until_ms": params["until_ms"]
        if selection.range != CUSTOM
        else int(now.timestamp() * 1000),
        "workspace": selection.workspace,
        "group_by": "workspace",
    }
    path = "/admin/v1/usage/groups"
    return View(
        client.get("/admin/v1/workspaces", list[Workspace]),
        client.get(path, list[Group], {**params, "group_by": "workspace"}),
        client.get(path, list[Group], month_params),
        client.get("/admin/v1/keys", list[KeyInfo], {"workspace": selection.workspace}),
        client.get(path, list[Group], {**params, "group_by": "key"}),
        client.get("/admin/v1/refusals/limits", list[Limited], {"workspace": selection.workspace}),
    )


def draw(view: View, selection: Selection) -> None:
    selected = [
        workspace for workspace in view.workspaces if selection.workspace in (None, workspace.id)
    ]
    draw_cards(view, selected, selection)
    # The container is always there, so that the forms below keep what is typed.
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


def draw_cards(view: View, selected: list[Workspace], selection: Selection) -> None:
    num_saving = sum(group.saved_nano > 0 for group in view.groups)
    count = formats.counted(len(view.groups), "workspace")
    if view.groups:
        parts.hero(
            f"**{num_saving:,} of {count}** with requests in {selection.words}"
            f" {'saves' if num_saving == 1 else 'save'} by caching."
        )
    else:
        parts.hero(f"**No workspace** sent a request in {selection.words}.")
    num_active = sum(workspace.archived_at is None for workspace in selected)
    with st.grid(4, min_column_width=190):
        parts.card("workspaces", f"{num_active:,}")
        parts.card("active_workspaces", f"{len(view.groups):,}")
        best = max(view.groups, key=lambda group: group.saved_nano, default=None)
        worst = min(view.groups, key=lambda group: group.saved_nano, default=None)
        draw_saved("Best net saved", best)
        draw_saved("Worst net saved", worst)
    parts.placeholder_prices()


def draw_saved(label: str, group: Group | None) -> None:
    """Draw a card of what one workspace saved. Without a workspace or a price it has a dash."""
    saved_nano = group.saved_nano if group and group.totals.is_priced else None
    name = parts.plain(group.workspace) if group else None
    parts.money_card("saved_nano", saved_nano, label, delta=name)


def limit_table(workspaces: Sequence[Workspace], month: Sequence[Group]) -> list[Row]:
    """A row for each workspace: its limits, and what it has spent in this month."""
    costs = {group.workspace: group.totals.cost_nano for group in month}
    return [_limit_row(workspace, costs.get(workspace.id, 0)) for workspace in workspaces]


def _limit_row(workspace: Workspace, cost_nano: int) -> Row:
    limit = workspace.monthly_spend_nano
    return {
        "Workspace": workspace.id,
        "This month ($)": in_dollars(cost_nano),
        "Spend limit ($)": in_dollars(limit),
        "Name": workspace.display_name,
        "Of the limit": min(cost_nano / limit, 1.0) if limit else None,
        "Requests per minute": workspace.requests_per_minute,
        "Tokens per minute": workspace.tokens_per_minute,
        "At once": workspace.max_concurrency,
        "Lease share": workspace.lease_share,
        "Keeps prompts (days)": workspace.keep_days,
        "Archived": workspace.archived_at.date() if workspace.archived_at else None,
    }


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
    """A row for each key, the most used first. A key without a turn in the range has dashes."""
    usage = {group.key: group for group in groups}
    rows = [_key_row(key, usage.get(key.id)) for key in keys]
    return sorted(rows, key=lambda row: row["Requests"] or 0, reverse=True)


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
    """Draw what became of the last change. It stays until the admin dismisses it."""
    session = viewer.session()
    if session.outcome is None:
        return

    def dismiss() -> None:
        session.outcome = None

    with st.container(key="manage_outcome_box", border=True):
        st.text(session.outcome.message)
        if session.outcome.key:
            st.caption("The key is shown this once, until you dismiss it or sign out:")
            st.code(session.outcome.key, language=None)
        st.button("Dismiss", key="dismiss", on_click=dismiss)


def draw_forms(workspaces: list[Workspace], keys: list[KeyInfo]) -> None:
    """Draw the forms. They keep what is filled in while the page refreshes."""
    with st.expander("Make and change workspaces and keys", key="manage", icon=":material/tune:"):
        workspace_tab, limits_tab, keys_tab, ends_tab = st.tabs(
            ["New workspace", "Limits", "New or rotated key", "Archive or revoke"],
            key="manage_tabs",
        )
        key_ids = {
            f"{key.workspace} · {key.name} · {key.id}": key.id for key in keys if not key.revoked_at
        }
        with workspace_tab:
            _draw_new_workspace()
        with limits_tab:
            _draw_limits({workspace.id: workspace for workspace in workspaces})
        with keys_tab:
            _draw_keys([workspace.id for workspace in workspaces], key_ids)
        with ends_tab:
            _draw_ends(workspaces, key_ids)


def _draw_new_workspace() -> None:
    number = st.session_state.get(_NUM_CHANGES, 0)
    with st.form(f"new_workspace_{number}", border=False):
        workspace = st.text_input(
            "Id", max_chars=64, placeholder="support-desk", key=f"new_id_{number}"
        ).strip()
        name = st.text_input("Name (optional)", max_chars=128, key=f"new_name_{number}").strip()
        if st.form_submit_button("Create workspace") and workspace:
            body = {"id": workspace}
            if name:
                body["display_name"] = name
            _change("/admin/v1/workspaces", body, f"The workspace {workspace} was made.")


def _draw_limits(workspaces: dict[str, Workspace]) -> None:
    if not workspaces:
        return
    workspace_id = st.selectbox("Workspace", list(workspaces), key="limit_workspace")
    workspace = workspaces[workspace_id]
    with st.form(f"limits_{workspace_id}", border=False):
        body: dict[str, Any] = {
            "requests_per_minute": _limit_input(
                "Requests per minute", workspace.requests_per_minute
            ),
            "tokens_per_minute": _limit_input("Tokens per minute", workspace.tokens_per_minute),
            "max_concurrency": _limit_input("Requests at once", workspace.max_concurrency),
        }
        dollars = in_dollars(workspace.monthly_spend_nano)
        spend = st.number_input(
            "Dollars per month", 0.0, 1e9, dollars, placeholder=_NO_LIMIT, format="%.2f"
        )
        body["monthly_spend_nano"] = None if spend is None else round(spend * formats.NANO)
        body["lease_share"] = st.number_input(
            "Share of the leases (0 to 1)", 0.0, 1.0, workspace.lease_share, placeholder=_NO_LIMIT
        )
        body["keep_days"] = st.number_input(
            "Days for which prompts and answers are kept, encrypted",
            1,
            3650,
            workspace.keep_days,
            placeholder="none is kept",
            step=1,
        )
        body["auto_cache"] = _policy_input(
            "Marks added to requests without any",
            get_args(AutoCacheMode),
            workspace.auto_cache,
            key=f"auto_cache_{workspace_id}",
        )
        body["auto_cache_ttl"] = _policy_input(
            "TTL of added marks",
            get_args(AutoCacheTtl),
            workspace.auto_cache_ttl,
            key=f"auto_cache_ttl_{workspace_id}",
        )
        body["may_approximate"] = st.checkbox(
            "May ask that only a part of a prefix is kept (approximate answers)",
            workspace.may_approximate,
        )
        if st.form_submit_button("Set limits"):
            path = f"/admin/v1/workspaces/{segment(workspace_id)}"
            _change(path, body, f"The limits of {workspace_id} were set.")


def _limit_input(label: str, value: int | None) -> int | None:
    """Draw a field for a whole number. Return the number, or None for no limit."""
    return st.number_input(label, 1, 10**12, value, placeholder=_NO_LIMIT, step=1)


def _policy_input(
    label: str, policies: tuple[str, ...], value: str | None, *, key: str
) -> str | None:
    """Draw a choice of policies. Return the policy, or None for the installation's setting."""
    options = [_INSTALLATION, *policies]
    policy = st.selectbox(
        label,
        options,
        options.index(value or _INSTALLATION),
        format_func=lambda option: option or "as the installation has it",
        key=key,
    )
    return policy or None


def _draw_keys(workspaces: list[str], key_ids: dict[str, str]) -> None:
    """Draw the forms for a new and for a rotated key. `key_ids` are the ids of keys by label."""
    left, right = st.columns(2, gap="large")
    number = st.session_state.get(_NUM_CHANGES, 0)
    with left, st.form(f"new_key_{number}", border=False):
        workspace = st.selectbox("Workspace of the new key", workspaces, key="key_workspace")
        name = st.text_input(
            "Its name", max_chars=64, placeholder="unnamed", key=f"key_name_{number}"
        )
        scope = st.selectbox("Its scope", _SCOPES, key="key_scope")
        if st.form_submit_button("Create key") and workspace:
            body: dict[str, Any] = {"workspace": workspace, "scope": scope}
            if name.strip():
                body["name"] = name.strip()
            _change("/admin/v1/keys", body, f"A key of {workspace} was made.")
    with right, st.form("rotate_key", border=False):
        old_key = st.selectbox("Key to rotate", list(key_ids), key="rotate_label")
        grace = st.selectbox("The old one works for", list(_GRACES), key="rotate_grace")
        is_sure = st.checkbox("The old key may stop working at once", key="rotate_sure")
        is_submitted = st.form_submit_button("Rotate key")
        if is_submitted and not _GRACES[grace] and not is_sure:
            st.warning(
                "Tick the box, or let the old key work for a while.", icon=":material/warning:"
            )
        elif is_submitted and old_key:
            path = f"/admin/v1/keys/{segment(key_ids[old_key])}/rotate"
            body = {"grace_seconds": _GRACES[grace]}
            _change(path, body, "The key has a successor.")


def _draw_ends(workspaces: list[Workspace], key_ids: dict[str, str]) -> None:
    """Draw the forms that end a workspace or a key. `key_ids` are the ids of keys by label."""
    left, right = st.columns(2, gap="large")
    with left:
        _draw_archive([entry.id for entry in workspaces if entry.archived_at is None])
        _draw_restore([entry.id for entry in workspaces if entry.archived_at is not None])
    with right:
        label = st.selectbox("Key to revoke", list(key_ids), index=None, key="revoke_label")
        if label and _is_confirmed(
            f"revoke_{key_ids[label]}",
            "Revoke it",
            "It stops working for good: nothing restores it.",
        ):
            path = f"/admin/v1/keys/{segment(key_ids[label])}/revoke"
            _change(path, {}, "The key was revoked.")


def _draw_archive(active_ids: list[str]) -> None:
    workspace_id = st.selectbox("Workspace to archive", active_ids, index=None, key="archive_id")
    if workspace_id and _is_confirmed(
        f"archive_{workspace_id}", "Archive it", "All its keys stop working at once."
    ):
        path = f"/admin/v1/workspaces/{segment(workspace_id)}/archive"
        _change(path, {}, f"{workspace_id} was archived.")


def _draw_restore(archived_ids: list[str]) -> None:
    if not archived_ids:
        return
    workspace_id = st.selectbox("Workspace to restore", archived_ids, index=None, key="restore_id")
    if workspace_id and st.button("Restore it", key="restore"):
        path = f"/admin/v1/workspaces/{segment(workspace_id)}/restore"
        _change(path, {}, f"{workspace_id} was restored.")


def _is_confirmed(key: str, label: str, warning: str) -> bool:
    """Draw a warning, a box and a button. Return whether the box is ticked and the button was
    clicked."""
    st.warning(warning, icon=":material/warning:")
    is_sure = st.checkbox("I am sure", key=f"sure_{key}")
    return st.button(label, key=f"do_{key}", type="primary", disabled=not is_sure)


def _change(path: str, body: dict[str, Any], message: str) -> None:
    """Ask the gateway for a change, and run the page again with the outcome above the forms.

    `message` is the outcome if the change is made. A form whose change is refused keeps what was
    typed.
    """
    key = ""
    session = viewer.session()
    try:
        # An answer has a key only if the change made one.
        key = session.client.change("POST", path, dict[str, Any], body).get("key", "")
        st.session_state[_NUM_CHANGES] = st.session_state.get(_NUM_CHANGES, 0) + 1
    except NotAnswered as error:
        message = f"{error} Whether it was changed is not known: the tables tell."
        st.toast("It is not known whether it was changed.")
    except ClientError as error:
        message = str(error) if isinstance(error, Refused) else f"{error} Nothing was changed."
        st.toast("Nothing was changed.")
    session.outcome = Outcome(message, key)
    st.rerun()


if __name__ == "__main__":
    parts.title("Workspaces", "Who uses the cache, how well, and within which limits?")
    live.show("workspaces", read, draw)
