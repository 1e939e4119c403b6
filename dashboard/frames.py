"""From the admin API's answers to the tables that charts draw. Pure: no I/O, no clock."""

from datetime import timedelta
from itertools import accumulate
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from dashboard.client import Bucket, Engine
from dashboard.formats import NANO, duration

# In the order in which they are stacked, from the bottom.
TOKEN_CLASSES = {
    "Read from cache": "cache_read_tokens",
    "Written, 5 minutes": "cache_write_5m_tokens",
    "Written, 1 hour": "cache_write_1h_tokens",
    "Uncached": "input_tokens",
}
BLOCK_STATES = {
    "Active": "active",
    "Leased": "leased",
    "Best effort": "best_effort",
    "Cached": "cached",
    "Free": "free",
}


def tokens_by_class(series: list[Bucket], bucket_seconds: int) -> Any:
    """One row per bucket and class, stacked: a rectangle from `start`, `bottom` to `end`, `top`."""
    width = timedelta(seconds=bucket_seconds)
    rows = []
    for bucket in series:
        top = 0
        for name, key in TOKEN_CLASSES.items():
            tokens = getattr(bucket.totals, key)
            bottom, top = top, top + tokens
            start, end = bucket.start, bucket.start + width
            rows.append((start, end, name, tokens, bottom, top))
    return pd.DataFrame(rows, columns=["start", "end", "class", "tokens", "bottom", "top"])


def hit_rates(series: list[Bucket]) -> list[float]:
    """The hit rate of each bucket that had traffic: a pause is no rate of zero."""
    rates = (bucket.hit_rate for bucket in series)
    return [rate for rate in rates if rate is not None]


def running_savings(series: list[Bucket]) -> list[float]:
    """What was saved since the first bucket, in dollars; may fall and may be negative."""
    return [nano / NANO for nano in accumulate(bucket.saved_nano for bucket in series)]


def request_counts(series: list[Bucket]) -> list[int]:
    return [bucket.totals.requests for bucket in series]


def read_counts(series: list[Bucket]) -> list[int]:
    return [bucket.totals.cache_read_tokens for bucket in series]


def blocks_by_state(engines: list[Engine]) -> Any:
    """One row per engine that answers and state; `share` is of that engine's pool."""
    rows = [
        {
            "engine": engine_label(engine),
            "state": name,
            "order": order,
            "blocks": getattr(engine.blocks, key),
            "share": getattr(engine.blocks, key) / max(engine.blocks.total, 1),
        }
        for engine in engines
        if engine.blocks is not None
        for order, (name, key) in enumerate(BLOCK_STATES.items())
    ]
    return pd.DataFrame(rows, columns=["engine", "state", "order", "blocks", "share"])


def engine_table(engines: list[Engine]) -> Any:
    rows = []
    for engine in engines:
        description, stats = engine.description, engine.stats
        row: dict[str, object] = {
            "Engine": engine_label(engine),
            "State": engine.status,
            "Kind": description.backend if description else None,
            "Model": description.model if description else None,
            "Up": duration(stats.uptime_seconds) if stats else None,
            "Running": stats.running if stats else None,
            "Waiting": stats.waiting if stats else None,
            "Leases": stats.num_leases if stats else None,
        }
        for name, key in BLOCK_STATES.items():
            row[name] = getattr(stats.blocks, key) if stats else None
        row["Blocks"] = stats.blocks.total if stats else None
        rows.append(row)
    return pd.DataFrame(rows)


def engine_label(engine: Engine) -> str:
    return engine.url.removeprefix("http://").removeprefix("https://")
