"""From what the admin API says of engines now to the rows that charts and tables draw. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dashboard.admin.shapes.latency import Latency
from dashboard.admin.shapes.live import (
    Attribution,
    Blocks,
    Cell,
    Counters,
    EngineMemory,
    EngineNow,
    Histogram,
    LatencySamples,
    Lease,
    Lifetimes,
    Memory,
    Restart,
)
from dashboard.ui import formats
from dashboard.ui.formats import NANO

Row = Mapping[str, Any]

MAX_DOTS = 600
"""Dots of one chart: a browser takes a second to draw a few thousand."""

STATES = {
    "Active": "active",
    "Leased": "leased",
    "Best effort": "best_effort",
    "Cached": "cached",
    "Free": "free",
}
CELLS_A_ROW = 64
TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}


def leases(found: Sequence[Lease]) -> list[Row]:
    """What holds memory; a prefix that came once, or has no price, has no net."""
    return [
        {
            "Prefix": (lease.entry.name or lease.entry.entry)[:16],
            "Workspace": lease.workspace,
            "Engine": lease.engine,
            "State": lease.entry.state.replace("_", " "),
            "TTL left": _left(lease),
            "Ends in": clock(lease.entry.expires_in_seconds),
            "TTL": lease.entry.ttl,
            "Tokens": lease.entry.tokens,
            "Blocks": lease.entry.blocks,
            "Shared by": lease.entry.shared_by,
            "Reads": lease.entry.reads,
            "Net saved ($)": None
            if lease.prefix is None or lease.prefix.saved_nano is None
            else lease.prefix.saved_nano / NANO,
            "Entry": lease.entry.entry,
        }
        for lease in found
    ]


def _left(lease: Lease) -> float:
    """As a share of its TTL; an engine with another clock scale may say more than there is."""
    share = lease.entry.expires_in_seconds / TTL_SECONDS.get(lease.entry.ttl, 300.0)
    return min(max(share, 0.0), 1.0)


def clock(seconds: float) -> str:
    """Write what is left: 4:07, 59:30."""
    whole = max(int(seconds), 0)
    return f"{whole // 60}:{whole % 60:02}"


def cells(memory: Memory) -> list[Row]:
    """The map: each cell with what holds most of it, in rows from the top left."""
    rows: list[Row] = []
    for number, cell in enumerate(memory.cells):
        first = number * memory.blocks_per_cell
        rows.append(
            {
                "x": number % CELLS_A_ROW,
                "y": number // CELLS_A_ROW * CELLS_A_ROW * memory.blocks_per_cell,
                "state": _state(cell),
                "blocks": f"{first:,} to {first + sum(_states(cell).values()) - 1:,}",
                "what": ", ".join(f"{n} {name.lower()}" for name, n in _states(cell).items() if n),
                "shared": cell.shared,
            }
        )
    return rows


def _states(cell: Cell) -> dict[str, int]:
    return {name: getattr(cell, key) for name, key in STATES.items()}


def _state(cell: Cell) -> str:
    """What holds most of its blocks; of what is used, those that several share stand out."""
    states = _states(cell)
    name = max(states, key=lambda state: states[state])
    shared = cell.shared * 2 > sum(states.values())
    return "Shared" if shared and name in ("Active", "Leased") else name


def pools(engines: Sequence[EngineMemory]) -> list[Row]:
    """One for each engine and state, in the order in which they are stacked."""
    return [
        {
            "engine": engine.name,
            "state": name,
            "order": order,
            "blocks": getattr(engine.stats.blocks, key),
            "share": getattr(engine.stats.blocks, key) / max(engine.stats.blocks.total, 1),
        }
        for engine in engines
        if engine.stats is not None
        for order, (name, key) in enumerate(STATES.items())
    ]


def pool_table(engine: EngineMemory) -> list[Row]:
    """Blocks, tokens and bytes by what holds them, on the device and in the host tier."""
    assert engine.stats is not None and engine.memory is not None
    size, width = engine.memory.block_size, engine.kv_bytes_per_token
    tiers: list[tuple[str, Blocks]] = [("Device", engine.stats.blocks)]
    if engine.memory.host is not None:
        tiers.append(("Host", engine.memory.host))
    return [
        {
            "Tier": tier,
            "Blocks are": name,
            "Blocks": getattr(blocks, key),
            "Share": getattr(blocks, key) / max(blocks.total, 1),
            "Tokens": getattr(blocks, key) * size,
            "MiB": getattr(blocks, key) * size * width / 2**20 if width else None,
        }
        for tier, blocks in tiers
        for name, key in {**STATES, "Shared": "shared"}.items()
        if tier == "Device" or name in ("Best effort", "Cached", "Free")
    ]


def endings(counters: Counters) -> list[Row]:
    """How entries ended, with what an operator may read out of it."""
    return [
        {"reason": "TTL over", "kind": "Kept", "entries": counters.leases_expired},
        {"reason": "Evicted for room", "kind": "Lost", "entries": counters.evicted_entries},
        {"reason": "Yielded", "kind": "Lost", "entries": counters.leases_yielded},
        {"reason": "Sacrificed", "kind": "Lost", "entries": counters.leases_sacrificed},
        {"reason": "Dropped by hand", "kind": "Lost", "entries": counters.leases_dropped},
    ]


def rests(lifetimes: Lifetimes) -> list[Row]:
    """Two histograms beside each other: from use to use, and since the last use when evicted."""
    named = {
        "Used again after": lifetimes.reuse_gaps,
        "Evicted after no use for": lifetimes.idle_before_eviction,
    }
    return [row for name, found in named.items() for row in _bars(name, found)]


def _bars(name: str, found: Histogram) -> list[Row]:
    labels = [*(_short(edge) for edge in found.edges_seconds), "more"]
    return [
        {"what": name, "time": label, "order": order, "entries": count}
        for order, (label, count) in enumerate(zip(labels, found.counts, strict=True))
    ]


def _short(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def scatter(found: LatencySamples) -> list[Row]:
    """At most `MAX_DOTS` of the sample, evenly over the range: each is an element of the page."""
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


def overhead(found: LatencySamples) -> list[Row]:
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


def engines(found: Sequence[EngineNow]) -> list[Row]:
    return [
        {
            "Engine": engine.name,
            "State": "draining" if engine.is_draining else engine.status,
            "Model": engine.description.model if engine.description else None,
            "Backend": engine.description.backend if engine.description else None,
            "Up": formats.duration(engine.stats.uptime_seconds) if engine.stats else None,
            "Epoch": engine.stats.epoch[:8] if engine.stats else None,
            "Running": engine.stats.running if engine.stats else None,
            "Waiting": engine.stats.waiting if engine.stats else None,
            "Pool in use": _in_use(engine.stats.blocks) if engine.stats else None,
            "Leases": engine.stats.num_leases if engine.stats else None,
            "Preempted": engine.stats.counters.preempted_requests if engine.stats else None,
            "Breaker": f"{engine.breaker}, opened {engine.times_opened}×",
            "Names known": engine.routing.names,
            "URL": engine.url,
        }
        for engine in found
    ]


def _in_use(blocks: Blocks) -> float:
    return (blocks.active + blocks.leased) / max(blocks.total, 1)


def restarts(found: Sequence[Restart]) -> list[Row]:
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


def attribution(found: Sequence[Attribution]) -> list[Row]:
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
    ]
