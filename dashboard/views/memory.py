"""Memory: what holds the engines' blocks, and what was lost for want of room?"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import altair as alt
import streamlit as st

from dashboard.client import AdminClient
from dashboard.ui import charts, conditions, formats, live, parts, viewer
from dashboard.ui.charts import BAR_HEIGHT, Row
from dashboard.ui.filters import Selection
from dashboard.ui.prefix_labels import NO_WORDS, entry_label, first_words
from dashboard.views.fleet import foreign_share
from engine.protocol.reports import (
    BlockCell,
    Counters,
    Holding,
    Lifetimes,
    Memory,
    Stats,
    StoreStats,
)
from gateway.structs.conditions import Condition
from gateway.structs.fleet import EngineMemory, Held

REFRESH_SECONDS = 5
# What holds blocks, in words, with the field for it in a map's cell and in a pool's counts.
CELLS = {
    "Active": "active",
    "Leased": "leased",
    "Best effort": "best_effort",
    "Without an entry": "cached",
    "Free": "free",
}
# What holds blocks, in words, with the field for it in a holding.
HELD = {
    "Active": "active",
    "Leased": "leased",
    "Leased in the store": "lowered",
    "Best effort": "best_effort",
    "Without an entry": "cached",
}
BY = ("Workspace", "Key", "Prefix")
CELLS_A_ROW = 64
CELL_HEIGHT = 9
_REFUSED = {
    "in_use": "off: another engine uses it",
    "strangers": "off: it has files that are no store's",
    "newer": "off: it is of a newer version",
    "older": "off: it is of an older version",
    "unusable": "off: it can't be opened",
    "too_small": "off: it has too little room",
    "server_flags": "off: the server keeps no slot files",
}


class View(NamedTuple):
    """What the page shows."""

    engines: list[EngineMemory]
    # The engines that do not answer now, and why.
    silent: list[Condition]
    # The first words of prefixes, by the id of their last request.
    words: Mapping[str, str]


def read(client: AdminClient, selection: Selection) -> View:
    params = {"engine": selection.engine}
    engines = client.get("/admin/v1/engines/memory", list[EngineMemory], params)
    held = list(chain.from_iterable(engine.held for engine in engines))
    held.sort(key=lambda share: blocks_of(share.holding), reverse=True)
    words = first_words(client, (share.look for share in held))
    return View(engines, conditions.silent(client, selection.engine), words)


def draw(view: View, selection: Selection) -> None:
    engines = view.engines
    answering = [engine for engine in engines if engine.stats is not None]
    rows = silent_rows(view)
    if engines and not answering:
        count = formats.counted(len(engines), "engine")
        words = f"None of {count} tells" if len(engines) > 1 else "The engine does not tell"
        parts.hero(f"**{words}** what is in its memory.")
        draw_silent(rows)
        parts.empty("Memory is shown live: it is known again when an engine answers.")
        return
    if not answering:
        parts.hero("**No engine answers**, so there is no KV memory to show.")
        parts.no_engine(
            "No engine is running. Memory is shown live; nothing of it is in the ledger.", "memory"
        )
        return
    draw_silent(rows)
    stats = [engine.stats for engine in answering if engine.stats is not None]
    draw_sentence(answering, owner=" of the engines that answer" if rows else "")
    draw_pools(answering)
    draw_holders(answering, view.words)
    # Only one engine is shown in full at a time, so that the page stays short.
    detailed = answering[0]
    if len(answering) > 1:
        names = [engine.name for engine in answering]
        name = st.selectbox("Engine in full", names, key="memory_engine", width=260)
        detailed = next((engine for engine in answering if engine.name == name), detailed)
    draw_map(detailed)
    with st.expander("Details", key="memory_details"):
        draw_details(answering, detailed, stats)


def draw_map(engine: EngineMemory) -> None:
    parts.heading("Block map")
    st.text(f"{engine.name} · {engine.backend} · {engine.model}")
    stats = engine.stats
    memory = engine.memory
    assert stats is not None
    if memory is None:
        parts.empty("This engine does not tell what is in its memory.")
    elif memory.cells:
        alt_text = ", ".join(
            f"{count:,} {state.lower()}" for state, count in pool_of(engine).items()
        )
        parts.chart(
            block_map(memory, charts.BLOCKS[viewer.theme()]),
            f"map_{engine.name}",
            f"Map of {stats.blocks.total:,} blocks: {alt_text};"
            f" {stats.blocks.shared:,} have more than one holder.",
        )
    else:
        parts.empty(
            "No map: this engine's blocks are another program's, which does not say where they"
            " are. The counts below are its own.",
            ":material/map:",
        )


def draw_details(
    answering: Sequence[EngineMemory], engine: EngineMemory, all_stats: list[Stats]
) -> None:
    """Draw what stands behind a click: amounts, stores, and one engine in full."""
    draw_cards(answering, all_stats)
    stores = store_rows(answering)
    alt_text = ", ".join(f"{row['Engine']} {row['State']}" for row in stores)
    alt_text = f"Stores on disk: {alt_text}."
    parts.section("Store on disk", stores, "stores", alt_text, number="store_bytes")
    stats = engine.stats
    memory = engine.memory
    if stats is None or memory is None:
        return
    left, right = st.columns(2, gap="large")
    with left:
        draw_endings(engine.name, stats.counters)
    with right:
        draw_rests(engine.name, memory.lifetimes)
    rows = pool_table(engine, memory)
    parts.heading("Blocks by what holds them")
    parts.table(rows, f"pool_{engine.name}", f"Blocks of {engine.name} by what holds them.")
    if engine.state_blocks:
        size = formats.counted(engine.state_blocks, "block")
        st.caption(f"Each entry and each running sequence has a recurrent state of {size}.")


def silent_rows(view: View) -> list[Row]:
    """The engines whose memory is not known now."""
    causes = {condition.engine: condition for condition in view.silent}
    silent = [engine.name for engine in view.engines if engine.stats is None]
    return [_silent_row(name, causes.get(name)) for name in silent]


def _silent_row(engine: str, condition: Condition | None) -> Row:
    return {
        "Engine": engine,
        "State": "not known",
        "Since (UTC)": formats.moment(condition.since_ms) if condition else None,
        "Why": condition.cause if condition else "it did not answer this question",
    }


def draw_silent(rows: Sequence[Row]) -> None:
    alt_text = ", ".join(f"{row['Engine']}: {row['Why']}" for row in rows)
    parts.section(
        "Engines whose memory is not known now",
        list(rows),
        "silent",
        f"Not known: {alt_text}.",
    )


def pool_of(engine: EngineMemory) -> dict[str, int]:
    """The blocks of an engine's pool by what holds them, each block once. All bars, cards and
    tables show these numbers. If the engine has a map, they are sums over its holdings. Else they
    are the engine's own counts."""
    assert engine.stats is not None
    blocks = engine.stats.blocks
    if engine.memory is None or not engine.memory.cells:
        return {name: getattr(blocks, key) for name, key in CELLS.items()}
    amounts = {
        name: sum(getattr(share.holding, key) for share in engine.held)
        for name, key in HELD.items()
    }
    return {**amounts, "Free": blocks.total - sum(amounts.values())}


