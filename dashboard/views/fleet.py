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
"""The columns of what other clients of the engines' servers use. Without such clients they are
left out."""


class View(NamedTuple):
    engines: list[EngineReport]
    history: FleetHistory
    load: list[LoadPoint]


def read(client: AdminClient, selection: Selection) -> View:
    return View(
        client.get("/admin/v1/engines", list[EngineReport]),
        client.get("/admin/v1/engines/history", FleetHistory, selection.params("workspace")),
        client.get(
            "/admin/v1/engines/load", list[LoadPoint], selection.params("workspace", "model")
        ),
    )


def draw(view: View, selection: Selection) -> None:
    draw_cards(view)
    engines = [engine for engine in view.engines if selection.engine in (None, engine.name)]
    parts.heading("Engines now")
    if not view.engines:
        parts.no_engine("No engine is running.", "fleet")
    if engines:
        rows = engine_table(engines)
        ready = sum(row["State"] == "ready" for row in rows)
        empty_columns = [name for name in _OF_OTHERS if not any(row[name] for row in rows)]
        parts.table(rows, "fleet", f"{ready} of {len(engines)} ready.", hidden=empty_columns)
    rows = adapter_table(engines)
    alt_text = f"{formats.counted(len(rows), 'adapter')}, with the engines that have them."
    parts.section("Adapters", rows, "adapters", alt_text)
    rows = technique_table(engines)
    num_refused = sum(row["Allowed"] == "no" for row in rows)
    num_unknown = sum(row["Allowed"] == UNKNOWN for row in rows)
    alt_text = f"{num_refused} of {len(rows) - num_unknown} are too far from exact."
    parts.section("Approximate entries", rows, "techniques", alt_text)
    # Which promises of the engine protocol hold. An engine in front of another server keeps fewer.
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
    no_restart = f"No engine was restarted in {selection.words}."
    no_restart_icon = ":material/check_circle:" if view.history.num_turns else parts.HOURGLASS
    if any(engine.stats is None for engine in engines):
        no_restart = (
            f"No restart is known in {selection.words}. An engine that does not answer now may be"
            " restarting."
        )
        no_restart_icon = parts.HOURGLASS
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
        none=no_restart,
        icon=no_restart_icon,
    )


def draw_cards(view: View) -> None:
    states = [state_of(engine) for engine in view.engines]
    ready = states.count("ready")
    stats = [engine.stats for engine in view.engines if engine.stats is not None]
    restarts = view.history.restarts
    # The first one is of all engines together.
    whole = view.history.attribution[:1]
    lost = sum(restart.lost.written_tokens for restart in restarts)
    in_use = in_use_share([s.blocks for s in stats])
    count = formats.counted(len(view.engines), "engine")
    memory = "their KV memory"
    if len(stats) < len(view.engines):
        memory = "the KV memory of those that answer"
    usage = "" if in_use is None else f" {formats.percent(in_use)} of {memory} is in use."
    verb = "is" if len(view.engines) == 1 else "are"
    parts.hero(f"**{ready} of {count} {verb} ready.**{usage}")
    running = f"{sum(s.running for s in stats):,}" if stats else formats.NO_VALUE
    waiting = f"{sum(s.waiting for s in stats):,} waiting" if stats else None
    with st.grid(4, min_column_width=190):
        help_text = (
            "Engines that answer, have their model loaded and get new turns, as this gateway sees"
            " them."
        )
        draining = states.count("draining")
        note = f"{draining} draining" if draining else None
        count = f"{ready} of {len(view.engines)}"
        parts.card("engines_ready", count, note=help_text, delta=note)
        help_text = "Sequences that are computed now, and those that wait for blocks."
        parts.card("running_now", running, note=help_text, delta=waiting)
        num_restarts = formats.counted(len(restarts), "restart")
        parts.card("restart_lost", formats.compact(lost), delta=f"tokens after {num_restarts}")
        shares = (e.delivered_tokens / e.available_tokens for e in whole if e.available_tokens)
        share = formats.percent(next(shares, None))
        label = "Read of what was held"
        parts.card("attribution", share, label=label, delta="of what some engine held")


def state_of(engine: EngineReport) -> str:
    """The state of an engine in words. A drained engine may also be down: then that comes first."""
    if not engine.is_draining:
        return engine.status
    return "draining" if engine.status == "ready" else f"{engine.status}, draining"


def engine_table(engines: Sequence[EngineReport]) -> list[Row]:
    return [_engine_row(engine) for engine in engines]


def _engine_row(engine: EngineReport) -> Row:
    stats = engine.stats
    description = engine.description
    return {
        "Engine": engine.name,
        "State": state_of(engine),
        "Model": description.model if description else None,
        "Answers to": ", ".join(engine.ids) or None,
        "Backend": server_of(description) if description else None,
        "Attention": (description.attention or None) if description else None,
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
    """Why an engine, or a part of it, gets no turns, in the words of the gateway."""
    error = engine.detail.get("error")
    return [*([str(error)] if error else []), *engine.notes]


def adapter_table(reports: Sequence[EngineReport]) -> list[Row]:
    """A row for each adapter, for all engines together that have the same weights by its name."""
    engines_of: dict[tuple[str, AdapterInfo], list[str]] = {}
    for engine in reports:
        description = engine.description
        if description is not None:
            for adapter in description.adapters:
                engines_of.setdefault((description.model, adapter), []).append(engine.name)
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
        for (model, adapter), engines in sorted(
            engines_of.items(), key=lambda item: item[0][1].name
        )
    ]


