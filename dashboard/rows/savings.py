"""Rows of what caching saved: the waterfall, prefixes, and published prices. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime

from dashboard.admin.shapes.savings import HostedCost, PrefixLook, PrefixReport, Waterfall
from dashboard.admin.shapes.usage import Group
from dashboard.rows.row import Row, in_dollars
from dashboard.ui.formats import NANO, dollars


def waterfall_rows(found: Waterfall) -> list[Row]:
    """Four bars in dollars, from `bottom` to `top`: two that stand, two that hang between them."""
    without, premium = found.counterfactual_nano, found.write_premium_nano
    high = without + premium
    steps = [
        ("Without a cache", "Cost", 0, without, without),
        ("Write premium", "Lost", without, high, premium),
        (
            "Read discount",
            "Saved",
            high,
            high - found.read_discount_nano,
            -found.read_discount_nano,
        ),
        ("Actual cost", "Cost", 0, found.actual_nano, found.actual_nano),
    ]
    return [
        {
            "step": step,
            "class": kind,
            "bottom": min(first, last) / NANO,
            "top": max(first, last) / NANO,
            "amount": amount / NANO,
            "label": dollars(amount),
        }
        for step, kind, first, last, amount in steps
    ]


def prefix_table(prefixes: Sequence[PrefixReport]) -> list[Row]:
    return [
        {
            "Prefix": prefix_label(each.prefix, each.look),
            "Workspace": each.workspace,
            "Model": each.model,
            "Client": each.look.user_agent if each.look else None,
            "Last used (UTC)": moment_of(each.look),
            "TTL": each.ttl,
            "Cheaper TTL": each.better_ttl,
            "It would save ($)": in_dollars(each.better_ttl_saves_nano or None),
            "Paid back": _verdict(each),
            "Net ($)": in_dollars(each.saved_nano),
            "Requests": each.requests,
            "With a read": each.requests_with_read,
            "Pays back after (reads)": each.reads_to_pay_back,
            "Gaps up to 5 min": each.gaps_5m,
            "Gaps 5 min to 1 h": each.gaps_1h,
            "Longer gaps": max(each.requests - 1 - each.gaps_5m - each.gaps_1h, 0),
            "Tokens": each.look.tokens if each.look else None,
            "Last request": each.look.last_turn if each.look else None,
            "Prefix id": each.prefix,
        }
        for each in prefixes
    ]


def growing_table(groups: Sequence[Group], prefixes: Sequence[PrefixReport]) -> list[Row]:
    """A row for each workspace that saved or lost in the range without a prefix that came twice.

    Their conversations grow: each turn marks a longer prefix, and reads the one before.
    """
    known = {each.workspace for each in prefixes}
    blank = dict.fromkeys(prefix_table(prefixes)[0]) if prefixes else {}
    return [
        {
            **blank,
            "Prefix": "growing conversations",
            "Workspace": group.workspace,
            "Paid back": "yes" if group.saved_nano > 0 else "not yet",
            "Net ($)": group.saved_nano / NANO,
            "Requests": group.totals.requests,
            "With a read": group.totals.requests_with_read,
        }
        for group in groups
        if group.saved_nano and group.workspace not in known
    ]


def prefix_label(prefix: str, look: PrefixLook | None) -> str:
    """What a person can tell a prefix by: its name, or how many blocks of each kind it has."""
    if look is None:
        return prefix
    if look.name:
        return look.name
    counted = [
        f"{count:,} {kind}{'' if count == 1 else 's'}"
        for count, kind in (
            (look.num_tools, "tool"),
            (look.num_system, "system block"),
            (look.num_messages, "message block"),
        )
        if count
    ]
    return " · ".join([*counted, f"{look.tokens:,} tokens"])


def moment_of(look: PrefixLook | None) -> datetime | None:
    """When it was last used, in UTC and without a zone."""
    if look is None:
        return None
    return datetime.fromtimestamp(look.last_ms / 1000, UTC).replace(tzinfo=None)


def _verdict(prefix: PrefixReport) -> str | None:
    if prefix.is_paid_back is None:
        return None
    return "yes" if prefix.is_paid_back else "not yet"


def hosted_table(found: Sequence[HostedCost]) -> list[Row]:
    return [
        {
            "Model": each.model,
            "This traffic ($)": each.nano / NANO,
            "Without caching ($)": each.nano_without_cache / NANO,
            "Prices as of": each.as_of,
            "Source": each.source,
        }
        for each in found
    ]