def shares_of(engines: Sequence[EngineMemory]) -> dict[str, str]:
    """The share of all pools together that each kind of holder has, in words. `In use` is what
    running sequences and leases hold."""
    pools = [pool_of(engine) for engine in engines]
    total = max(sum(engine.stats.blocks.total for engine in engines if engine.stats), 1)
    counts = {name: sum(pool.get(name, 0) for pool in pools) for name in [*HELD, "Free"]}
    counts["In use"] = counts["Active"] + counts["Leased"]
    return {name: formats.percent(count / total) for name, count in counts.items()}


def draw_sentence(engines: Sequence[EngineMemory], owner: str) -> None:
    share = shares_of(engines)
    parts.hero(
        f"**{share['In use']}** of the KV memory{owner} is in use, **{share['Leased']}** is"
        f" promised to leases. {share['Best effort']} is best effort, and"
        f" {share['Without an entry']} is content without an entry: both make way for what needs"
        f" the room. {share['Free']} is free."
    )


def draw_cards(engines: Sequence[EngineMemory], all_stats: list[Stats]) -> None:
    share = shares_of(engines)
    pools = [pool_of(engine) for engine in engines]
    host = sum(stats.host_blocks for stats in all_stats)
    host_used = sum(stats.host_blocks_used for stats in all_stats)
    demoted = sum(stats.counters.demoted_blocks for stats in all_stats)
    foreign = foreign_share(all_stats)
    unused = unused_share(engines)
    lowered = sum(pool.get("Leased in the store", 0) for pool in pools)
    with st.grid(3, min_column_width=190):
        note = f"{formats.percent(foreign)} by other clients" if foreign else None
        parts.card("pool_in_use", share["In use"], delta=note)
        note = f"{share['Leased in the store']} more in the store" if lowered else None
        parts.card("pool_leased", share["Leased"], delta=note)
        parts.card("pool_best_effort", share["Best effort"])
        parts.card("pool_cached", share["Without an entry"])
        parts.card("pool_free", share["Free"])
        parts.card("unused_tokens", formats.percent(unused))
        copied = sum(stats.counters.copied_blocks for stats in all_stats)
        parts.card("copied_blocks", formats.compact(copied))
        evicted = sum(stats.counters.evicted_blocks for stats in all_stats)
        note = f"{formats.compact(demoted)} copied to the host" if host else None
        parts.card("evicted_blocks", formats.compact(evicted), delta=note)
        note = f"of {formats.compact(host)}" if host else "none configured"
        value = formats.compact(host_used) if host else formats.NO_VALUE
        parts.card("host_blocks", value, delta=note)


