"""Rows of times to first token. Pure."""

from datetime import UTC, datetime

from dashboard.admin.shapes.latency import Latency, LatencySamples
from dashboard.rows.row import Row

MAX_DOTS = 600
"""Dots of one chart: a browser takes a second to draw a few thousand."""


def scatter_rows(found: LatencySamples) -> list[Row]:
    """At most `MAX_DOTS` of the sampled turns, evenly over the range."""
    step = -(-len(found.samples) // MAX_DOTS) or 1
    return [
        {
            "prompt": max(each.prompt_tokens, 1),
            "seconds": max(each.first_token_seconds, 0.001),
            "kind": "Hit" if each.cache_read_tokens else "Miss",
            "share": each.cache_read_tokens / max(each.prompt_tokens, 1),
            "id": each.id,
        }
        for each in found.samples[::step]
    ]


def percentiles_over_time(latency: Latency) -> list[Row]:
    return [
        {
            "start": datetime.fromtimestamp(point.start_ms / 1000, UTC),
            "kind": kind,
            "percentile": name,
            "seconds": value,
        }
        for point in latency.series
        for kind, found in (("Hit", point.hits), ("Miss", point.misses))
        for name, value in (("Median", found.p50), ("95 %", found.p95))
        if value is not None
    ]


def overhead_rows(found: LatencySamples) -> list[Row]:
    return [
        {
            "start": datetime.fromtimestamp(each.start_ms / 1000, UTC),
            "percentile": name,
            "ms": value * 1000,
        }
        for each in found.overhead
        for name, value in (("Median", each.p50), ("95 %", each.p95))
    ]


def latency_table(latency: Latency) -> list[Row]:
    """Hits and misses of one prompt length side by side."""
    lengths = sorted({cell.above_tokens for cell in latency.cells})
    rows: list[Row] = []
    for above in lengths:
        cells_of = [cell for cell in latency.cells if cell.above_tokens == above]
        hit = next((cell.seconds for cell in cells_of if cell.is_hit), None)
        miss = next((cell.seconds for cell in cells_of if not cell.is_hit), None)
        up_to = cells_of[0].up_to_tokens
        rows.append(
            {
                "Prompt tokens": f"above {above:,}" if up_to is None else f"{above:,} to {up_to:,}",
                "Hits": hit.requests if hit else 0,
                "Hit median (s)": hit.p50 if hit else None,
                "Hit 95 % (s)": hit.p95 if hit else None,
                "Misses": miss.requests if miss else 0,
                "Miss median (s)": miss.p50 if miss else None,
                "Miss 95 % (s)": miss.p95 if miss else None,
                "Times shorter": miss.p50 / hit.p50
                if hit and miss and hit.p50 and miss.p50
                else None,
            }
        )
    return rows
