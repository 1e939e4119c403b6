"""Plan: what would other memory, engines and tiers give for the traffic of a range? Simulated."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import streamlit as st

from dashboard.client import AdminClient, ClientError, decoded
from dashboard.ui import charts, filters, formats, parts, viewer
from dashboard.ui.charts import (
    LRU_EXACT,
    PLANS,
    READ_SIMULATED,
    REUSED_SIMULATED,
    WAITS,
    Palette,
    Row,
    Rows,
    colour,
    frame,
)
from gateway.structs.plan import (
    Line,
    Plan,
    PlanChoices,
    PlanFailed,
    Planned,
    PlannedEngine,
    Point,
    Progress,
)

PATH = "/admin/v1/plan"
TRACE_PATH = "/admin/v1/trace"
_TRACE_BLOCK = 512
"""The tokens of a block of a trace, in published traces and in those that are pasted here."""
_LEDGER = "Requests of the range"
_TRACE = "A trace"
_MEMORY = "Tokens that the memory of all engines holds"
_ENGINES = "Engines"
_MAX_TRACE = 8_000_000
_MAX_TOKENS = 2**40
_SEEN = "plan_seen"
_AS_IT_IS = "as it is"


def ask(client: AdminClient, body: dict[str, Any]) -> Plan:
    """Ask for the plan. A bar shows how far it is. Raise ClientError with the gateway's words."""
    bar = st.progress(0.0, text="Simulating")
    try:
        for text in client.stream(f"{PATH}/progress", body, {}):
            # The union alone has no type that can be named here, but a list of it has.
            match decoded(f"[{text}]", list[Line])[0]:
                case Planned(plan=plan):
                    return plan
                case PlanFailed(message=message):
                    raise ClientError(message)
                case Progress(share=share):
                    bar.progress(min(share, 1.0), text=f"Simulating: {share:.0%}")
    finally:
        bar.empty()
    raise ClientError("The gateway's plan broke off.")


def form(choices: PlanChoices) -> dict[str, Any] | None:
    """Draw the form. Return the request for a plan, or None until somebody sends the form."""
    source = st.segmented_control(
        "Traffic", [_LEDGER, _TRACE], default=_LEDGER, key="plan_source", required=True
    )
    for engine in choices.engines:
        st.caption(engine_text(engine))
    with st.form("plan_form"):
        body: dict[str, Any] = {}
        st.markdown("A field that is left empty is planned as it is.")
        left, middle, right = st.columns(3)
        body["device_tokens"] = number_input(
            left, "device_tokens", "Tokens on the device", least=1024
        )
        body["engines"] = number_input(left, "engines", "Engines", least=1, most=64)
        body["host_tokens"] = number_input(middle, "host_tokens", "Tokens in host memory")
        body["max_running"] = number_input(
            middle, "max_running", "Requests computed together", least=1, most=4096
        )
        body["disk_tokens"] = number_input(right, "disk_tokens", "Tokens on disk")
        body["min_cache_tokens"] = number_input(
            right, "min_cache_tokens", "Shortest cached prefix (tokens)", least=1, most=1_000_000
        )
        selection = filters.chosen()
        body["served_model"] = selection.model
        body |= selection.params("engine", "model")
        if source == _TRACE:
            body["trace"] = st.text_area(
                "Lines of JSON: timestamp (ms), input_length, output_length, hash_ids",
                key="plan_trace",
                max_chars=_MAX_TRACE,
                height=160,
            )
        if not st.form_submit_button("Plan", key="plan_go", type="primary"):
            return None
    return {name: value for name, value in body.items() if value is not None}


def draw_trace(client: AdminClient) -> None:
    """Draw a button for a file of the range's requests. The file is made when somebody clicks."""
    query = filters.chosen().params("engine")
    st.download_button(
        "The range's requests as a trace",
        lambda: client.download(TRACE_PATH, {**query, "block_tokens": _TRACE_BLOCK}),
        file_name=f"holdfast-trace-{_TRACE_BLOCK}.jsonl",
        mime="application/x-ndjson",
        key="plan_trace_file",
        icon=":material/download:",
        on_click="ignore",
        type="tertiary",
        help=f"Mooncake's format, in blocks of {_TRACE_BLOCK} tokens: when each request came, how"
        " long it was, and which of its blocks are equal. No content.",
    )


def engine_text(engine: PlannedEngine) -> str:
    """What the engines of one model hold now."""
    tiers = [f"{engine.device_tokens:,} tokens on the device"]
    if engine.host_tokens:
        tiers.append(f"{engine.host_tokens:,} in host memory")
    if engine.disk_tokens:
        tiers.append(f"{engine.disk_tokens:,} on disk")
    engines = formats.counted(engine.engines, "engine")
    return f"{engine.model}: {engines}, each with {', '.join(tiers)}."


def number_input(
    column: Any, field: str, label: str, *, least: int = 0, most: int = _MAX_TOKENS
) -> int | None:
    """Draw a field for a whole number. Return the number, or None if the field is empty."""
    value = column.number_input(
        label, least, most, None, 1, key=f"plan_{field}", placeholder=_AS_IT_IS
    )
    return None if value is None else int(value)


