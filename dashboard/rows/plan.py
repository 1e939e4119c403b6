"""Rows of a plan: its points for tables and charts. Pure."""

from collections.abc import Sequence

from dashboard.admin.shapes.plan import Plan, Point
from dashboard.rows.row import Row

EXACT, SIMULATED, REUSED = "LRU, no leases (exact)", "Read (simulated)", "Reused (simulated)"
P50, P95 = "p50", "p95"


def point_rows(points: Sequence[Point]) -> list[Row]:
    return [
        {
            "Fleet": point.label,
            "Engines": point.engines,
            "GiB for keys and values": point.device_gib,
            "Hit rate": point.hit_rate,
            "Reused": point.reuse_rate,
            "Promise kept": point.promise_kept,
            "Best effort": point.best_effort,
            "First token p50 (s)": point.first_token_p50,
            "First token p95 (s)": point.first_token_p95,
            "Prefill saved (s)": round(point.prefill_saved_seconds),
            "Refused": point.refused,
        }
        for point in points
    ]


def memory_rows(plan: Plan) -> list[Row]:
    """Shares of the prompt tokens by the memory of all engines together."""
    rows: list[Row] = [
        {"x": each.gib, "share": each.reuse_rate, "kind": EXACT} for each in plan.lru
    ]
    for point in plan.memory:
        at = point.device_gib * point.engines
        rows.append({"x": at, "share": point.hit_rate, "kind": SIMULATED})
        rows.append({"x": at, "share": point.reuse_rate, "kind": REUSED})
    return rows


def engine_rows(points: Sequence[Point]) -> list[Row]:
    return [
        {"x": point.engines, "share": share, "kind": kind}
        for point in points
        for share, kind in ((point.hit_rate, SIMULATED), (point.reuse_rate, REUSED))
    ]


def wait_rows(points: Sequence[Point], *, by_engines: bool) -> list[Row]:
    return [
        {
            "x": point.engines if by_engines else point.device_gib * point.engines,
            "seconds": seconds,
            "kind": kind,
        }
        for point in points
        for seconds, kind in ((point.first_token_p50, P50), (point.first_token_p95, P95))
    ]
