"""The figures of what engines hold now: Memory, Prefixes and Fleet."""

from collections import Counter
from typing import Any

from streamlit.testing.v1 import AppTest

from dashboard.ui import formats
from engine.protocol import TTLS
from tests.dashboard.figures_facts import (
    SAVED,
    SHARE,
    WRITTEN,
    Facts,
    add_engine_rows,
    living,
    percent,
    read_per_write,
    saved_by,
)
from tests.dashboard.figures_load import (
    BLOCK,
    KILLED,
    MODELS,
    NATIVE,
    NUM_KILLS,
)
from tests.dashboard.figures_table import Table
from tests.dashboard.signed_in import said, table
from tests.dashboard.test_figures import card


def add_memory(table_: Table, facts: Facts, app: AppTest) -> None:
    """The engines' own counts; what is leased is what clients wrote in this life."""
    pools = [engine["blocks"] for engine in facts.engines]
    total = sum(pool["total"] for pool in pools)
    shares = {
        "Pool in use": ("active", "leased"),
        "Leased": ("leased",),
        "Best effort": ("best_effort",),
        "Without an entry": ("cached",),
        "Free": ("free",),
    }
    for name, states in shares.items():
        part = sum(pool[state] for pool in pools for state in states)
        table_.add("memory", name, card(app, name)[0], outside=percent(part, total))
    counters = [engine["counters"] for engine in facts.engines]
    for name, counter in (
        ("Copies on write", "copied_blocks"),
        ("Evicted blocks", "evicted_blocks"),
    ):
        outside = formats.compact(sum(count[counter] for count in counters))
        table_.add("memory", name, card(app, name)[0], outside=outside)
    _add_holders(table_, facts, app)
    memories = [facts.load.fleet.told("memory", dict[str, Any], n) for n in range(len(MODELS))]
    room = sum(memory["referenced_blocks"] * memory["block_size"] for memory in memories)
    unused = sum(memory["unused_tokens"] for memory in memories)
    table_.add("memory", "Unused room", card(app, "Unused room")[0], outside=percent(unused, room))
    none = formats.NO_VALUE
    table_.add("memory", "Host tier", card(app, "Host tier")[0], outside=none)
    _add_first_engine(table_, facts, app)