def draw(plan: Plan) -> None:
    for text in plan.warnings:
        st.warning(text, icon=":material/warning:")
    whole = plan.whole
    parts.hero(f"**{whole.hit_rate:.1%} of the prompt tokens would be read** (simulated).")
    st.caption(plan.text)
    draw_cards(plan)
    st.text(plan.knee_text)
    parts.heading("What each change would give")
    for change in plan.changes:
        st.text(change.text)
    left, right = st.columns(2, gap="large")
    with left:
        rows: list[Row] = [
            {"x": point.tokens, "y": point.reuse_rate, "kind": LRU_EXACT} for point in plan.lru
        ]
        draw_curves("memory", "By memory", _MEMORY, rows, plan.memory)
    with right:
        draw_curves("engines", "By engines", _ENGINES, [], plan.engines)
    draw_table("memory", "Memory", plan.memory)
    draw_table("engines", "Engines", plan.engines)
    draw_table("tiers", "What each tier adds", plan.tiers)
    with st.expander("What was assumed"):
        for text in plan.assumptions:
            st.text(text)


def draw_cards(plan: Plan) -> None:
    whole = plan.whole
    engine = plan.engine
    with st.grid(4, min_column_width=170):
        parts.card(
            "plan_hit_rate",
            formats.percent(whole.hit_rate),
            label="Hit rate",
            delta=f"{plan.ceiling:.1%} at most",
        )
        parts.card("plan_kept", formats.percent(whole.promise_kept), label="Promise kept")
        parts.card("plan_best_effort", formats.percent(whole.best_effort), label="Best effort")
        parts.card("plan_leases", formats.whole(engine.leases_that_fit), label="Leases that fit")


def draw_curves(key: str, heading: str, title: str, lru: Rows, points: Sequence[Point]) -> None:
    """Draw shares of the prompt tokens, and times to first token if they are known. The horizontal
    axis is the number of engines if `key` is `engines`, else the memory of all engines together."""
    parts.heading(heading)
    theme = viewer.theme()
    shares: list[Row] = list(lru)
    waits: list[Row] = []
    for point in points:
        x = point.engines if key == "engines" else point.device_tokens * point.engines
        shares.append({"x": x, "y": point.hit_rate, "kind": READ_SIMULATED})
        shares.append({"x": x, "y": point.reuse_rate, "kind": REUSED_SIMULATED})
        if point.first_token_p50 is not None and point.first_token_p95 is not None:
            waits.append({"x": x, "y": max(point.first_token_p50, 0.001), "kind": "p50"})
            waits.append({"x": x, "y": max(point.first_token_p95, 0.001), "kind": "p95"})
    share = alt.Y(
        "y:Q",
        title="Share of prompt tokens",
        scale=alt.Scale(domain=[0, 1]),
        axis=alt.Axis(format=".0%", tickCount=5),
    )
    rates = ", ".join(f"{point.label} {point.hit_rate:.1%}" for point in points)
    drawn = curves(shares, PLANS[theme], title, share, "y:Q=Share|.1%")
    parts.chart(drawn, f"plan_share_{key}", f"Simulated hit rates: {rates}.")
    if not waits:
        return
    wait = charts.decades(alt.Y, "y:Q", "First token (seconds)")
    times = ", ".join(
        f"{point.label} {point.first_token_p95:.3f} s"
        for point in points
        if point.first_token_p95 is not None
    )
    drawn = curves(waits, WAITS[theme], title, wait, "y:Q=First token (s)|.3f")
    parts.chart(drawn, f"plan_wait_{key}", f"Simulated first tokens, p95: {times}.")


def curves(rows: Rows, colours: Palette, title: str, y: alt.Y, tip: str) -> Any:
    """A line for each kind. Each simulated point is a dot on its line."""
    axis = charts.amounts(whole=title == _ENGINES)
    drawn = alt.Chart(frame(rows)).encode(
        x=alt.X("x:Q", title=title, scale=charts.ZERO, axis=axis),
        y=y,
        color=colour("kind:N", colours, 2),
        tooltip=charts.tips("kind:N=What", "x:Q=At", tip),
    )
    dots = drawn.transform_filter("indexof(datum.kind, 'LRU') < 0").mark_circle(size=60)
    return alt.layer(drawn.mark_line(), dots).properties(height=280)


def draw_table(key: str, heading: str, points: Sequence[Point]) -> None:
    parts.heading(heading)
    rows = [
        {
            "Fleet": point.label,
            "Engines": point.engines,
            "Tokens on the device": point.device_tokens,
            "Hit rate": point.hit_rate,
            "Reused": point.reuse_rate,
            "Promise kept": point.promise_kept,
            "Share best effort": point.best_effort,
            "First token p50 (s)": point.first_token_p50,
            "First token p95 (s)": point.first_token_p95,
            "Refused": point.refused,
        }
        for point in points
    ]
    parts.table(rows, f"plan_{key}", f"{len(points)} simulated fleets.")


def draw_page() -> None:
    client = viewer.session().client
    draw_trace(client)
    body = form(client.get(PATH, PlanChoices))
    if body is not None:
        st.session_state.pop(_SEEN, None)
        st.session_state[_SEEN] = ask(client, body)
    plan = st.session_state.get(_SEEN)
    if plan is not None:
        draw(plan)
    else:
        words = "Choose what is to change, then Plan. A plan takes up to some minutes."
        parts.empty(words, ":material/calculate:")


if __name__ == "__main__":
    parts.title(
        "Plan",
        "What would other memory, engines and tiers give? Simulated, with the product's own pool.",
    )
    try:
        draw_page()
    except ClientError as error:
        parts.problem("There is no plan:", str(error))