def unused_share(engines: Sequence[EngineMemory]) -> float | None:
    """The share of the token slots in referenced blocks that hold no token; None if no engine tells
    it."""
    slots = 0
    unused = 0
    for engine in engines:
        memory = engine.memory
        if memory is not None and memory.unused_tokens is not None:
            slots += (memory.referenced_blocks or 0) * memory.block_size
            unused += memory.unused_tokens
    return unused / slots if slots else None


def draw_holders(engines: Sequence[EngineMemory], words: Mapping[str, str]) -> None:
    """Draw who fills the memory. Each block of each pool counts once, so the shares add up."""
    parts.heading("Who fills it", "holders")
    by = st.segmented_control("By", BY, default=BY[0], key="memory_by", required=True)
    rows = holder_table(engines, by, words)
    if rows:
        alt_text = f"Blocks by {by.lower()}: {formats.counted(len(rows), 'row')}."
        has_store_leases = any(row["Leased in the store"] for row in rows)
        hidden = () if has_store_leases else ("Leased in the store",)
        parts.table(rows, "holders", alt_text, hidden=hidden)
    else:
        parts.empty("Nobody holds a block.")
    if by != BY[0]:
        st.caption(
            "The key is that of the newest request that wrote exactly this prefix. It is empty if"
            " no request of the ledger ended with the prefix. It is also empty for content without"
            " an entry, which has no prefix."
        )
    unmapped = [engine for engine in engines if not has_map(engine)]
    if not unmapped:
        return
    rows = held_rows(unmapped, by, words)
    names = ", ".join(engine.name for engine in unmapped)
    st.text(
        f"{names}: only the number of blocks is known, not whose they are. The table below shows"
        " what each prefix takes, by its number of tokens."
    )
    if rows:
        parts.table(rows, "told", f"Prefixes of {names}: {len(rows)} rows.")


