"""Fleet: are the engines well, what did restarts cost, and where are hits lost?"""

from dataclasses import dataclass

import streamlit as st

from dashboard.admin.client import AdminClient
from dashboard.admin.shapes.engines import Attribution, EngineReport, FleetHistory, Restart
from dashboard.charts.engines import attribution_chart
from dashboard.rows.engines import (
    attribution_rows,
    engine_table,
    in_use_share,
    promise_table,
    restart_table,
)
from dashboard.ui import formats, live, parts, viewer
from dashboard.ui.colours import STAGES
from dashboard.ui.selection import Selection


@dataclass(frozen=True, slots=True)
class View:
    engines: list[EngineReport]
    history: FleetHistory


def read(client: AdminClient, chosen: Selection) -> View:
    params = {name: value for name, value in chosen.params().items() if name != "workspace"}
    return View(
        client.get("/admin/v1/engines", list[EngineReport]),
        client.get("/admin/v1/engines/history", FleetHistory, params),
    )


def draw(view: View, chosen: Selection) -> None:
    draw_cards(view)
    parts.heading("Engines now")
    engines = [engine for engine in view.engines if chosen.engine in (None, engine.name)]
    if not any(engine.stats for engine in engines):
        parts.no_engine("No engine is running.", "fleet")
    if engines:
        parts.table(
            engine_table(engines),
            "fleet",
            alt_text=f"{sum(e.status == 'ready' for e in engines)} of {len(engines)} ready.",
            columns={"Pool in use": parts.share_column(), "Foreign": parts.share_column()},
        )
    draw_promises(engines)
    draw_attribution(view.history.attribution)
    draw_restarts(view.history.restarts, chosen)


def draw_cards(view: View) -> None:
    ready = sum(engine.status == "ready" for engine in view.engines)
    stats = [engine.stats for engine in view.engines if engine.stats is not None]
    restarts, everything = view.history.restarts, view.history.attribution[:1]
    lost = sum(each.lost.written_tokens for each in restarts)
    in_use = in_use_share([s.blocks for s in stats])
    count = formats.counted(len(view.engines), "engine")
    held = "" if in_use is None else f" {formats.percent(in_use)} of their KV memory is in use."
    parts.hero(f"**{ready} of {count} {'is' if ready == 1 else 'are'} ready.**{held}")
    with st.grid(4, min_column_width=190, row_height=132):
        st.metric(
            "Engines ready",
            f"{ready} of {len(view.engines)}",
            help="Engines that answer and have their model loaded, as this gateway sees them.",
            border=True,
            height="stretch",
        )
        st.metric(
            "Running and waiting",
            f"{sum(s.running for s in stats)} · {sum(s.waiting for s in stats)}"
            if stats
            else formats.NO_VALUE,
            help="Sequences that are computed now, and those that wait for blocks.",
            border=True,
            height="stretch",
        )
        parts.card(
            "restart_lost",
            formats.compact(lost),
            delta=f"tokens after {len(restarts)} restart{'' if len(restarts) == 1 else 's'}",
        )
        share = (
            everything[0].delivered_tokens / everything[0].available_tokens
            if everything and everything[0].available_tokens
            else None
        )
        parts.card(
            "attribution",
            formats.percent(share),
            label="Delivered of available",
        )


def draw_promises(engines: list[EngineReport]) -> None:
    """What of the engine protocol holds: an engine in front of another server keeps less."""
    parts.heading("What engines promise")
    rows = promise_table(engines)
    if not rows:
        parts.empty("No engine that is up has told yet what it promises.", ":material/handshake:")
        return
    broken = sum(row["Kept"] == "no" for row in rows)
    parts.table(
        rows,
        "promises",
        alt_text=f"{broken} of {len(rows)} promises are not kept.",
        columns={"How, or why not": st.column_config.TextColumn(width="large")},
    )


def draw_attribution(found: list[Attribution]) -> None:
    parts.heading("Where hits are lost", "attribution")
    if not found:
        parts.empty("No request in this range was routed by what engines hold.", key="attribution")
        return
    rows = attribution_rows(found)
    if not rows:
        parts.empty("No engine held the beginning of a prompt that came in this range.")
        return
    total = found[0]
    prompt = max(total.prompt_tokens, 1)
    parts.chart(
        attribution_chart(rows, STAGES[viewer.theme()]),
        "attribution",
        f"Of {total.turns:,} sampled requests' prompt tokens"
        f" {formats.percent(total.available_tokens / prompt)} were available,"
        f" {formats.percent(total.captured_tokens / prompt)} captured,"
        f" {formats.percent(total.delivered_tokens / prompt)} delivered.",
    )


def draw_restarts(found: list[Restart], chosen: Selection) -> None:
    parts.heading("Restarts, and the cache they lost", "restart_lost")
    if not found:
        parts.empty(f"No engine was restarted in {chosen.words}.", ":material/check_circle:")
        return
    number = st.column_config.NumberColumn(format="localized")
    parts.table(
        restart_table(found),
        "restarts",
        alt_text=f"{len(found)} restarts with the tokens that were written again.",
        columns={
            "Back at (UTC)": st.column_config.DatetimeColumn(format="D MMM HH:mm:ss"),
            "Tokens written again": number,
        },
    )


def page() -> None:
    parts.title("Fleet", "Are the engines well, what did restarts cost, where are hits lost?")
    session = viewer.session()
    if session is not None and session.workspace is not None:
        parts.empty("Engines serve all workspaces: this page needs an admin key.", ":material/key:")
        return
    live.show("fleet", read, draw)


page()
