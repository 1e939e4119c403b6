"""Rows of the engines: their state, their restarts, and where hits are lost. Pure."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from dashboard.admin.shapes.engines import (
    Attribution,
    Blocks,
    Counters,
    EngineReport,
    Guarantee,
    Restart,
    Stats,
)
from dashboard.rows.row import Row
from dashboard.ui import formats

PROMISES = {
    "exact_read": "A read is what memory reused",
    "exact_write": "A write is what was computed",
    "hold": "A lease holds until it expires",
    "isolation": "Workspaces are kept apart",
    "events": "Evictions are told",
    "forced_tools": "Forced calls are valid",
}


def engine_table(found: Sequence[EngineReport]) -> list[Row]:
    return [
        {
            "Engine": engine.name,
            "State": "draining" if engine.is_draining else engine.status,
            "Model": engine.description.model if engine.description else None,
            "Backend": engine.description.server if engine.description else None,
            "Attention": (engine.description.attention or None) if engine.description else None,
            "Up": formats.duration(engine.stats.uptime_seconds) if engine.stats else None,
            "Epoch": engine.stats.epoch[:8] if engine.stats else None,
            "Running": engine.stats.running if engine.stats else None,
            "Waiting": engine.stats.waiting if engine.stats else None,
            "Pool in use": in_use_share([engine.stats.blocks]) if engine.stats else None,
            "Foreign": foreign_share([engine.stats]) if engine.stats else None,
            "Foreign running": engine.stats.foreign_running if engine.stats else None,
            "Leases": engine.stats.num_leases if engine.stats else None,
            "Preempted": engine.stats.counters.preempted_requests if engine.stats else None,
            "Breaker": f"{engine.breaker}, opened {engine.times_opened}×",
            "Names known": engine.routing.names,
            "URL": engine.url,
        }
        for engine in found
    ]


def promise_table(found: Sequence[EngineReport]) -> list[Row]:
    """Each promise of the engine protocol once for all engines that say the same of it."""
    sayings: dict[tuple[str, Guarantee], list[str]] = {}
    for engine in found:
        if engine.description is not None:
            for one in engine.description.guarantees:
                sayings.setdefault((engine.description.server, one), []).append(engine.name)
    names = list(PROMISES)
    ordered = sorted(
        sayings.items(),
        key=lambda item: names.index(item[0][1].name) if item[0][1].name in names else len(names),
    )
    return [
        {
            "Promise": PROMISES.get(one.name, one.name),
            "Kept": "yes" if one.is_kept else "no",
            "How, or why not": one.note,
            "Backend": server,
            "Engines": ", ".join(engines),
        }
        for (server, one), engines in ordered
    ]


def in_use_share(found: Sequence[Blocks]) -> float | None:
    """Blocks in use of all pools together; None without a pool. The pages share this sum."""
    total = sum(blocks.total for blocks in found)
    return sum(blocks.num_in_use for blocks in found) / total if total else None


def leases_kept(found: Sequence[Counters]) -> tuple[float | None, dict[str, int]]:
    """The share of ended leases that lived to their end, and how many others ended of what."""
    expired = sum(counters.leases_expired for counters in found)
    lost: Counter[str] = Counter()
    for counters in found:
        lost.update(counters.leases_lost)
    ended = expired + sum(lost.values())
    return (expired / ended if ended else None), {name: n for name, n in lost.items() if n}


def foreign_share(found: Sequence[Stats]) -> float:
    """What other clients of the engines' servers use of all pools together."""
    total = sum(stats.blocks.total for stats in found)
    return sum(stats.blocks.foreign for stats in found) / max(total, 1)


def restart_table(found: Sequence[Restart]) -> list[Row]:
    return [
        {
            "Back at (UTC)": datetime.fromtimestamp(each.first_ms / 1000, UTC),
            "Engine": each.engine,
            "Without turns for": formats.duration((each.first_ms - each.last_ms) / 1000),
            "Turns that missed for it": each.lost.requests,
            "Tokens written again": each.lost.written_tokens,
            "Epoch": each.epoch[:8],
        }
        for each in found
    ]


def attribution_rows(found: Sequence[Attribution]) -> list[Row]:
    """Shares of the sampled prompts, of all engines and of each."""
    return [
        {
            "engine": each.engine or "all engines",
            "stage": stage,
            "order": order,
            "share": tokens / max(each.prompt_tokens, 1),
            "tokens": tokens,
            "turns": each.turns,
        }
        for each in found
        for order, (stage, tokens) in enumerate(
            (
                ("Available", each.available_tokens),
                ("Captured", each.captured_tokens),
                ("Delivered", each.delivered_tokens),
            )
        )
        if tokens
    ]
