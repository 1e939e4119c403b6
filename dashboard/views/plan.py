"""Plan: how much memory keeps which promise. Everything here is simulated by the gateway."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import streamlit as st

from dashboard.access.sessions import Session
from dashboard.admin.client import AdminClient, ClientError
from dashboard.admin.shapes.plan import Plan, PlanChoices, PlanLine, Point
from dashboard.charts.plan import share_chart, wait_chart
from dashboard.rows.plan import engine_rows, memory_rows, point_rows, wait_rows
from dashboard.ui import filters, formats, parts, viewer
from dashboard.ui.colours import PLANS, WAITS

PATH = "/admin/v1/plan"
_LEDGER, _MADE, _TRACE = "Requests of the range", "Made-up conversations", "A trace"
_PASTED = "Another: its config.json"
_MEMORY, _ENGINES = "Memory for keys and values, all engines (GiB)", "Engines"
_MAX_TRACE = 8_000_000
_SEEN = "plan_seen"


def ask(client: AdminClient, body: dict[str, Any]) -> Plan:
    """The plan, with a bar that shows how far it is. Raise ClientError with the gateway's words."""
    bar = st.progress(0.0, text="Simulating")
    try:
        for text in client.stream(f"{PATH}/progress", body, {}):
            line = _line(text)
            if line.plan is not None:
                return line.plan
            if line.kind == "error":
                raise ClientError(line.message)
            bar.progress(min(line.share, 1.0), text=f"Simulating: {line.share:.0%}")
    finally:
        bar.empty()
    raise ClientError("The gateway's plan broke off.")


def _line(text: str) -> PlanLine:
    try:
        return msgspec.json.decode(text, type=PlanLine)
    except msgspec.MsgspecError:
        raise ClientError(
            "The gateway's answer has another shape: are both of one version?"
        ) from None


def form(choices: PlanChoices) -> dict[str, Any] | None:
    """What is to be planned; None until somebody asks."""
    source = st.segmented_control(
        "Traffic", [_LEDGER, _MADE, _TRACE], default=_LEDGER, key="plan_source", required=True
    )
    with st.form("plan_form"):
        body = hardware(choices)
        if source == _MADE:
            body["made"] = made_up()
        elif source == _TRACE:
            body["trace"] = st.text_area(
                "Lines of JSON: timestamp (ms), input_length, output_length, hash_ids",
                key="plan_trace",
                max_chars=_MAX_TRACE,
                height=160,
            )
        else:
            chosen = filters.chosen().params()
            body |= {name: chosen[name] for name in ("since_ms", "until_ms", "workspace")}
            body["served_model"] = chosen.get("model")
        if not st.form_submit_button("Plan", key="plan_go", type="primary"):
            return None
    return {name: value for name, value in body.items() if value is not None}


def hardware(choices: PlanChoices) -> dict[str, Any]:
    left, middle, right = st.columns(3)
    with left:
        model = st.selectbox("Model", [*choices.models, _PASTED], key="plan_model")
        dtype = st.selectbox("Type of keys and values", choices.kv_dtypes, key="plan_dtype")
        engines = st.number_input("Engines", 1, 64, 1, key="plan_engines")
    with middle:
        device = st.number_input("Memory of a device (GiB)", 1.0, 65_536.0, 80.0, key="plan_device")
        weights = st.number_input(
            "Of it not for keys and values (GiB)",
            0.0,
            65_536.0,
            None,
            key="plan_weights",
            placeholder="weights and a tenth",
        )
        prefill = st.number_input(
            "A computed token takes (µs)",
            0.01,
            1_000_000.0,
            None,
            key="plan_prefill",
            placeholder="as measured",
        )
    with right:
        host = st.number_input("Host memory of an engine (GiB)", 0.0, 1e6, 0.0, key="plan_host")
        disk = st.number_input("Disk of an engine (GiB)", 0.0, 1e6, 0.0, key="plan_disk")
        decode = st.number_input(
            "A decode step takes (ms)",
            0.0,
            1e4,
            None,
            key="plan_decode",
            placeholder="as measured",
        )
    pasted = st.text_area(
        "config.json of a model that is not in the list",
        key="plan_config",
        height=100,
        max_chars=200_000,
    )
    body: dict[str, Any] = {
        "kv_dtype": dtype,
        "engines": engines,
        "device_gib": device,
        "weights_gib": weights,
        "prefill_us": prefill,
        "host_gib": host,
        "disk_gib": disk,
        "decode_ms": decode,
    }
    if model == _PASTED:
        body["config"] = pasted
    else:
        body["model"] = model
    return body