def has_map(engine: EngineMemory) -> bool:
    """Whether the engine tells of each block what holds it."""
    return engine.memory is not None and bool(engine.memory.cells)


def holder_table(
    engines: Sequence[EngineMemory], by: str, words: Mapping[str, str] = NO_WORDS
) -> list[Row]:
    """The holders, those with the most blocks first. Then come blocks whose holders are not known,
    and free blocks. Shares are of all pools together, and add up to 1."""
    answering = [engine for engine in engines if engine.stats is not None]
    total = sum(engine.stats.blocks.total for engine in answering if engine.stats) or 1
    rows = held_rows([engine for engine in answering if has_map(engine)], by, words)
    num_free = 0
    free_mib = 0.0
    blank = dict.fromkeys(rows[0]) if rows else {"Workspace": None}
    for engine in answering:
        pool = pool_of(engine)
        num_free += pool["Free"]
        free_mib += mib_of(engine, pool["Free"])
        if has_map(engine):
            continue
        counts = {name: pool.get(name, 0) for name in HELD}
        blocks = sum(counts.values())
        total_columns = {"Workspace": f"{engine.name}, not told apart", "Blocks": blocks}
        if blocks:
            mib = mib_of(engine, blocks) or None
            rows.append({**blank, **total_columns, **counts, "MiB": mib})
    if rows:
        # Free blocks have no holder, so the columns of `HELD` stay empty.
        rows.append(
            {**blank, "Workspace": "Free", "Blocks": num_free, "MiB": free_mib or None}
            | dict.fromkeys(HELD)
        )
    return [{**row, "Share": row["Blocks"] / total} for row in rows]


def mib_of(engine: EngineMemory, blocks: int) -> float:
    """The size of blocks in MiB; 0 if the engine does not tell what a token takes."""
    size = engine.memory.block_size if engine.memory else 0
    return blocks * size * engine.kv_bytes_per_token / 2**20


def blocks_of(holding: Holding) -> int:
    return sum(getattr(holding, key) for key in HELD.values())


def held_rows(
    engines: Sequence[EngineMemory], by: str, words: Mapping[str, str] = NO_WORDS
) -> list[Row]:
    """What each holder of blocks holds on these engines, the most blocks first. Prefixes have the
    same labels as on the page Prefixes."""
    rows: dict[tuple[str | None, ...], dict[str, Any]] = {}
    for engine in engines:
        for held in engine.held:
            holder = _holder_of(held, by, words)
            row = rows.setdefault(
                tuple(holder.values()),
                {**holder, "Blocks": 0, "Share": None, **dict.fromkeys(HELD, 0), "MiB": 0.0},
            )
            for name, key in HELD.items():
                row[name] += getattr(held.holding, key)
            blocks = blocks_of(held.holding)
            row["Blocks"] += blocks
            row["MiB"] += mib_of(engine, blocks)
    for row in rows.values():  # an engine without a model does not tell what a token takes
        row["MiB"] = row["MiB"] or None
    return sorted(rows.values(), key=lambda row: int(row["Blocks"]), reverse=True)


def _holder_of(held: Held, by: str, words: Mapping[str, str]) -> dict[str, str | None]:
    """The columns that name a holder of blocks. `by` is one of `BY`: how finely holders are told
    apart."""
    holder = {"Workspace": held.workspace}
    if by != "Workspace":
        holder["Key"] = held.key or held.key_id
    if by == "Prefix":
        digest = held.holding.name or held.holding.entry
        label = entry_label(held.look, held.holding.tokens, digest, words) if digest else None
        holder["Prefix"] = label
        holder["Prefix id"] = digest[:16] if digest else None
    return holder


