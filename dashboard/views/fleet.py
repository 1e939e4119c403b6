"""Fleet: are the engines well, what did restarts cost, and where are hits lost?"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import altair as alt
import streamlit as st

from dashboard.client import AdminClient
from dashboard.ui import charts, formats, live, parts, viewer
from dashboard.ui.charts import Row
from dashboard.ui.filters import Selection
from engine.protocol.reports import AdapterInfo, BlockStats, Description, Stats
from gateway.structs.fleet import EngineReport, FleetHistory, LoadPoint

PROMISES = {
    "exact_read": "A read is what memory reused",
    "exact_write": "A write is what was computed",
    "hold": "A lease holds until it expires",
    "isolation": "Workspaces are kept apart",
    "events": "Evictions are told",
    "forced_tools": "A forced tool call is valid",
}


_OF_OTHERS = ("Foreign", "Foreign running")
"""Columns of what other clients of the engines' servers use: left out where there are none."""


class View(NamedTuple):
    engines: list[EngineReport]
    history: FleetHistory
    load: list[LoadPoint]


def read(client: AdminClient, chosen: Selection) -> View:
    return View(
        client.get("/admin/v1/engines", list[EngineReport]),
        client.get("/admin/v1/engines/history", FleetHistory, chosen.params("workspace")),
        client.get("/admin/v1/engines/load", list[LoadPoint], chosen.params("workspace", "model")),
    )


def draw(view: View, chosen: Selection) -> None:
    draw_cards(view)
    engines = [engine for engine in view.engines if chosen.engine in (None, engine.name)]
    parts.heading("Engines now")
    if not view.engines:
        parts.no_engine("No engine is running.", "fleet")
    if engines:
        rows = engine_table(engines)
        ready = sum(row["State"] == "ready" for row in rows)
        alone = [name for name in _OF_OTHERS if not any(row[name] for row in rows)]
        parts.table(rows, "fleet", f"{ready} of {len(engines)} ready.", hidden=alone)
    rows = adapter_table(engines)
    alt_text = f"{formats.counted(len(rows), 'adapter')}, with the engines that have them."
    parts.section("Adapters", rows, "adapters", alt_text)
    rows = technique_table(engines)
    refused = sum(row["Allowed"] == "no" for row in rows)
    num_unknown = sum(row["Allowed"] == UNKNOWN for row in rows)
    alt_text = f"{refused} of {len(rows) - num_unknown} are too far from exact."
    parts.section("Approximate entries", rows, "techniques", alt_text)
    # What of the engine protocol holds: an engine in front of another server keeps less.
    rows = promise_table(engines)
    parts.section(
        "What engines promise",
        rows,
        "promises",
        f"{formats.counted(len(rows), 'promise')}, with what each backend keeps of it.",
        none="No engine that is up has told yet what it promises.",
        icon=":material/handshake:",
        wide=list(rows[0])[1:] if rows else (),
    )
    draw_load(view.load, view.history)
    draw_attribution(view.history)
    parts.section(
        "Restarts, and the cache they lost",
        [
            {
                "Back at (UTC)": formats.moment(restart.first_ms),
                "Engine": restart.engine,
                "Gap between turns": formats.duration((restart.first_ms - restart.last_ms) / 1000),
                "Turns that read less for it": restart.lost.requests,
                "Tokens written again": restart.lost.written_tokens,
                "Epoch": restart.epoch[:8],
            }
            for restart in view.history.restarts
        ],
        "restarts",
        f"{formats.counted(len(view.history.restarts), 'restart')} with the tokens written again.",
        number="restart_lost",
        none=f"No engine was restarted in {chosen.words}.",
        icon=":material/check_circle:" if view.history.num_turns else parts.HOURGLASS,
    )