def made_up() -> dict[str, Any]:
    left, middle, right = st.columns(3)
    with left:
        tenants = st.slider("Tenants", 1, 100, 8, key="plan_tenants")
        talks = st.slider("Conversations of a tenant", 1, 200, 20, key="plan_talks")
        turns = st.slider("Requests of a conversation", 1, 50, 8, key="plan_turns")
    with middle:
        system = st.slider("System prompt (tokens)", 0, 50_000, 3000, 100, key="plan_system")
        question = st.slider("New in a request (tokens)", 10, 10_000, 300, 10, key="plan_question")
        answer = st.slider("Answer (tokens)", 0, 4000, 250, 10, key="plan_answer")
    with right:
        gap = st.slider("Seconds between requests", 1, 3600, 60, key="plan_gap")
        hours = st.slider("Hours in which they begin", 1, 168, 4, key="plan_hours")
        ttl = st.selectbox("Markers", ["5m", "1h", "none"], key="plan_ttl")
    return {
        "tenants": tenants,
        "conversations": talks,
        "turns": turns,
        "system_tokens": system,
        "question_tokens": question,
        "answer_tokens": answer,
        "gap_seconds": gap,
        "hours": hours,
        "ttl": ttl,
    }


def with_config(body: dict[str, Any]) -> dict[str, Any]:
    """The body with its pasted config as an object. Raise ClientError where it is none."""
    text = body.get("config")
    if text is None:
        return body
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"config: no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ClientError("config: paste the whole config.json, a JSON object")
    return {**body, "config": config}


def draw(plan: Plan) -> None:
    whole = plan.whole
    parts.hero(
        f"**{whole.hit_rate:.1%} of the prompt tokens would be read**, and one first token in"
        f" twenty would take **{formats.seconds(whole.first_token_p95)}** or more (simulated)."
    )
    st.caption(plan.text)
    draw_cards(plan)
    st.text(plan.knee_text)
    parts.heading("What each purchase would change")
    for change in plan.buys:
        st.text(change.text)
    left, right = st.columns(2, gap="large")
    with left:
        draw_curves("memory", "By memory", _MEMORY, memory_rows(plan), plan.memory)
    with right:
        draw_curves("engines", "By engines", _ENGINES, engine_rows(plan.engines), plan.engines)
    draw_table("memory", "Memory", plan.memory)
    draw_table("engines", "Engines", plan.engines)
    draw_table("tiers", "What each tier adds", plan.tiers)
    with st.expander("What was assumed"):
        for text in plan.assumptions:
            st.text(text)


def draw_cards(plan: Plan) -> None:
    whole, kv = plan.whole, plan.kv
    fit = formats.NO_VALUE if kv.leases_that_fit is None else f"{kv.leases_that_fit:,}"
    with st.grid(4, min_column_width=170, row_height=132):
        parts.card(
            "plan_hit_rate",
            formats.percent(whole.hit_rate),
            label="Hit rate",
            delta=f"{plan.ceiling:.1%} at most",
        )
        parts.card("plan_kept", formats.percent(whole.promise_kept), label="Promise kept")
        parts.card(
            "plan_first",
            formats.seconds(whole.first_token_p95),
            label="First token p95",
            delta=f"p50 {formats.seconds(whole.first_token_p50)}",
        )
        parts.card(
            "plan_leases",
            fit,
            label="Leases that fit",
            delta=f"{kv.bytes_per_token:,} bytes a token",
        )


def draw_curves(
    key: str, heading: str, title: str, rows: Sequence[Any], points: Sequence[Point]
) -> None:
    parts.heading(heading)
    theme = viewer.theme()
    told = ", ".join(f"{each.label} {each.hit_rate:.1%}" for each in points)
    parts.chart(
        share_chart(rows, PLANS[theme], title=title),
        f"plan_share_{key}",
        f"Simulated hit rates: {told}.",
    )
    told = ", ".join(f"{each.label} {each.first_token_p95:.3f} s" for each in points)
    waits = wait_rows(points, by_engines=key == "engines")
    parts.chart(
        wait_chart(waits, WAITS[theme], title=title),
        f"plan_wait_{key}",
        f"Simulated first tokens, p95: {told}.",
    )


def draw_table(key: str, heading: str, points: Sequence[Point]) -> None:
    parts.heading(heading)
    shares = ("Hit rate", "Reused", "Promise kept", "Best effort")
    seconds = ("First token p50 (s)", "First token p95 (s)")
    parts.table(
        point_rows(points),
        f"plan_{key}",
        alt_text=f"{len(points)} simulated fleets.",
        columns={name: parts.share_column() for name in shares}
        | {name: st.column_config.NumberColumn(format="%.3f") for name in seconds},
    )


def draw_session(session: Session) -> None:
    body = form(session.client.get(PATH, PlanChoices))
    if body is not None:
        st.session_state.pop(_SEEN, None)
        st.session_state[_SEEN] = ask(session.client, with_config(body))
    plan: Plan | None = st.session_state.get(_SEEN)
    if plan is None:
        parts.empty(
            "Choose the hardware and the traffic, then Plan. A plan takes some seconds.",
            ":material/calculate:",
        )
        return
    draw(plan)


def page() -> None:
    parts.title("Plan", "How much memory keeps which promise? Simulated, with the product's pool.")
    session = viewer.session()
    if session is None:
        return
    try:
        draw_session(session)
    except ClientError as error:
        st.error("There is no plan:", icon=":material/block:")
        st.text(str(error))


page()
