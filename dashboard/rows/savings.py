"""Rows of what caching saved: the waterfall, prefixes, and published prices. Pure."""

from collections.abc import Sequence

from dashboard.admin.shapes.savings import HostedCost, PrefixReport, Waterfall
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
            "Prefix": each.prefix,
            "Workspace": each.workspace,
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
            "Model": each.model,
        }
        for each in prefixes
    ]


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
