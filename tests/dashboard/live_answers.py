"""Answers of the admin API for the pages that show engines, in the states that tests want."""

from typing import Any

import msgspec

from engine.backends.base import own_guarantees

START_MS = 1_767_322_800_000
HOUR_MS = 3_600_000
EDGES = [1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0]
STATES = ("empty", "one row", "one bucket", "negative savings", "100k rows")

Answers = dict[str, Any]


def about(**changes: Any) -> Answers:
    return {
        "now_ms": START_MS,
        "workspace": None,
        "sample": False,
        "may_send": True,
        "has_placeholder_prices": False,
        "served": ["m"],
        "workspaces": ["mine"],
        "engines": ["engine-0"],
        "models": ["m"],
        "definitions": {},
        **changes,
    }


def blocks(total: int) -> Answers:
    return {
        "total": total,
        "free": total - total // 2 - total // 4,
        "active": 0,
        "leased": total // 2,
        "best_effort": 0,
        "cached": total // 4,
        "shared": total // 8,
    }


def stats(total: int) -> Answers:
    return {
        "epoch": "e" * 32,
        "uptime_seconds": 75.0,
        "running": 1,
        "waiting": 0,
        "blocks": blocks(total),
        "counters": {"copied_blocks": 3, "leases_expired": 2, "evicted_entries": 1},
        "num_leases": 1,
    }


def histogram(count: int) -> Answers:
    return {"edges_seconds": EDGES, "counts": [count, *[0] * len(EDGES)]}


def memory(num_cells: int) -> Answers:
    per_cell = 1 if num_cells < 2048 else 49
    cells = [[0, 0, per_cell, 0, 0, 0] if n % 2 else [per_cell] for n in range(num_cells)]
    names = ("expired", "evicted", "idle_before_eviction", "reuse_gaps")
    return {
        "epoch": "e",
        "block_size": 16,
        "blocks_per_cell": per_cell,
        "cells": [[*cell, *[0] * (6 - len(cell))] for cell in cells],
        "referenced_blocks": num_cells // 2,
        "unused_tokens": num_cells,
        "host": None,
        "lifetimes": {name: histogram(num_cells) for name in names},
    }


def engine_memory(num_cells: int) -> list[Answers]:
    if not num_cells:
        down = {"name": "engine-0", "status": "down", "kv_bytes_per_token": 0}
        return [down | dict.fromkeys(("backend", "model", "stats", "memory"))]
    return [
        {
            "name": "engine-0",
            "status": "ready",
            "backend": "native",
            "model": "m",
            "kv_bytes_per_token": 1024,
            "stats": stats(num_cells),
            "memory": memory(num_cells),
        }
    ]


def prefix(number: int, saved: int) -> Answers:
    return {
        "workspace": "mine",
        "prefix": f"{number:016x}",
        "model": "m",
        "ttl": "5m",
        "first_ms": START_MS,
        "last_ms": START_MS,
        "requests": 4,
        "requests_with_read": 3,
        "cache_read_tokens": 300,
        "cache_write_5m_tokens": 100,
        "cache_write_1h_tokens": 0,
        "saved_nano": saved,
        "is_paid_back": saved > 0,
        "gaps_5m": 3,
        "gaps_1h": 0,
        "nano_with_5m": 1,
        "nano_with_1h": 2,
        "better_ttl": "5m",
        "better_ttl_saves_nano": 0,
        "reads_to_pay_back": 1,
        "look": None,
    }


def leases(count: int, saved: int) -> list[Answers]:
    return [
        {
            "engine": "engine-0",
            "workspace": "mine",
            "entry": {
                "entry": f"{number:032x}",
                "scope": "s",
                "tokens": 2048,
                "blocks": 128,
                "ttl": "5m",
                "state": "leased",
                "expires_in_seconds": 247.0,
                "reads": 3,
                "name": f"{number:016x}",
                "shared_by": 1,
            },
            "prefix": prefix(number, saved),
        }
        for number in range(count)
    ]


