"""Memory: what holds the engines' blocks, and what was lost for want of room?"""

import streamlit as st

from dashboard.admin.client import AdminClient
from dashboard.admin.shapes.engines import Stats
from dashboard.admin.shapes.memory import EngineMemory, Lifetimes
from dashboard.charts.blocks import block_map, ending_chart, pool_chart, rest_chart
from dashboard.rows.engines import foreign_share, in_use_share
from dashboard.rows.memory import (
    cell_rows,
    ending_rows,
    pool_rows,
    pool_table,
    rest_rows,
    store_rows,
)
from dashboard.ui import formats, live, parts, viewer
from dashboard.ui.colours import BLOCKS, HITS, MONEY
from dashboard.ui.selection import Selection

REFRESH_SECONDS = 5


def read(client: AdminClient, chosen: Selection) -> list[EngineMemory]:
    params = {"engine": chosen.engine}
    return client.get("/admin/v1/engines/memory", list[EngineMemory], params)


def draw(engines: list[EngineMemory], chosen: Selection) -> None:
    answering = [engine for engine in engines if engine.stats is not None]
    if not answering:
        parts.hero("**No engine answers**, so there is no KV memory to show.")
        parts.no_engine(
            "No engine is running. Memory is shown live; nothing of it is in the ledger.", "memory"
        )
        return
    draw_cards(answering)
    palette = BLOCKS[viewer.theme()]
    shares = {engine.name: _in_use(engine) for engine in answering}
    told = ", ".join(f"{name} {formats.percent(share)} in use" for name, share in shares.items())
    if len(answering) > 1:
        parts.heading("Pools", "pool_in_use")
        drawn = pool_chart(pool_rows(answering), palette)
        parts.chart(drawn, "pools", f"Blocks by what holds them: {told}.")
    draw_stores(answering)
    draw_engine(_chosen(answering))


def draw_stores(engines: list[EngineMemory]) -> None:
    """Nothing where no engine has a store on disk."""
    rows = store_rows(engines)
    if rows:
        parts.heading("Store on disk", "store_bytes")
        told = ", ".join(f"{row['Engine']} {row['State']}" for row in rows)
        parts.table(rows, "stores", alt_text=f"Stores on disk: {told}.")


def _chosen(engines: list[EngineMemory]) -> EngineMemory:
    """The engine that is shown in full: one at a time, so that the page stays short."""
    if len(engines) == 1:
        return engines[0]
    names = [engine.name for engine in engines]
    name = st.selectbox("Engine in full", names, key="memory_engine", width=260)
    return next((engine for engine in engines if engine.name == name), engines[0])


def _in_use(engine: EngineMemory) -> float | None:
    assert engine.stats is not None
    return in_use_share([engine.stats.blocks])


def draw_cards(engines: list[EngineMemory]) -> None:
    found = [engine.stats for engine in engines if engine.stats is not None]
    total = max(sum(stats.blocks.total for stats in found), 1)
    leased = sum(stats.blocks.leased for stats in found)
    in_use = in_use_share([stats.blocks for stats in found])
    parts.hero(
        f"**{formats.percent(in_use)}** of the KV memory is in use,"
        f" **{formats.percent(leased / total)}** is promised to leases."
    )
    host, host_used = (
        sum(stats.host_blocks for stats in found),
        sum(stats.host_blocks_used for stats in found),
    )
    with st.grid(3, min_column_width=190, row_height=132):
        foreign = foreign_share(found)
        parts.card(
            "pool_in_use",
            formats.percent(in_use),
            delta=f"{formats.percent(foreign)} by other clients" if foreign else None,
        )
        parts.card("pool_leased", formats.percent(leased / total))
        parts.card("unused_tokens", formats.percent(_unused(engines)))
        copied = sum(stats.counters.copied_blocks for stats in found)
        parts.card("copied_blocks", formats.compact(copied))
        evicted = sum(stats.counters.evicted_blocks for stats in found)
        demoted = sum(stats.counters.demoted_blocks for stats in found)
        parts.card(
            "evicted_blocks",
            formats.compact(evicted),
            delta=f"{formats.compact(demoted)} copied to the host" if host else None,
        )
        parts.card(
            "host_blocks",
            formats.compact(host_used) if host else formats.NO_VALUE,
            delta=f"of {formats.compact(host)}" if host else "none configured",
        )


def _unused(engines: list[EngineMemory]) -> float | None:
    mapped = [e.memory for e in engines if e.memory and e.memory.unused_tokens is not None]
    room = sum((memory.referenced_blocks or 0) * memory.block_size for memory in mapped)
    return sum(memory.unused_tokens or 0 for memory in mapped) / room if room else None


def draw_engine(engine: EngineMemory) -> None:
    st.subheader("Block map", anchor=False)
    st.text(f"{engine.name} · {engine.backend} · {engine.model}")
    stats, memory = engine.stats, engine.memory
    assert stats is not None
    if memory is None:
        parts.empty("This engine does not tell what is in its memory.")
        return
    if memory.cells:
        drawn = block_map(cell_rows(memory), BLOCKS[viewer.theme()], memory.blocks_per_cell)
        blocks = stats.blocks
        parts.chart(
            drawn,
            f"map_{engine.name}",
            f"Map of {blocks.total:,} blocks: {blocks.active:,} active, {blocks.leased:,} leased,"
            f" {blocks.best_effort:,} best effort, {blocks.cached:,} cached, {blocks.free:,} free;"
            f" {blocks.shared:,} have more than one holder.",
        )
    else:
        parts.empty(
            "No map: this engine's blocks are another program's, which does not say where they"
            " are. The counts below are its own.",
            ":material/map:",
        )
    left, right = st.columns(2, gap="large")
    with left:
        draw_endings(engine.name, stats)
    with right:
        draw_rests(engine.name, memory.lifetimes)
    parts.table(
        pool_table(engine),
        f"pool_{engine.name}",
        alt_text=f"Blocks of {engine.name} by what holds them.",
        columns={"Share": parts.share_column()},
    )


def draw_endings(name: str, stats: Stats) -> None:
    parts.heading("How entries ended", "endings")
    found = ending_rows(stats.counters)
    if not any(row["entries"] for row in found):
        parts.empty("No entry has ended since this engine started.")
        return
    told = ", ".join(f"{row['reason']} {row['entries']:,}" for row in found)
    drawn = ending_chart(found, MONEY[viewer.theme()])
    parts.chart(drawn, f"endings_{name}", f"Entries by how they ended: {told}.")


def draw_rests(name: str, lifetimes: Lifetimes) -> None:
    parts.heading("How long entries rest", "entry_lifetimes")
    gaps = sum(lifetimes.reuse_gaps.counts)
    evicted = sum(lifetimes.idle_before_eviction.counts)
    if not gaps + evicted:
        parts.empty("No entry has been used a second time, or evicted, since this engine started.")
        return
    drawn = rest_chart(rest_rows(lifetimes), HITS[viewer.theme()])
    parts.chart(
        drawn,
        f"rests_{name}",
        f"{gaps:,} uses by the time since the one before, {evicted:,} evictions by idle time.",
    )


def page() -> None:
    parts.title("Memory", "What holds the engines' blocks, and what was lost for want of room?")
    session = viewer.session()
    if session is not None and session.workspace is not None:
        parts.empty(
            "Memory is shared by all workspaces: this page needs an admin key.", ":material/key:"
        )
        return
    live.show("memory", read, draw, refresh_seconds=REFRESH_SECONDS)


page()
