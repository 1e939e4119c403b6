"""Workspaces: who uses the cache, how well, and within which limits? An admin changes them here."""

from dataclasses import dataclass
from datetime import UTC, datetime

import streamlit as st

from dashboard.admin.client import AdminClient
from dashboard.admin.shapes.usage import Group
from dashboard.admin.shapes.workspaces import Key, Workspace
from dashboard.rows.workspaces import key_table, limit_table, workspace_table
from dashboard.ui import formats, live, parts, viewer
from dashboard.ui.manage import draw_actions, draw_outcome
from dashboard.ui.selection import Selection


@dataclass(frozen=True, slots=True)
class View:
    """`month` are the turns of this calendar month (UTC), which spend limits count."""

    workspaces: list[Workspace]
    groups: list[Group]
    month: list[Group]
    keys: list[Key]
    by_key: list[Group]


def read(client: AdminClient, chosen: Selection) -> View:
    params = chosen.params()
    now = datetime.now(UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    of_month = {
        "since_ms": int(month.timestamp() * 1000),
        "until_ms": params["until_ms"] if chosen.range != "custom" else int(now.timestamp() * 1000),
        "workspace": chosen.workspace,
        "group_by": "workspace",
    }
    path = "/admin/v1/usage/groups"
    return View(
        client.get("/admin/v1/workspaces", list[Workspace]),
        client.get(path, list[Group], {**params, "group_by": "workspace"}),
        client.get(path, list[Group], of_month),
        client.get("/admin/v1/keys", list[Key], {"workspace": chosen.workspace}),
        client.get(path, list[Group], {**params, "group_by": "key"}),
    )


def draw(view: View, chosen: Selection) -> None:
    shown = [w for w in view.workspaces if chosen.workspace in (None, w.id)]
    draw_hero(view, chosen)
    draw_cards(view, shown)
    draw_outcome()
    session = viewer.session()
    if session is not None and session.workspace is None and not session.about.sample:
        draw_actions(view.workspaces, view.keys)
    parts.heading("Use of the cache in this range")
    if view.groups:
        money = parts.money_column()
        parts.table(
            workspace_table(view.groups, shown),
            "workspaces",
            alt_text=f"Usage of {len(view.groups)} workspaces.",
            columns={
                "Hit rate": parts.share_column(),
                "Cost ($)": money,
                "Net saved ($)": money,
            },
            height=420 if len(view.groups) > 10 else "auto",
        )
    else:
        parts.empty("No requests in this range.", key="workspaces")
    draw_limits(view, shown)
    draw_keys(view)


def draw_hero(view: View, chosen: Selection) -> None:
    saving = sum(group.saved_nano > 0 for group in view.groups)
    if not view.groups:
        parts.hero(f"**No workspace** sent a request in {chosen.words}.")
        return
    count = formats.counted(len(view.groups), "workspace")
    parts.hero(
        f"**{saving:,} of {count}** with requests in {chosen.words}"
        f" {'saves' if saving == 1 else 'save'} by caching."
    )


def draw_cards(view: View, shown: list[Workspace]) -> None:
    best = max(view.groups, key=lambda group: group.saved_nano, default=None)
    worst = min(view.groups, key=lambda group: group.saved_nano, default=None)
    with st.grid(4, min_column_width=190, row_height=112):
        parts.card("workspaces", f"{sum(w.archived_at is None for w in shown):,}")
        parts.card("active_workspaces", f"{len(view.groups):,}")
        for label, group in (("Best net saved", best), ("Worst net saved", worst)):
            saved = group.saved_nano if group and group.totals.is_priced else None
            loss = saved is not None and saved < 0
            parts.card("saved_nano", formats.dollars(saved), label=label, is_loss=loss)
    parts.placeholder_prices()


def draw_limits(view: View, shown: list[Workspace]) -> None:
    parts.heading("Limits, and what this month has cost", "month_cost")
    parts.table(
        limit_table(shown, view.month),
        "limits",
        alt_text=f"Limits of {len(shown)} workspaces.",
        columns={
            "This month ($)": parts.money_column(),
            "Spend limit ($)": parts.money_column(),
            "Of the limit": parts.share_column(),
        },
        height=420 if len(shown) > 10 else "auto",
    )


def draw_keys(view: View) -> None:
    parts.heading("Keys")
    if not view.keys:
        parts.empty("There is no key in the ledger.", ":material/key:")
        return
    parts.table(
        key_table(view.keys, view.by_key),
        "keys",
        alt_text=f"{len(view.keys)} keys and their use in this range.",
        columns={"Hit rate": parts.share_column(), "Net saved ($)": parts.money_column()},
        height=420 if len(view.keys) > 10 else "auto",
    )


parts.title("Workspaces", "Who uses the cache, how well, and within which limits?")
live.show("workspaces", read, draw)