def draw_cards(view: View) -> None:
    states = [state_of(engine) for engine in view.engines]
    ready = states.count("ready")
    stats = [engine.stats for engine in view.engines if engine.stats is not None]
    restarts = view.history.restarts
    everything = view.history.attribution[:1]
    lost = sum(restart.lost.written_tokens for restart in restarts)
    in_use = in_use_share([s.blocks for s in stats])
    count = formats.counted(len(view.engines), "engine")
    whose = "their KV memory"
    if len(stats) < len(view.engines):
        whose = "the KV memory of those that answer"
    held = "" if in_use is None else f" {formats.percent(in_use)} of {whose} is in use."
    are = "is" if len(view.engines) == 1 else "are"
    parts.hero(f"**{ready} of {count} {are} ready.**{held}")
    running = f"{sum(s.running for s in stats):,}" if stats else formats.NO_VALUE
    waiting = f"{sum(s.waiting for s in stats):,} waiting" if stats else None
    with st.grid(4, min_column_width=190):
        help_text = (
            "Engines that answer, have their model loaded and get new turns, as this gateway"
        )
        help_text += " sees them."
        draining = states.count("draining")
        note = f"{draining} draining" if draining else None
        count = f"{ready} of {len(view.engines)}"
        parts.card("engines_ready", count, note=help_text, delta=note)
        help_text = "Sequences that are computed now, and those that wait for blocks."
        parts.card("running_now", running, note=help_text, delta=waiting)
        after = formats.counted(len(restarts), "restart")
        parts.card("restart_lost", formats.compact(lost), delta=f"tokens after {after}")
        shares = (e.delivered_tokens / e.available_tokens for e in everything if e.available_tokens)
        share = formats.percent(next(shares, None))
        label = "Read of what was held"
        parts.card("attribution", share, label=label, delta="of what some engine held")


def state_of(engine: EngineReport) -> str:
    """How an engine fares, the worst first: one that is drained may be down as well."""
    if not engine.is_draining:
        return engine.status
    return "draining" if engine.status == "ready" else f"{engine.status}, draining"


def engine_table(engines: Sequence[EngineReport]) -> list[Row]:
    return [_engine_row(engine) for engine in engines]


def _engine_row(engine: EngineReport) -> Row:
    stats = engine.stats
    described = engine.description
    return {
        "Engine": engine.name,
        "State": state_of(engine),
        "Model": described.model if described else None,
        "Answers to": ", ".join(engine.ids) or None,
        "Backend": server_of(described) if described else None,
        "Attention": (described.attention or None) if described else None,
        "Up": formats.duration(stats.uptime_seconds) if stats else None,
        "Epoch": stats.epoch[:8] if stats else None,
        "Running": stats.running if stats else None,
        "Waiting": stats.waiting if stats else None,
        "Pool in use": in_use_share([stats.blocks]) if stats else None,
        "Foreign": foreign_share([stats]) if stats else None,
        "Foreign running": stats.foreign_running if stats else None,
        "Leases": stats.num_leases if stats else None,
        "Preempted": stats.counters.preempted_requests if stats else None,
        "Breaker": f"{engine.breaker}, opened {engine.times_opened}×",
        "Names known": engine.routing.names,
        "Why": "; ".join(why_of(engine)) or None,
        "URL": engine.url,
    }


def why_of(engine: EngineReport) -> list[str]:
    """What keeps an engine, or a part of it, from turns, as its gateway says it."""
    error = engine.detail.get("error")
    return [*([str(error)] if error else []), *engine.notes]


def adapter_table(reports: Sequence[EngineReport]) -> list[Row]:
    """Each adapter once for all engines that have the same weights under its name."""
    having: dict[tuple[str, AdapterInfo], list[str]] = {}
    for engine in reports:
        description = engine.description
        if description is not None:
            for adapter in description.adapters:
                having.setdefault((description.model, adapter), []).append(engine.name)
    return [
        {
            "Model": f"{model}:{adapter.name}",
            "State": "leaving" if adapter.is_leaving else "loaded",
            "Acts from": "the start" if adapter.invocation is None else repr(adapter.invocation),
            "Rank": adapter.rank,
            "MiB": adapter.num_bytes / 2**20,
            "Weights": adapter.digest[:12],
            "Engines": ", ".join(engines),
        }
        for (model, adapter), engines in sorted(having.items(), key=lambda item: item[0][1].name)
    ]


