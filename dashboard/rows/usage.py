"""Rows of what was used: tokens, hit rates, savings and misses over a range. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate

from dashboard.admin.shapes.usage import Bucket, Group, Usage
from dashboard.rows.row import Row
from dashboard.ui.advice import ADVICE, reason_title
from dashboard.ui.formats import NANO, dollars
from engine.protocol import TTLS, WRITE_FIELDS

# In the order in which they are stacked, from the bottom.
TOKEN_CLASSES = {
    "Read from cache": "cache_read_tokens",
    **{f"Written, {TTLS[ttl].words}": name for ttl, name in WRITE_FIELDS.items()},
    "Automatically reused": "automatic_input_tokens",
    "Uncached": "computed_input_tokens",
}
PARTIAL = "cut by the range"


def _ends_of(usage: Usage, bucket: Bucket) -> tuple[datetime, datetime]:
    """From when to when an interval lies within the range."""
    until_ms = min(bucket.start_ms + usage.bucket_seconds * 1000, usage.until_ms)
    since_ms = max(bucket.start_ms, usage.since_ms)
    first = bucket.start
    return (
        first + timedelta(milliseconds=since_ms - bucket.start_ms),
        first + timedelta(milliseconds=until_ms - bucket.start_ms),
    )


def tokens_by_class(usage: Usage) -> list[Row]:
    """One row for each interval and class. `charts/time.py` stacks them."""
    rows: list[Row] = []
    for bucket in usage.series:
        start, end = _ends_of(usage, bucket)
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
        start, end = _ends_of(usage, bucket)
        rows.append(
            {
                "start": start,
                "end": end,
                "class": "Lost" if bucket.saved_nano < 0 else "Saved",
                "amount": bucket.saved_nano / NANO,
                "said": dollars(bucket.saved_nano),
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


def miss_reason_table(reasons: Mapping[str, int]) -> list[Row]:
    """The most frequent first, in plain words, with each one's share of all misses.

    `Is known`: the plain words are ours, and no text from outside.
    """
    whole = sum(reasons.values())
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return [
        {
            "Reason": reason_title(reason),
            "Requests": count,
            "Share": count / whole,
            "Is known": reason in ADVICE,
        }
        for reason, count in ordered
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
            **{f"Written {t} (tokens)": getattr(each.totals, WRITE_FIELDS[t]) for t in TTLS},
            "Uncached (tokens)": each.totals.input_tokens,
            "Output (tokens)": each.totals.output_tokens,
        }
        for each in groups
    ]
