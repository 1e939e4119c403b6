"""Rows of what is in the engines' memory now. Pure."""

from collections.abc import Sequence

from dashboard.admin.shapes.engines import Blocks, Counters, Store
from dashboard.admin.shapes.memory import Cell, EngineMemory, Histogram, Lifetimes, Memory
from dashboard.rows.row import Row

STATES = {
    "Active": "active",
    "Leased": "leased",
    "Best effort": "best_effort",
    "Cached": "cached",
    "Free": "free",
}
CELLS_A_ROW = 64


def cell_rows(memory: Memory) -> list[Row]:
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


def pool_rows(engines: Sequence[EngineMemory]) -> list[Row]:
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
        if getattr(engine.stats.blocks, key)
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
        for name, key in {**STATES, "Shared": "shared", "Foreign": "foreign"}.items()
        if tier == "Device" or name in ("Best effort", "Cached", "Free")
    ]


def store_rows(engines: Sequence[EngineMemory]) -> list[Row]:
    """The store on disk of each engine that has one, or should."""
    return [
        {
            "Engine": engine.name,
            "State": _store_state(store),
            "MiB": store.used_bytes / 2**20,
            "Of MiB": store.max_bytes / 2**20,
            "Entries": store.entries,
            "Leases": store.leases,
            "Held blocks": store.held_blocks,
            "Leases restored": store.restored_leases,
            "Leases lost": store.lost_leases,
            "Damaged": sum(store.misses.values()),
            "Damages": ", ".join(f"{count} {why}" for why, count in sorted(store.misses.items())),
        }
        for engine in engines
        if engine.stats is not None and (store := engine.stats.store) is not None
    ]


_REFUSED = {
    "in_use": "off: another engine uses it",
    "strangers": "off: it has files that are no store's",
    "newer": "off: it is of a newer version",
    "unusable": "off: it can't be opened",
    "too_small": "off: it has too little room",
}


def _store_state(store: Store) -> str:
    if store.refused is not None:
        return _REFUSED.get(store.refused, "off")
    return "on" if store.is_up else "can't be written"


def ending_rows(counters: Counters) -> list[Row]:
    """How entries ended, with what an operator may read out of it."""
    return [
        {"reason": "TTL over", "kind": "Kept", "entries": counters.leases_expired},
        {"reason": "Evicted for room", "kind": "Lost", "entries": counters.evicted_entries},
        {"reason": "Yielded", "kind": "Lost", "entries": counters.leases_yielded},
        {"reason": "Sacrificed", "kind": "Lost", "entries": counters.leases_sacrificed},
        {"reason": "Dropped by hand", "kind": "Lost", "entries": counters.leases_dropped},
        {"reason": "Damaged on disk", "kind": "Lost", "entries": counters.leases_damaged},
    ]


def rest_rows(lifetimes: Lifetimes) -> list[Row]:
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