UNKNOWN = "not known yet"


def technique_table(engines: Sequence[EngineReport]) -> list[Row]:
    """How far from exact each engine measured each approximation, and which measure still."""
    measuring = [
        {
            "Engine": engine.name,
            "Technique": "being measured",
            "KL (nats)": None,
            "Same next token": formats.percent(None),
            "Allowed": UNKNOWN,
        }
        for engine in engines
        if engine.description is not None and engine.description.is_measuring
    ]
    measured = [
        {
            "Engine": engine.name,
            "Technique": technique.name,
            "KL (nats)": round(technique.kl, 3),
            "Same next token": formats.percent(technique.agreement),
            "Allowed": "yes" if technique.is_allowed else "no",
        }
        for engine in engines
        if engine.description is not None
        for technique in engine.description.techniques
    ]
    return [*measuring, *measured]


def server_of(described: Description) -> str:
    """What computes: the engine's backend, or the server that it is in front of."""
    kind = described.upstream
    return described.backend if kind is None else f"{kind}, as it is"


def promise_table(engines: Sequence[EngineReport]) -> list[Row]:
    """One row for each promise of the engine protocol, with a column for each backend: whether it
    is kept there, and how or why not. Engines of one backend that say different things are
    named."""
    sayings: dict[str, dict[str, dict[str, list[str]]]] = {}
    backends: list[str] = []
    for engine in engines:
        if engine.description is None:
            continue
        backend = server_of(engine.description)
        if backend not in backends:
            backends.append(backend)
        for promise in engine.description.guarantees:
            said = f"{'yes' if promise.is_kept else 'no'}: {promise.note}".removesuffix(": ")
            of_backend = sayings.setdefault(promise.name, {}).setdefault(backend, {})
            of_backend.setdefault(said, []).append(engine.name)
    order = {name: number for number, name in enumerate(PROMISES)}
    return [
        {
            "Promise": PROMISES.get(name, name),
            **{backend: _said_by(sayings[name].get(backend, {})) for backend in backends},
        }
        for name in sorted(sayings, key=lambda name: order.get(name, len(order)))
    ]


def _said_by(sayings: Mapping[str, Sequence[str]]) -> str | None:
    if len(sayings) < 2:
        return next(iter(sayings), None)
    return "; ".join(f"{', '.join(engines)}: {said}" for said, engines in sayings.items())


def in_use_share(pools: Sequence[BlockStats]) -> float | None:
    """Blocks that a sequence or a lease holds, of all pools together; None without a pool."""
    total = sum(blocks.total for blocks in pools)
    return sum(blocks.active + blocks.leased for blocks in pools) / total if total else None


def foreign_share(engines: Sequence[Stats]) -> float:
    """What other clients of the engines' servers use of all pools together."""
    total = sum(stats.blocks.total for stats in engines)
    return sum(stats.blocks.foreign for stats in engines) / max(total, 1)


def draw_load(points: Sequence[LoadPoint], history: FleetHistory) -> None:
    """Memory and queue over time, as this gateway has seen them since its start."""
    shares = {"Leased": "leased", "Active": "active"}
    waits = {"At engines": "waiting", "At this gateway": "queued"}
    most = max((point.in_use or 0.0 for point in points), default=0.0)
    longest = max((point.waiting + point.queued for point in points), default=0)
    starts = (point.start_ms for point in points if point.in_use is not None or point.queued)
    least_ms = LEAST_POINTS * max((point.width_ms for point in points), default=0)
    first = charts.first_shown(starts, history.since_ms, history.until_ms, least_ms)
    x = charts.moment(first, history.until_ms)
    left, right = st.columns(2, gap="large")
    for place, heading, key, classes, title, alt_text in (
        (left, "KV memory in use", "kv_over_time", shares, "% of blocks", formats.percent(most)),
        (right, "Waiting", "queue_over_time", waits, "Requests", f"{longest:,}"),
    ):
        with place:
            parts.heading(f"{heading} over time", key)
            rows = load_rows(points, classes, history.until_ms)
            if not any(row["top"] for row in rows):
                was_seen = any(point.in_use is not None for point in points)
                unknown = "No engine was seen in this range: a gateway keeps this while it runs."
                parts.empty("Nothing in this range." if was_seen else unknown)
                continue
            colours = {name: charts.LOAD[viewer.theme()][name] for name in classes}
            height = charts.CHART_HEIGHT
            drawn = charts.bars_over_time(rows, colours, title=title, x=x, height=height)
            parts.chart(drawn, key, f"{heading} over time: at most {alt_text}.")


