"""Answers of the admin API for the pages that show engines, in the states that tests want."""

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import structs

from engine.backends.base import own_guarantees
from engine.protocol.reports import (
    BlockStats,
    Description,
    EntryInfo,
    Histogram,
    Holding,
    Lifetimes,
    Memory,
    Stats,
)
from gateway.structs import fleet, usage

START_MS = 1_767_322_800_000
HOUR_MS = 3_600_000
EDGES = [1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0]
# How many of everything there are in each state.
COUNTS = {"empty": 0, "one row": 1, "one bucket": 12, "100k rows": 4000}

Answers = dict[str, Any]


def made(kind: type[msgspec.Struct], **fields: Any) -> Answers:
    """One of a structure, of which the test tells what it looks at; the rest is 0 or empty."""
    assert fields.keys() <= set(kind.__struct_fields__), fields.keys()
    blanks = {f.name: blank(f.type) for f in structs.fields(kind) if f.required}
    return blanks | fields


def blank(field_type: Any) -> Any:
    """The least value of a type: None, the first of a choice, 0, or empty."""
    origin = get_origin(field_type)
    parts = get_args(field_type)
    if origin in (Union, UnionType):
        return None if type(None) in parts else blank(parts[0])
    if origin in (Annotated, Literal):
        return parts[0] if origin is Literal else blank(parts[0])
    kind = list if origin is Sequence else origin or field_type
    return made(kind) if issubclass(kind, msgspec.Struct) else kind()


def about(**changes: Any) -> Answers:
    names = {
        "served": ["m"],
        "listed": [{"id": "m", "root": None, "parent": None}],
        "workspaces": ["mine"],
        "engines": ["engine-0"],
        "models": ["m"],
    }
    may = {"may_send": True, "may_change": changes.get("workspace") is None}
    return made(fleet.About, **{"now_ms": START_MS, **may, **names, **changes})


