"""Rows of the leases that engines hold now. Pure."""

from collections.abc import Sequence

from dashboard.admin.shapes.leases import Lease
from dashboard.rows.row import Row
from dashboard.rows.savings import moment_of, prefix_label
from dashboard.ui.formats import NANO

TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}


def lease_table(found: Sequence[Lease]) -> list[Row]:
    """One row for each lease. Prefixes that came once, or have no price, have no net savings."""
    return [
        {
            "Prefix": lease_label(lease),
            "Workspace": lease.workspace,
            "Model": lease.prefix.model if lease.prefix else None,
            "Client": look.user_agent if look else None,
            "Last used (UTC)": moment_of(look),
            "Engine": lease.engine,
            "State": lease.entry.state.replace("_", " "),
            "TTL left": _left(lease),
            "Ends in": time_left(lease.entry.expires_in_seconds),
            "TTL": lease.entry.ttl,
            "Tokens": lease.entry.tokens,
            "Blocks": lease.entry.blocks,
            "Shared by": lease.entry.shared_by,
            "Reads": lease.entry.reads,
            "Net saved ($)": None
            if lease.prefix is None or lease.prefix.saved_nano is None
            else lease.prefix.saved_nano / NANO,
            "Last request": look.last_turn if look else None,
            "Cached content": lease.cached_content,
            "Prefix id": (lease.entry.name or lease.entry.entry)[:16],
            "Entry": lease.entry.entry,
        }
        for lease in found
        for look in (lease.prefix.look if lease.prefix else None,)
    ]


def lease_label(lease: Lease) -> str:
    """What a person can tell it by; its digest where its last request is not known."""
    look = lease.prefix.look if lease.prefix else None
    return prefix_label((lease.entry.name or lease.entry.entry)[:16], look)


def _left(lease: Lease) -> float:
    """The share of its TTL that is left; at most 1, also where an engine's clock differs."""
    share = lease.entry.expires_in_seconds / TTL_SECONDS.get(lease.entry.ttl, 300.0)
    return min(max(share, 0.0), 1.0)


def time_left(seconds: float) -> str:
    """Write what is left: 4:07, 59:30."""
    whole = max(int(seconds), 0)
    return f"{whole // 60}:{whole % 60:02}"