LEAST_POINTS = 10
"""So many intervals the charts of load span at least."""


def load_rows(points: Sequence[LoadPoint], classes: dict[str, str], until_ms: int) -> list[Row]:
    """One row for each interval and class, stacked. Shares are in percent. The interval that goes
    on ends with the range, at `until_ms`."""
    rows: list[Row] = []
    for point in points:
        start = formats.moment(point.start_ms)
        end = formats.moment(min(point.start_ms + point.width_ms, max(until_ms, point.start_ms)))
        leased = point.leased or 0.0
        in_use = point.in_use or 0.0
        amounts = {
            "leased": round(100 * leased, 1),
            "active": round(100 * (in_use - leased), 1),
            "waiting": point.waiting,
            "queued": point.queued,
        }
        shares = {name: amounts[field] for name, field in classes.items()}
        rows += charts.stacked({"start": start, "end": end, "part": ""}, shares)
    return rows


def draw_attribution(history: FleetHistory) -> None:
    """Shares of the prompts of all turns, or of a fixed sample, of all engines and of each."""
    parts.heading("Where hits are lost", "attribution")
    attributions = history.attribution
    if not attributions:
        parts.empty("No request in this range was routed by what engines hold.", key="attribution")
        return
    rows: list[Row] = []
    for attribution in attributions:
        tokens_by_stage = {
            "Available": attribution.available_tokens,
            "Captured": attribution.captured_tokens,
            "Delivered": attribution.delivered_tokens,
        }
        rows += [
            {
                "engine": attribution.engine or "all engines",
                "stage": stage,
                "share": tokens / max(attribution.prompt_tokens, 1),
                "tokens": tokens,
                "turns": attribution.turns,
            }
            for stage, tokens in tokens_by_stage.items()
            if tokens
        ]
    if not rows:
        parts.empty("No engine held the beginning of a prompt that came in this range.")
        return
    total = attributions[0]
    prompt = max(attributions[0].prompt_tokens, 1)
    routed = f"{formats.counted(total.turns, 'request')} routed by what engines hold"
    st.caption(formats.sampled(routed, history.num_turns, is_whole=history.is_whole))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    colours = charts.STAGES[viewer.theme()]
    axis = alt.Axis(labelLimit=200)
    drawn = (
        alt.Chart(charts.frame(rows))
        .mark_bar(cornerRadius=2)
        .encode(
            x=charts.share_axis("Share of prompt tokens (%)"),
            y=alt.Y("engine:N", title="Engine", sort=engines, axis=axis),
            yOffset=alt.YOffset("stage:N", sort=list(colours)),
            color=charts.colour("stage:N", colours, sort=list(colours)),
            tooltip=[
                *charts.tips("engine:N=Engine", "stage:N=Stage", "share:Q=Share|.1%"),
                *charts.tips("tokens:Q=Tokens|,", "turns:Q=Requests|,"),
            ],
        )
        .properties(height=80 + 52 * len(engines))
    )
    parts.chart(
        drawn,
        "attribution",
        f"Of the prompt tokens of {formats.counted(total.turns, 'request')}"
        f" {formats.percent(total.available_tokens / prompt)} were available,"
        f" {formats.percent(total.captured_tokens / prompt)} captured,"
        f" {formats.percent(total.delivered_tokens / prompt)} delivered.",
    )


if __name__ == "__main__":
    parts.title("Fleet", "Are the engines well, what did restarts cost, where are hits lost?")
    live.show("fleet", read, draw)