def stats(total: int) -> Answers:
    free = total - total // 2 - total // 4
    parts = {"free": free, "leased": total // 2, "cached": total // 4, "shared": total // 8}
    counters = {"copied_blocks": 3, "leases_expired": 2, "evicted_entries": 1}
    blocks = made(BlockStats, total=total, **parts)
    numbers = {"blocks": blocks, "counters": counters, "running": 1, "num_leases": 1}
    return made(Stats, epoch="e" * 32, uptime_seconds=75.0, **numbers)


def memory(num_cells: int) -> Answers:
    per_cell = 1 if num_cells < 2048 else 49
    cells = [[0, 0, per_cell, 0, 0, 0] if n % 2 else [per_cell, *[0] * 5] for n in range(num_cells)]
    ages = made(Histogram, edges_seconds=EDGES, counts=[num_cells, *[0] * len(EDGES)])
    return made(
        Memory,
        block_size=16,
        blocks_per_cell=per_cell,
        cells=cells,
        referenced_blocks=num_cells // 2,
        unused_tokens=num_cells,
        lifetimes=dict.fromkeys(Lifetimes.__struct_fields__, ages),
    )


def engine_memory(num_cells: int) -> list[Answers]:
    if not num_cells:
        return [made(fleet.EngineMemory, name="engine-0", status="down")]
    names = {"name": "engine-0", "status": "ready", "backend": "native", "model": "m"}
    blocks = stats(num_cells)["blocks"]
    entries = [
        made(
            fleet.Held,
            workspace="mine",
            key_id="key_1",
            key="agent",
            holding=made(
                Holding,
                entry="e" * 32,
                active=blocks["active"],
                leased=blocks["leased"],
                cached=blocks["cached"],
            ),
        )
    ]
    reports = {"stats": stats(num_cells), "memory": memory(num_cells), "held": entries}
    return [made(fleet.EngineMemory, kv_bytes_per_token=1024, state_blocks=3, **names, **reports)]


def prefix(number: int) -> Answers:
    labels = {"workspace": "mine", "prefix": f"{number:016x}", "ttl": "5m", "better_ttl": "5m"}
    counts = {"requests": 4, "requests_with_read": 3, "cache_read_tokens": 300}
    return made(usage.PrefixReport, **labels, **counts, saved_nano=5_000_000_000)


def lease(number: int) -> Answers:
    entry = made(
        EntryInfo,
        entry=f"{number:032x}",
        tokens=2048,
        ttl="5m",
        state="leased",
        expires_in_seconds=247.0,
        name=f"{number:016x}",
    )
    whose = {"engine": "engine-0", "workspace": "mine"}
    return made(fleet.LiveEntry, entry=entry, prefix=prefix(number), **whose)


def samples(count: int) -> Answers:
    points = [
        made(
            usage.Sample,
            id=f"msg_{number}",
            opened_ms=START_MS + number,
            engine="engine-0",
            prompt_tokens=1000 + number,
            cache_read_tokens=900 * (number % 2),
            first_token_seconds=0.1 + number % 7,
            delivered_tokens=900 * (number % 2),
        )
        for number in range(count)
    ]
    overhead = made(usage.Overhead, start_ms=START_MS, turns=count, p50=0.004, p95=0.012)
    day = {"since_ms": START_MS, "until_ms": START_MS + 24 * HOUR_MS}
    totals = {"num_turns": count, "is_whole": True, "overhead_p50": 0.004 if count else None}
    totals["overhead_p95"] = 0.012 if count else None
    return made(usage.LatencySamples, samples=points, overhead=[overhead][:count], **day, **totals)


def latency(count: int, num_points: int) -> Answers:
    def percentiles(seconds: float) -> Answers:
        known = seconds if count else None
        return made(usage.Percentiles, requests=count, p50=known, p95=known, p99=known)

    hits = percentiles(0.1)
    misses = percentiles(1.3)
    cells = [
        made(
            usage.LatencyCell,
            model="m",
            above_tokens=0,
            up_to_tokens=1000,
            is_hit=hit,
            seconds=seconds,
        )
        for hit, seconds in ((True, hits), (False, misses))
        if count
    ]
    points = [
        made(usage.LatencyPoint, start_ms=START_MS + HOUR_MS * n, hits=hits, misses=misses)
        for n in range(num_points)
    ]
    sides = {"hits": hits, "misses": misses, "cells": cells, "series": points}
    return made(usage.Latency, bucket_seconds=3600, **sides)


def history(count: int) -> Answers:
    times = {"last_ms": START_MS, "first_ms": START_MS + 60_000}
    lost = {"requests": 3, "written_tokens": 12_000}
    restarts = [
        made(fleet.Epoch, engine="engine-0", epoch=f"{number:032x}", lost=lost, **times)
        for number in range(min(count, 50))
    ]
    shares = {"prompt": 1000, "available": 700, "captured": 650, "delivered": 640}
    tokens = {f"{name}_tokens": share * count for name, share in shares.items()}
    attribution = [
        made(fleet.Attribution, engine=name, turns=count, **tokens)
        for name in (None, "engine-0")
        if count
    ]
    totals = {"num_turns": count, "is_whole": True}
    return made(fleet.FleetHistory, restarts=restarts, attribution=attribution, **totals)


def load(number: int) -> Answers:
    gauges = {"in_use": 0.5, "leased": 0.25, "running": 2, "waiting": 1, "queued": 3}
    return made(fleet.LoadPoint, start_ms=START_MS + 60_000 * number, **gauges)


def engine_now(is_up: bool, name: str = "engine-0") -> Answers:
    guarantees = msgspec.to_builtins(own_guarantees(["forced_tools"]))
    identity = {"backend": "native", "model": "m", "capabilities": ["forced_tools"]}
    description = made(Description, **identity, block_size=16, num_blocks=64, guarantees=guarantees)
    reports = {"description": description, "stats": stats(64)} if is_up else {}
    state = {"status": "ready" if is_up else "down", "breaker": "closed"}
    routing = made(fleet.RoutingReport)
    return made(fleet.EngineReport, name=name, routing=routing, **state, **reports)


def answers(state: str) -> Answers:
    """What the admin API says in one of these states; lists are as long as it ever makes them."""
    count = COUNTS[state]
    points = 24 if state == "100k rows" else 1 if count else 0
    return {
        "/admin/v1/about": about(),
        "/admin/v1/leases": [lease(number) for number in range(min(count, 500))],
        "/admin/v1/prefixes": [prefix(number) for number in range(min(count, 100))],
        "/admin/v1/engines/memory": engine_memory({12: 64, 4000: 2048}.get(count, count)),
        "/admin/v1/engines": [engine_now(count > 0)],
        "/admin/v1/engines/history": history(count),
        "/admin/v1/engines/load": [load(number) for number in range(min(count, 120))],
        "/admin/v1/latency": latency(100_000 if count == 4000 else count, points),
        "/admin/v1/latency/samples": samples(count),
        "/admin/v1/workspaces": [],
        "/v1/models": {"data": [{"id": "m"}] if count else []},
    }