def _add_holders(table_: Table, facts: Facts, app: AppTest) -> None:
    """Who fills the memory."""
    pools = [engine["blocks"] for engine in facts.engines]
    total = sum(pool["total"] for pool in pools)
    holders = table(app, "Share")
    table_.add(
        "memory",
        "Who fills it: Share, of all",
        float(holders["Share"].sum()),
        outside=1.0,
        apart=SHARE * len(holders),
        of="Share",
    )
    blocks = float(holders["Blocks"].sum())
    table_.add("memory", "Who fills it: Blocks, of all", blocks, outside=total, of="Blocks")
    by_workspace = holders.set_index("Workspace")
    for workspace in facts.load.keys:
        leased_by_workspace = {
            (turn.engine, turn.prefix): -(-(turn.written) // BLOCK)
            for turn in living(facts)
            if turn.written and turn.workspace == workspace
        }
        leased = by_workspace.loc[workspace, "Leased"]
        table_.add(
            "memory",
            f"{workspace}: Leased",
            float(leased),
            outside=sum(leased_by_workspace.values()),
            of="Leased",
        )
    for column, state in (
        ("Active", "active"),
        ("Leased", "leased"),
        ("Best effort", "best_effort"),
        ("Without an entry", "cached"),
    ):
        value = float(holders[column].sum())
        expected = sum(pool[state] for pool in pools)
        table_.add("memory", f"Who fills it: {column}, of all", value, outside=expected, of=column)
    column = "Leased in the store"
    table_.add(
        "memory", f"Who fills it: {column}", float(holders[column].sum()), outside=0, of=column
    )


def _add_first_engine(table_: Table, facts: Facts, app: AppTest) -> None:
    """The engine that is shown in full, which no one killed."""
    pool_rows = table(app, "Tier")
    whole = pool_rows[~pool_rows["Blocks are"].str.startswith("of them")]
    total = facts.engines[NATIVE]["blocks"]["total"]
    description = facts.load.fleet.gateway.engine(NATIVE)["description"]
    size = description["kv_bytes_per_token"] / 2**20
    for column, expected in (
        ("Blocks", total),
        ("Tokens", total * BLOCK),
        ("MiB", total * BLOCK * size),
        ("Share", 1.0),
    ):
        value = float(whole[column].sum())
        table_.add(
            "memory",
            f"engine-0, its pool: {column}",
            value,
            outside=expected,
            apart=SHARE * len(whole) if column == "Share" else 0.0,
            of=column,
        )
    ended = [frame.value for frame in app.dataframe if "Entries" in frame.value.columns]
    counters = facts.engines[NATIVE]["counters"]
    expected = counters["leases_expired"] + counters["evicted_entries"]
    value = int(sum(frame["Entries"].sum() for frame in ended))
    table_.add("memory", "engine-0: Entries that ended", value, outside=expected, of="Entries")
    rests = table(app, "Time, up to")
    reads = sum(turn.read > 0 for turn in facts.of(engine=NATIVE))
    column = "Used again after"
    value = int(rests[column].sum())
    table_.add("memory", f"engine-0: {column}", value, outside=reads, of=column)
    column = "Evicted after no use for"
    expected = facts.engines[NATIVE]["counters"]["evicted_entries"]
    value = int(rests[column].sum())
    table_.add("memory", f"engine-0: {column}", value, outside=expected, of=column)


def add_prefixes(table_: Table, facts: Facts, app: AppTest) -> None:
    entries = facts.entries
    leased = [entry for entry in entries if entry["state"] == "leased"]
    alive = living(facts)
    granted = sum(turn.written > 0 for turn in alive)
    value = card(app, "Leases")[0]
    table_.add("prefixes", "Leases", value, sql=str(len(leased)), outside=str(granted))
    tokens = sum(entry["tokens"] for entry in leased)
    written_tokens = sum(turn.written for turn in alive)
    value = card(app, "Tokens held")[0]
    table_.add(
        "prefixes",
        "Tokens held",
        value,
        sql=formats.compact(tokens),
        outside=formats.compact(written_tokens),
    )
    sentence = said(app, "markdown").partition("**")[2].partition("**")[0]
    texts = len({(turn.workspace, turn.prefix) for turn in alive if turn.written})
    prefixes = formats.counted(texts, "prefix is", "prefixes are")
    table_.add("prefixes", "promised, in the sentence", sentence, outside=f"{prefixes} promised")
    entries_table = table(app, "Ends in")
    by_entry = {(entry["entry"], entry["tokens"]): entry for entry in entries}
    for column, name in (("Tokens", "tokens"), ("Blocks", "blocks"), ("Reads", "reads")):
        value = float(entries_table[column].sum())
        outside = sum(entry[name] for entry in by_entry.values())
        table_.add("prefixes", f"entries: {column}", value, outside=outside, of=column)
    reads = sum(turn.read > 0 for turn in alive)
    value = float(entries_table["Reads"].sum())
    table_.add("prefixes", "entries: Reads, by clients", value, outside=reads, of="Reads")
    _add_savings(table_, facts, app)
    soonest = min(entry["expires_in_seconds"] for entry in leased)
    minutes, seconds = card(app, "Ends next")[0].split(":")
    # In whole seconds, and asked for at another moment.
    table_.add(
        "prefixes", "Ends next", 60 * int(minutes) + int(seconds), outside=soonest, apart=60.0
    )
    column = "TTL left"
    ttl_shares = sum(entry["expires_in_seconds"] / TTLS[entry["ttl"]].seconds for entry in entries)
    table_.add(
        "prefixes",
        f"entries: {column}",
        float(entries_table[column].sum()),
        outside=ttl_shares,
        apart=len(entries) * 0.2,
        of=column,
    )
    column = "Shared by"
    value = float(entries_table[column].sum())
    expected = sum(entry["shared_by"] for entry in entries)
    table_.add("prefixes", f"entries: {column}", value, outside=expected, of=column)


def _add_savings(table_: Table, facts: Facts, app: AppTest) -> None:
    """What the held entries saved."""
    entries = facts.entries
    alive = living(facts)
    entries_table = table(app, "Ends in")
    now = {(turn.workspace, turn.prefix) for turn in alive if turn.written}
    held_ones = [turn for turn in facts.turns if (turn.workspace, turn.prefix) in now]
    names = ", ".join(f"'{entry['name']}'" for entry in entries)
    sql = formats.dollars(facts.value(SAVED, f"prefix IN ({names})"))
    outside = formats.dollars(saved_by(held_ones))
    label = "Net of what is held"
    table_.add("prefixes", label, card(app, label)[0], sql=sql, outside=outside)
    of_prefix = {
        name: nano / 1e9 for name, nano in facts.rows(f"prefix, {SAVED}", rest="GROUP BY prefix")
    }
    column = "Net saved ($)"
    value = float(entries_table[column].sum())
    expected = sum(of_prefix.get(entry["name"], 0.0) for entry in entries)
    table_.add("prefixes", f"entries: {column}, of each", value, sql=expected, of=column)
    column = "Tokens read per token written"
    counts = Counter((turn.workspace, turn.prefix) for turn in alive if turn.written)
    amounts = {
        key: read_per_write([turn for turn in held_ones if (turn.workspace, turn.prefix) == key])
        for key in counts
    }
    outside_sum = sum(amounts[key] * count for key, count in counts.items())
    table_.add(
        "prefixes",
        f"entries: {column}",
        float(entries_table[column].sum()),
        outside=outside_sum,
        apart=0.005 * len(entries_table),
        of=column,
    )


def add_fleet(table_: Table, facts: Facts, app: AppTest) -> None:
    value = card(app, "Engines ready")[0]
    table_.add("fleet", "Engines ready", value, outside=f"{len(MODELS)} of {len(MODELS)}")
    stats = facts.engines
    label = "Running now"
    value, below = card(app, label)
    table_.add("fleet", label, value, outside=f"{sum(s['running'] for s in stats)}")
    waiting = f"{sum(s['waiting'] for s in stats)} waiting"
    table_.add("fleet", f"{label}, below", below, outside=waiting)
    add_engine_rows(table_, "fleet", facts, app)
    missed = "miss_reason = 'engine_restart'"
    again = facts.value(f"COALESCE(SUM({WRITTEN}), 0)", missed)
    num_writes = Counter[tuple[str, str]]()
    outside = 0
    turns = 0
    for life in range(NUM_KILLS + 1):
        of_life = facts.of(engine=KILLED, life=life)
        writing_turns = [turn for turn in of_life if turn.written]
        lost = [turn for turn in writing_turns if num_writes[turn.workspace, turn.prefix]]
        outside += sum(turn.written for turn in lost)
        turns += len(lost)
        num_writes.update((turn.workspace, turn.prefix) for turn in writing_turns)
    label = "Written again"
    value, below = card(app, label)
    table_.add("fleet", label, value, sql=formats.compact(again), outside=formats.compact(outside))
    table_.add("fleet", f"{label}, below", below, outside=f"tokens after {NUM_KILLS} restarts")
    restarts = table(app, "Turns that read less for it")
    for column, sql, counted in (
        ("Turns that read less for it", facts.value("COUNT(*)", missed), turns),
        ("Tokens written again", again, outside),
    ):
        value = float(restarts[column].sum())
        table_.add("fleet", f"restarts: {column}", value, sql=sql, outside=counted, of=column)
    where_known = "available_tokens IS NOT NULL"
    captured = "MAX(COALESCE(captured_tokens, 0), cache_read_tokens + automatic_tokens)"
    label = "Read of what was held"
    sql = percent(
        facts.value("SUM(cache_read_tokens + automatic_tokens)", where_known),
        facts.value(f"SUM(MAX(available_tokens, {captured}))", where_known),
    )
    table_.add("fleet", label, card(app, label)[0], sql=sql)
    engines = {engine["name"]: engine for engine in facts.load.fleet.gateway.get("engines")}
    shown_engines = table(app, "Names known").set_index("Engine")
    for number in range(len(MODELS)):
        value = float(shown_engines.loc[f"engine-{number}", "Names known"])
        expected = len(facts.load.fleet.held_names(number))
        name = f"engine-{number}: Names known"
        table_.add("fleet", name, value, outside=expected, of="Names known")
    assert set(engines) == set(shown_engines.index)