def draw_pools(engines: Sequence[EngineMemory]) -> None:
    """Draw one bar for each engine: what holds its blocks, as shares of its pool."""
    parts.heading("Pools", "pool_in_use")
    pools = {engine.name: pool_of(engine) for engine in engines}
    rows: list[Row] = [
        {
            "engine": name,
            "state": state,
            "order": order,
            "blocks": count,
            "share": count / max(sum(pool.values()), 1),
        }
        for name, pool in pools.items()
        for order, (state, count) in enumerate(pool.items())
        if count
    ]
    colours = charts.drawn_of(charts.BLOCKS[viewer.theme()], (row["state"] for row in rows))
    drawn = (
        alt.Chart(charts.frame(rows))
        .mark_bar(height={"band": 0.7})
        .encode(
            x=charts.share_axis("Share of the pool (%)"),
            y=alt.Y("engine:N", title="Engine", axis=alt.Axis(labelLimit=200)),
            color=charts.colour("state:N", colours, 3, sort=None),
            order=alt.Order("order:Q"),
            tooltip=[
                *charts.tips("engine:N=Engine", "state:N=Blocks are"),
                *charts.tips("blocks:Q=Blocks|,", "share:Q=Share|.1%"),
            ],
        )
        .properties(height=180 + len(pools) * BAR_HEIGHT)
    )
    shares = {
        name: (pool["Active"] + pool["Leased"]) / max(sum(pool.values()), 1)
        for name, pool in pools.items()
    }
    alt_text = ", ".join(
        f"{name} {formats.percent(share)} in use" for name, share in shares.items()
    )
    parts.chart(drawn, "pools", f"Blocks by what holds them: {alt_text}.")


def store_rows(engines: Sequence[EngineMemory]) -> list[Row]:
    """A row for the store on disk of each engine that has one, or should have one."""
    return [
        _store_row(engine.name, engine.stats.store)
        for engine in engines
        if engine.stats is not None and engine.stats.store is not None
    ]


