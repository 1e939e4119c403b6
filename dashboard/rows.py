"""From the admin API's answers to the rows that charts and tables draw. Pure: no I/O, no clock."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any

from dashboard.admin.shapes.savings import HostedCost, Prefix, Waterfall
from dashboard.admin.shapes.turns import Turn
from dashboard.admin.shapes.usage import Bucket, Group, Usage
from dashboard.admin.shapes.workspaces import Key, Workspace
from dashboard.ui.formats import NANO, dollars, seconds

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
            "It would save ($)": _dollars(each.better_ttl_saves_nano or None),
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


def group_table(groups: Sequence[Group], by: str, title: str) -> list[Row]:
    """One row for each value of a dimension, with its tokens by class, hit rate and money."""
    return [
        {
            title: getattr(each, by),
            "Requests": each.totals.requests,
            "Failed": each.totals.errors,
            "Hit rate": each.rates.token_hit_rate,
            "Net saved ($)": each.saved_nano / NANO if each.totals.is_priced else None,
            "Cost ($)": each.totals.cost_nano / NANO if each.totals.is_priced else None,
            "Read (tokens)": each.totals.cache_read_tokens,
            "Written 5m (tokens)": each.totals.cache_write_5m_tokens,
            "Written 1h (tokens)": each.totals.cache_write_1h_tokens,
            "Uncached (tokens)": each.totals.input_tokens,
            "Output (tokens)": each.totals.output_tokens,
        }
        for each in groups
    ]


def turn_table(turns: Sequence[Turn]) -> list[Row]:
    return [
        {
            "Time (UTC)": each.opened.replace(tzinfo=None),
            "Id": each.id,
            "Workspace": each.workspace,
            "Model": each.model,
            "Engine": each.engine,
            "Read (tokens)": each.cache_read_tokens,
            "Written (tokens)": each.cache_write_5m_tokens + each.cache_write_1h_tokens,
            "Uncached (tokens)": each.input_tokens,
            "Output (tokens)": each.output_tokens,
            "First token (s)": each.first_token_seconds,
            "Duration (s)": each.duration_seconds,
            "Outcome": each.outcome,
            "Missed because": each.miss_reason,
            "Cost ($)": _dollars(each.cost_nano),
            "Net saved ($)": _dollars(each.saved_nano),
        }
        for each in turns
    ]


def turn_details(turn: Turn) -> list[tuple[str, str | None]]:
    """Every field as text, in the order of a request's life."""
    tokens = {
        "Read (tokens)": turn.cache_read_tokens,
        "Written, 5 minutes (tokens)": turn.cache_write_5m_tokens,
        "Written, 1 hour (tokens)": turn.cache_write_1h_tokens,
        "Uncached (tokens)": turn.input_tokens,
        "Reused unmarked (tokens)": turn.automatic_tokens,
        "Computed (tokens)": turn.computed_tokens,
        "Output (tokens)": turn.output_tokens,
        "Held by some engine (tokens)": turn.available_tokens,
        "Held by this engine (tokens)": turn.captured_tokens,
    }
    times = {
        "In the queue": turn.queue_seconds,
        "Prefill": turn.prefill_seconds,
        "First token": turn.first_token_seconds,
        "Decode": turn.decode_seconds,
        "Duration": turn.duration_seconds,
    }
    return [
        ("Workspace", turn.workspace),
        ("Key", turn.key_id),
        ("Model", turn.model),
        ("Engine", turn.engine),
        ("API", turn.dialect),
        ("Streamed", "yes" if turn.stream else "no"),
        ("Outcome", turn.outcome),
        ("Stop reason", turn.stop_reason),
        ("Missed because", turn.miss_reason),
        ("Prefix", turn.prefix),
        ("TTL", turn.prefix_ttl),
        *((name, None if count is None else f"{count:,}") for name, count in tokens.items()),
        *((name, None if value is None else seconds(value)) for name, value in times.items()),
        ("Cost", dollars(turn.cost_nano)),
        ("Net saved", dollars(turn.saved_nano)),
    ]


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
            "Spend limit ($)": _dollars(each.monthly_spend_nano),
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
                "Last used (UTC)": _naive(each.last_used_at),
                "Requests": group.totals.requests if group else None,
                "Failed": group.totals.errors if group else None,
                "Hit rate": group.rates.token_hit_rate if group else None,
                "Net saved ($)": group.saved_nano / NANO
                if group and group.totals.is_priced
                else None,
                "Ends (UTC)": _naive(each.revoked_at or each.expires_at),
            }
        )
    return sorted(rows, key=lambda row: -(row["Requests"] or 0))


def _naive(moment: datetime | None) -> datetime | None:
    """Without its zone, which the column's title tells."""
    return None if moment is None else moment.replace(tzinfo=None)
