"""From the admin API's answers to the rows that charts and tables draw. Pure: no I/O, no clock."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any

from dashboard.answers.savings import Comparison, Prefix, Waterfall
from dashboard.answers.usage import Bucket, Group, Usage
from dashboard.formats import NANO, dollars

Row = Mapping[str, Any]

# In the order in which they are stacked, from the bottom.
TOKEN_CLASSES = {
    "Read from cache": "cache_read_tokens",
    "Written, 5 minutes": "cache_write_5m_tokens",
    "Written, 1 hour": "cache_write_1h_tokens",
    "Uncached": "input_tokens",
}
PARTIAL = "cut by the range"


def ends_of(usage: Usage, bucket: Bucket) -> tuple[datetime, datetime]:
    """From when to when an interval lies within the range."""
    until_ms = min(bucket.start_ms + usage.bucket_seconds * 1000, usage.until_ms)
    since_ms = max(bucket.start_ms, usage.since_ms)
    first = bucket.start
    return (
        first + timedelta(milliseconds=since_ms - bucket.start_ms),
        first + timedelta(milliseconds=until_ms - bucket.start_ms),
    )


def tokens_by_class(usage: Usage) -> list[Row]:
    """One for each interval and class, stacked, as `charts.stacked_over_time` wants them."""
    rows: list[Row] = []
    for bucket in usage.series:
        start, end = ends_of(usage, bucket)
        top = 0
        for name, key in TOKEN_CLASSES.items():
            tokens = getattr(bucket.totals, key)
            bottom, top = top, top + tokens
            part = PARTIAL if bucket.is_partial else ""
            rows.append(
                {
                    "start": start,
                    "end": end,
                    "class": name,
                    "amount": tokens,
                    "bottom": bottom,
                    "top": top,
                    "part": part,
                }
            )
    return rows


def saved_over_time(usage: Usage) -> list[Row]:
    """Dollars for each interval; a loss is negative, and called so."""
    rows: list[Row] = []
    for bucket in usage.series:
        start, end = ends_of(usage, bucket)
        rows.append(
            {
                "start": start,
                "end": end,
                "class": "Lost" if bucket.saved_nano < 0 else "Saved",
                "amount": bucket.saved_nano / NANO,
                "zero": 0,
                "part": PARTIAL if bucket.is_partial else "",
            }
        )
    return rows


def hit_rates(series: Sequence[Bucket]) -> list[float]:
    """The hit rate of each whole interval that had traffic: a pause is no rate of zero."""
    rates = (bucket.hit_rate for bucket in series if not bucket.is_partial)
    return [rate for rate in rates if rate is not None]


def running_savings(series: Sequence[Bucket]) -> list[float]:
    """What was saved since the first interval, in dollars; may fall and may be negative."""
    return [nano / NANO for nano in accumulate(bucket.saved_nano for bucket in series)]


def waterfall(found: Waterfall) -> list[Row]:
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


def miss_reasons(reasons: Mapping[str, int]) -> list[Row]:
    """The most frequent first, with each one's share of all misses."""
    whole = sum(reasons.values())
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return [
        {"Reason": reason, "Requests": count, "Share": count / whole} for reason, count in ordered
    ]


def prefix_table(prefixes: Sequence[Prefix]) -> list[Row]:
    return [
        {
            "Prefix": each.prefix,
            "Workspace": each.workspace,
            "TTL": each.ttl,
            "Cheaper TTL": each.better_ttl,
            "It would save ($)": _dollars(each.better_ttl_saves_nano),
            "Paid back": _verdict(each),
            "Net ($)": _dollars(each.saved_nano),
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


def _verdict(prefix: Prefix) -> str | None:
    if prefix.is_paid_back is None:
        return None
    return "yes" if prefix.is_paid_back else "not yet"


def _dollars(nano: int | None) -> float | None:
    return None if nano is None else nano / NANO


def hosted_table(found: Sequence[Comparison]) -> list[Row]:
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


def group_table(groups: Sequence[Group], by: str, title: str) -> list[Row]:
    """One row for each value of a dimension, with its tokens by class, hit rate and money."""
    return [
        {
            title: getattr(each, by),
            "Requests": each.totals.requests,
            "Failed": each.totals.errors,
            "Hit rate": each.rates.token_hit_rate,
            "Read (tokens)": each.totals.cache_read_tokens,
            "Written 5m (tokens)": each.totals.cache_write_5m_tokens,
            "Written 1h (tokens)": each.totals.cache_write_1h_tokens,
            "Uncached (tokens)": each.totals.input_tokens,
            "Output (tokens)": each.totals.output_tokens,
            "Cost ($)": each.totals.cost_nano / NANO if each.totals.is_priced else None,
            "Net saved ($)": each.saved_nano / NANO if each.totals.is_priced else None,
        }
        for each in groups
    ]