def samples(count: int) -> Answers:
    return {
        "since_ms": START_MS,
        "until_ms": START_MS + 24 * HOUR_MS,
        "samples": [
            {
                "id": f"msg_{number}",
                "opened_ms": START_MS + number,
                "engine": "engine-0",
                "prompt_tokens": 1000 + number,
                "cache_read_tokens": 900 * (number % 2),
                "first_token_seconds": 0.1 + number % 7,
                "delivered_tokens": 900 * (number % 2),
                "overhead_seconds": None,
                "available_tokens": None,
                "captured_tokens": None,
            }
            for number in range(count)
        ],
        "overhead": [{"start_ms": START_MS, "turns": count, "p50": 0.004, "p95": 0.012}][:count],
    }


def percentiles(count: int, seconds: float) -> Answers:
    known = seconds if count else None
    return {"requests": count, "p50": known, "p95": known, "p99": known}


def latency(count: int, num_points: int) -> Answers:
    hits, misses = percentiles(count, 0.1), percentiles(count, 1.3)
    cells = [
        {"above_tokens": 0, "up_to_tokens": 1000, "is_hit": hit, "seconds": each}
        for hit, each in ((True, hits), (False, misses))
        if count
    ]
    points = [
        {"start_ms": START_MS + HOUR_MS * number, "hits": hits, "misses": misses}
        for number in range(num_points)
    ]
    return {
        "hits": hits,
        "misses": misses,
        "cells": cells,
        "bucket_seconds": 3600,
        "series": points,
    }


def history(count: int) -> Answers:
    return {
        "since_ms": START_MS,
        "until_ms": START_MS + HOUR_MS,
        "restarts": [
            {
                "engine": "engine-0",
                "epoch": f"{number:032x}",
                "last_ms": START_MS,
                "first_ms": START_MS + 60_000,
                "lost": {"requests": 3, "written_tokens": 12_000},
            }
            for number in range(min(count, 50))
        ],
        "attribution": [
            {
                "engine": name,
                "turns": count,
                "prompt_tokens": 1000 * count,
                "available_tokens": 700 * count,
                "captured_tokens": 650 * count,
                "delivered_tokens": 640 * count,
            }
            for name in (None, "engine-0")
            if count
        ],
    }


def engine_now(is_up: bool, name: str = "engine-0") -> Answers:
    description = {
        "backend": "native",
        "model": "m",
        "epoch": "e",
        "max_context_tokens": 4096,
        "block_size": 16,
        "num_blocks": 64,
        "granularity": 1,
        "min_cache_tokens": 64,
        "capabilities": ["forced_tools"],
        "guarantees": msgspec.to_builtins(own_guarantees(["forced_tools"])),
    }
    routing = {"source": "events", "is_stale": False}
    counts = ("names", "forgotten_names", "running", "waiting_tokens", "recent_tokens")
    return {
        "name": name,
        "url": "http://127.0.0.1:1",
        "status": "ready" if is_up else "down",
        "is_draining": False,
        "breaker": "closed",
        "times_opened": 0,
        "detail": {},
        "description": description if is_up else None,
        "stats": stats(64) if is_up else None,
        "routing": routing | dict.fromkeys(counts, 0),
    }


def answers(state: str) -> Answers:
    """What the admin API says in one of STATES; lists are as long as the API ever makes them."""
    many = {"empty": 0, "one row": 1, "one bucket": 12, "negative savings": 12, "100k rows": 4000}
    count = many[state]
    saved = -5_000_000_000 if state == "negative savings" else 5_000_000_000
    points = 24 if state == "100k rows" else 1 if count else 0
    return {
        "/admin/v1/about": about(),
        "/admin/v1/leases": leases(min(count, 500), saved),
        "/admin/v1/prefixes": [prefix(number, saved) for number in range(min(count, 100))],
        "/admin/v1/engines/memory": engine_memory({12: 64, 4000: 2048}.get(count, count)),
        "/admin/v1/engines": [engine_now(count > 0)],
        "/admin/v1/engines/history": history(count),
        "/admin/v1/latency": latency(100_000 if count == 4000 else count, points),
        "/admin/v1/latency/samples": samples(count),
        "/admin/v1/workspaces": [],
        "/v1/models": {"data": [{"id": "m"}] if count else []},
    }