UNKNOWN = "not known yet"


def technique_table(engines: Sequence[EngineReport]) -> list[Row]:
    """A row for each engine that still measures. Then a row for each approximation that an engine
    has measured, with its distance from exact."""
    unmeasured_rows: list[Row] = [
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
    measured_rows: list[Row] = [
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
    return [*unmeasured_rows, *measured_rows]


def server_of(description: Description) -> str:
    """What computes: the engine's backend, or the server that the engine is in front of."""
    kind = description.upstream
    return description.backend if kind is None else f"{kind}, as it is"


def promise_table(engines: Sequence[EngineReport]) -> list[Row]:
    """One row for each promise of the engine protocol, with a column for each backend.

    A cell says whether the backend keeps the promise, and how or why not. If the engines of a
    backend differ in that, the cell names them.
    """
    # The engines by promise, backend and what the engines say of the promise.
    sayings: dict[str, dict[str, dict[str, list[str]]]] = {}
    backends: list[str] = []
    for engine in engines:
        if engine.description is None:
            continue
        backend = server_of(engine.description)
        if backend not in backends:
            backends.append(backend)
        for promise in engine.description.guarantees:
            words = f"{'yes' if promise.is_kept else 'no'}: {promise.note}".removesuffix(": ")
            of_backend = sayings.setdefault(promise.name, {}).setdefault(backend, {})
            of_backend.setdefault(words, []).append(engine.name)
    order = {name: number for number, name in enumerate(PROMISES)}
    return [
        {
            "Promise": PROMISES.get(name, name),
            **{backend: _cell_of(sayings[name].get(backend, {})) for backend in backends},
        }
        for name in sorted(sayings, key=lambda name: order.get(name, len(order)))
    ]


def _cell_of(sayings: Mapping[str, Sequence[str]]) -> str | None:
    """What the engines of a backend say of a promise. `sayings` has the engines by their words."""
    if len(sayings) < 2:
        return next(iter(sayings), None)
    return "; ".join(f"{', '.join(engines)}: {words}" for words, engines in sayings.items())


def in_use_share(pools: Sequence[BlockStats]) -> float | None:
    """The share of blocks that a sequence or a lease holds, of all pools together; None without a
    pool."""
    total = sum(blocks.total for blocks in pools)
    return sum(blocks.active + blocks.leased for blocks in pools) / total if total else None


def foreign_share(engines: Sequence[Stats]) -> float:
    """The share of blocks that other clients of the engines' servers use, of all pools together."""
    total = sum(stats.blocks.total for stats in engines)
    return sum(stats.blocks.foreign for stats in engines) / max(total, 1)


def draw_load(points: Sequence[LoadPoint], history: FleetHistory) -> None:
    """Draw memory and queue over time, as this gateway has seen them since its start."""
    most_in_use = max((point.in_use or 0.0 for point in points), default=0.0)
    most_waiting = max((point.waiting + point.queued for point in points), default=0)
    memory = _LoadChart(
        "KV memory in use over time",
        "kv_over_time",
        {"Leased": "leased", "Active": "active"},
        "% of blocks",
        formats.percent(most_in_use),
    )
    queue = _LoadChart(
        "Waiting over time",
        "queue_over_time",
        {"At engines": "waiting", "At this gateway": "queued"},
        "Requests",
        f"{most_waiting:,}",
    )
    starts = (point.start_ms for point in points if point.in_use is not None or point.queued)
    least_ms = LEAST_POINTS * max((point.width_ms for point in points), default=0)
    first = charts.first_shown(starts, history.since_ms, history.until_ms, least_ms)
    x = charts.moment(first, history.until_ms)
    left, right = st.columns(2, gap="large")
    with left:
        _draw_load_chart(memory, points, x, history.until_ms)
    with right:
        _draw_load_chart(queue, points, x, history.until_ms)


class _LoadChart(NamedTuple):
    """One of the charts of load."""

    heading: str
    # The number that the gateway defines, which is also the chart's key.
    number: str
    # The classes that the chart stacks, with the fields of `load_rows`.
    classes: dict[str, str]
    # The title of the vertical axis.
    title: str
    # The largest amount in the range, in words.
    most: str


def _draw_load_chart(
    chart: _LoadChart, points: Sequence[LoadPoint], x: alt.X, until_ms: int
) -> None:
    parts.heading(chart.heading, chart.number)
    rows = load_rows(points, chart.classes, until_ms)
    if not any(row["top"] for row in rows):
        was_seen = any(point.in_use is not None for point in points)
        unknown = "No engine was seen in this range. A gateway knows this only while it runs."
        parts.empty("Nothing in this range." if was_seen else unknown)
        return
    colours = {name: charts.LOAD[viewer.theme()][name] for name in chart.classes}
    height = charts.CHART_HEIGHT
    drawn = charts.bars_over_time(rows, colours, title=chart.title, x=x, height=height)
    parts.chart(drawn, chart.number, f"{chart.heading}: at most {chart.most}.")


LEAST_POINTS = 10
"""The fewest intervals that the charts of load span."""


def load_rows(points: Sequence[LoadPoint], classes: dict[str, str], until_ms: int) -> list[Row]:
    """One row for each interval and class, stacked. Shares are in percent. An interval that goes on
    beyond the range ends with it, at `until_ms`."""
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
    """Draw at which stage hits were lost, for all engines together and for each engine."""
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
