"""Rows of workspaces, their limits and their keys. Pure."""

from collections.abc import Sequence

from dashboard.admin.shapes.usage import Group
from dashboard.admin.shapes.workspaces import Key, Workspace
from dashboard.rows.row import Row, in_dollars, without_zone
from dashboard.rows.usage import group_table
from dashboard.ui.formats import NANO


def workspace_table(groups: Sequence[Group], workspaces: Sequence[Workspace]) -> list[Row]:
    """What each used, with the name that it was given."""
    names = {each.id: each.display_name for each in workspaces}
    found = group_table(groups, "workspace", "Workspace")
    return [
        {"Workspace": row["Workspace"], "Name": names.get(row["Workspace"]), **row} for row in found
    ]


def limit_table(workspaces: Sequence[Workspace], month: Sequence[Group]) -> list[Row]:
    spent = {group.workspace: group.totals.cost_nano for group in month}
    return [
        {
            "Workspace": each.id,
            "Name": each.display_name,
            "This month ($)": spent.get(each.id, 0) / NANO,
            "Spend limit ($)": in_dollars(each.monthly_spend_nano),
            "Of the limit": min(spent.get(each.id, 0) / each.monthly_spend_nano, 1.0)
            if each.monthly_spend_nano
            else None,
            "Requests per minute": each.requests_per_minute,
            "Tokens per minute": each.tokens_per_minute,
            "At once": each.max_concurrency,
            "Lease share": each.lease_share,
            "Archived": each.archived_at.date() if each.archived_at else None,
        }
        for each in workspaces
    ]


def key_table(keys: Sequence[Key], groups: Sequence[Group]) -> list[Row]:
    """The most used first; a key without a turn in the range has dashes."""
    used = {group.key: group for group in groups}
    rows: list[Row] = []
    for each in keys:
        group = used.get(each.id)
        rows.append(
            {
                "Workspace": each.workspace,
                "Key": each.name,
                "Id": each.id,
                "Scope": each.scope,
                "Last used (UTC)": without_zone(each.last_used_at),
                "Requests": group.totals.requests if group else None,
                "Failed": group.totals.errors if group else None,
                "Hit rate": group.rates.token_hit_rate if group else None,
                "Net saved ($)": group.saved_nano / NANO
                if group and group.totals.is_priced
                else None,
                "Ends (UTC)": without_zone(each.revoked_at or each.expires_at),
            }
        )
    return sorted(rows, key=lambda row: -(row["Requests"] or 0))
