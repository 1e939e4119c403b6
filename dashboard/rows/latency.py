"""Rows of times to first token. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime

from dashboard.admin.shapes.latency import Latency, LatencyCell, LatencySamples, Percentiles
from dashboard.rows.row import Row

MIN_TURNS = 5
"""Medians of fewer turns are not compared."""
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


@dataclass(frozen=True, slots=True)
class Compared:
    """Turns of one prompt length, with and without a read. `length` is that length in words."""

    length: str
    hits: Percentiles
    misses: Percentiles

    @property
    def times_sooner(self) -> float | None:
        return self.misses.p50 / self.hits.p50 if self.hits.p50 and self.misses.p50 else None


def compared(latency: Latency) -> Compared | None:
    """The prompt length that most hits and misses both had; None where too few had one.

    Medians over all lengths compare long prompts that are cached with short ones that are not.
    """
    pairs = [
        Compared(_length(hit), hit.seconds, miss.seconds)
        for hit in latency.cells
        for miss in latency.cells
        if hit.is_hit and not miss.is_hit and hit.above_tokens == miss.above_tokens
    ]
    best = max(pairs, key=lambda p: min(p.hits.requests, p.misses.requests), default=None)
    if best is None or min(best.hits.requests, best.misses.requests) < MIN_TURNS:
        return None
    return best


def _length(cell: LatencyCell) -> str:
    if cell.up_to_tokens is None:
        return f"above {cell.above_tokens:,}"
    return f"{cell.above_tokens:,} to {cell.up_to_tokens:,}"


def two_digits(value: float | None) -> float | None:
    """The histogram's bins are 19 % wide, so a third digit would say nothing."""
    return None if value is None else float(f"{value:.2g}")


def latency_table(latency: Latency) -> list[Row]:
    """Hits and misses of one prompt length side by side."""
    lengths = sorted({cell.above_tokens for cell in latency.cells})
    rows: list[Row] = []
    for above in lengths:
        cells_of = [cell for cell in latency.cells if cell.above_tokens == above]
        hit = next((cell.seconds for cell in cells_of if cell.is_hit), None)
        miss = next((cell.seconds for cell in cells_of if not cell.is_hit), None)
        rows.append(
            {
                "Prompt tokens": _length(cells_of[0]),
                "Hits": hit.requests if hit else 0,
                "Hit median (s)": two_digits(hit.p50) if hit else None,
                "Hit 95 % (s)": two_digits(hit.p95) if hit else None,
                "Misses": miss.requests if miss else 0,
                "Miss median (s)": two_digits(miss.p50) if miss else None,
                "Miss 95 % (s)": two_digits(miss.p95) if miss else None,
                "Times shorter": two_digits(miss.p50 / hit.p50)
                if hit and miss and hit.p50 and miss.p50
                else None,
            }
        )
    return rows