def _store_row(engine: str, store: StoreStats) -> Row:
    state = "on" if store.is_up else "can't be written"
    if store.refused is not None:
        state = _REFUSED.get(store.refused, "off")
    return {
        "Engine": engine,
        "State": state,
        "Why": store.problem,
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


def block_map(memory: Memory, colours: charts.Palette) -> Any:
    """A square for each cell, in the order of the blocks. Its colour is that of what holds most of
    the cell's blocks."""
    size = memory.blocks_per_cell
    step = CELLS_A_ROW * size
    rows = [_cell_row(number, cell, size) for number, cell in enumerate(memory.cells)]
    colours = charts.drawn_of(colours, (str(row["state"]) for row in rows))
    lines = max(len(rows) // CELLS_A_ROW, 1)
    title = f"Cells of {formats.counted(size, 'block')} each, {CELLS_A_ROW} a row"
    labels = f"datum.value % {step * 8} == 0 ? format(datum.value, ',') : ''"
    bare: dict[str, Any] = {"ticks": False, "domain": False}
    scale = alt.Scale(paddingInner=0.12)
    return (
        alt.Chart(charts.frame(rows))
        .mark_rect(strokeWidth=0)
        .encode(
            x=alt.X("x:O", title=title, axis=alt.Axis(labels=False, **bare), scale=scale),
            y=alt.Y(
                "y:O",
                title="First block of the row",
                axis=alt.Axis(labelExpr=labels, labelOverlap=False, **bare),
                scale=scale,
            ),
            color=charts.colour("state:N", colours, 3, sort=None),
            tooltip=charts.tips("blocks:N=Blocks", "what:N=Holds", "shared:Q=Shared"),
        )
        .properties(height=max(lines * CELL_HEIGHT, 60) + 20)
    )


def _cell_row(number: int, cell: BlockCell, size: int) -> Row:
    """The place of a cell in the map, and what holds its `size` blocks. `number` counts cells from
    0."""
    counts = {name: getattr(cell, key) for name, key in CELLS.items()}
    num_blocks = sum(counts.values())
    first = number * size
    state = max(counts, key=lambda name: counts[name])
    # Blocks that are in use and have more than one holder stand out.
    if state in ("Active", "Leased") and cell.shared * 2 > num_blocks:
        state = "Shared"
    return {
        "x": number % CELLS_A_ROW,
        "y": number // CELLS_A_ROW * CELLS_A_ROW * size,
        "state": state,
        "blocks": f"{first:,} to {first + num_blocks - 1:,}",
        "what": ", ".join(f"{count} {name.lower()}" for name, count in counts.items() if count),
        "shared": cell.shared,
    }


def pool_table(engine: EngineMemory, memory: Memory) -> list[Row]:
    """Blocks, tokens and bytes by what holds them, on the device and in the host tier."""
    assert engine.stats is not None
    size = memory.block_size
    width = engine.kv_bytes_per_token
    device = engine.stats.blocks
    # Shared and foreign blocks are among the others.
    subsets = {"of them shared": device.shared, "of them foreign": device.foreign}
    tiers = [("Device", pool_of(engine) | subsets)]
    if memory.host is not None:
        lower = ("Best effort", "Without an entry", "Free")
        tiers.append(("Host", {name: getattr(memory.host, CELLS[name]) for name in lower}))
    totals = {"Device": device.total, "Host": memory.host.total if memory.host else 0}
    return [
        {
            "Tier": tier,
            "Blocks are": name,
            "Blocks": count,
            "Share": count / max(totals[tier], 1),
            "Tokens": count * size,
            "MiB": count * size * width / 2**20 if width else None,
        }
        for tier, counts in tiers
        for name, count in counts.items()
    ]


def draw_endings(name: str, counters: Counters) -> None:
    """Draw how entries ended."""
    counts = {
        "TTL over: the promise was kept": counters.leases_expired,
        "Evicted for room": counters.evicted_entries,
        "Yielded": counters.leases_yielded,
        "Sacrificed": counters.leases_sacrificed,
        "Dropped by an operator": counters.leases_dropped,
        "Released by their workspace": counters.leases_released,
        "Damaged on disk": counters.leases_damaged,
    }
    rows: list[Row] = [
        {"Reason": reason, "Entries": count, "Share": count / sum(counts.values())}
        for reason, count in counts.items()
        if count
    ]
    alt_text = ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
    alt_text = f"Entries by how they ended: {alt_text}."
    none = "No entry has ended since this engine started."
    title = "How entries ended, since this engine started"
    parts.section(title, rows, f"endings_{name}", alt_text, number="endings", none=none)
    st.caption(
        "What earlier processes of this engine did with their leases is in Overview's Leases kept."
    )


def draw_rests(name: str, lifetimes: Lifetimes) -> None:
    """Draw two histograms side by side: the time between two uses of an entry, and the time between
    an entry's last use and its eviction."""
    reuses = lifetimes.reuse_gaps
    evictions = lifetimes.idle_before_eviction
    labels = [formats.rounded(edge) for edge in reuses.edges_seconds]
    labels.append("more")
    rows: list[Row] = [
        {"Time, up to": label, "Used again after": reused, "Evicted after no use for": evicted}
        for label, reused, evicted in zip(labels, reuses.counts, evictions.counts, strict=True)
    ]
    parts.section(
        "How long entries rest",
        rows if sum(reuses.counts) + sum(evictions.counts) else [],
        f"rests_{name}",
        f"{sum(reuses.counts):,} uses by the time since the one before,"
        f" {sum(evictions.counts):,} evictions by idle time.",
        number="entry_lifetimes",
        none="No entry has been used a second time, or evicted, since this engine started.",
    )


if __name__ == "__main__":
    parts.title("Memory", "What holds the engines' blocks, and what was lost for want of room?")
    live.show("memory", read, draw, refresh_seconds=REFRESH_SECONDS)
