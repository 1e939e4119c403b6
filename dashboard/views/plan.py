"""Plan: how many GPUs reach a target, how much memory keeps which promise. All is simulated."""

import json
from collections.abc import Sequence
from typing import Any

import altair as alt
import streamlit as st

import gateway.structs.advice as advice
from dashboard.client import AdminClient, ClientError, decoded
from dashboard.ui import charts, filters, formats, parts, viewer
from dashboard.ui.charts import PLANS, WAITS, Palette, Row, Rows, colour, frame
from gateway.structs.advice import Plan, PlanChoices, Point

PATH = "/admin/v1/plan"
_LEDGER, _MADE, _TRACE = "Requests of the range", "Made-up conversations", "A trace"
_PASTED = "Another: its config.json"
_MEMORY, _ENGINES = "Memory for keys and values, all engines (GiB)", "Engines"
_MAX_TRACE = 8_000_000
_SEEN = "plan_seen"
_EXACT, _SIMULATED, _REUSED = PLANS["light"]
# Field, label, least, most, default and step of a made-up conversation, in three columns.
_SLIDERS = (
    (
        ("tenants", "Tenants", 1, 100, 8, 1),
        ("conversations", "Conversations of a tenant", 1, 200, 20, 1),
        ("turns", "Requests of a conversation", 1, 50, 8, 1),
    ),
    (
        ("system_tokens", "System prompt (tokens)", 0, 50_000, 3000, 100),
        ("question_tokens", "New in a request (tokens)", 10, 10_000, 300, 10),
        ("answer_tokens", "Answer (tokens)", 0, 4000, 250, 10),
    ),
    (
        ("gap_seconds", "Seconds between requests", 1, 3600, 60, 1),
        ("hours", "Hours in which they begin", 1, 168, 4, 1),
    ),
)
# The target's: field, label, most, step.
_TARGET = (
    ("first_token_p95", "First token p95, at most (s)", 3600.0, 0.1),
    ("requests_per_second", "Requests a second", 1000.0, 1.0),
    ("promise_kept", "Promise kept, at least (%)", 100.0, 1.0),
    ("leased", "Breakpoints leased, at least (%)", 100.0, 1.0),
)
# Field, label, least, most, default, and what stands where nothing is typed.
_NUMBERS: tuple[tuple[tuple[str, str, float, float, float | None, str | None], ...], ...] = (
    (),
    (
        ("device_gib", "Memory of a device (GiB)", 1.0, 65_536.0, 80.0, None),
        (
            *("weights_gib", "Of it, for weights and working memory (GiB)"),
            *(0.0, 65_536.0, None, "weights and a tenth"),
        ),
        ("prefill_us", "Prefill of one token (µs)", 0.01, 1_000_000.0, None, "as measured"),
    ),
    (
        ("host_gib", "Host memory of an engine (GiB)", 0.0, 1e6, 0.0, None),
        ("disk_gib", "Disk of an engine (GiB)", 0.0, 1e6, 0.0, None),
        ("decode_ms", "One decode step (ms)", 0.0, 1e4, None, "as measured"),
    ),
)


def ask(client: AdminClient, body: dict[str, Any]) -> Plan:
    """The plan, with a bar that shows how far it is. Raise ClientError with the gateway's words."""
    bar = st.progress(0.0, text="Simulating")
    try:
        for text in client.stream(f"{PATH}/progress", body, {}):
            match decoded(f"[{text}]", list[advice.Line])[0]:
                case advice.Planned(plan=plan):
                    return plan
                case advice.PlanFailed(message=message):
                    raise ClientError(message)
                case advice.Progress(share=share):
                    bar.progress(min(share, 1.0), text=f"Simulating: {share:.0%}")
    finally:
        bar.empty()
    raise ClientError("The gateway's plan broke off.")


def form(choices: PlanChoices) -> dict[str, Any] | None:
    """What is to be planned; None until somebody asks. Raise ClientError for a wrong config."""
    source = st.segmented_control(
        "Traffic", [_LEDGER, _MADE, _TRACE], default=_LEDGER, key="plan_source", required=True
    )
    with st.form("plan_form"):
        body: dict[str, Any] = {}
        columns = st.columns(3)
        with columns[0]:
            model = st.selectbox("Model", [*choices.models, _PASTED], key="plan_model")
            body["kv_dtype"] = st.selectbox(
                "Type of keys and values", choices.kv_dtypes, key="plan_dtype"
            )
            body["engines"] = st.number_input("Engines", 1, 64, 1, key="plan_engines")
        for column, numbers in zip(columns, _NUMBERS, strict=True):
            for field, label, low, high, value, told in numbers:
                key = f"plan_{field.split('_')[0]}"
                body[field] = column.number_input(
                    label, low, high, value, key=key, placeholder=told
                )
        body |= wanted(choices)
        pasted = st.text_area(
            "config.json of a model that is not in the list",
            key="plan_config",
            height=100,
            max_chars=200_000,
        )
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
            chosen = filters.chosen().params("engine")
            body |= {"served_model": chosen.pop("model"), **chosen}
        if not st.form_submit_button("Plan", key="plan_go", type="primary"):
            return None
    if model == _PASTED:
        body["config"] = config_of(pasted)
    else:
        body["model"] = model
    return {name: value for name, value in body.items() if value is not None}


def wanted(choices: PlanChoices) -> dict[str, Any]:
    """The target and the GPUs, where a first token's time is typed."""
    st.markdown("**How many GPUs?** With a target, the fewest engines of each GPU are looked for.")
    target: dict[str, Any] = {}
    for column, (field, label, most, step) in zip(st.columns(4), _TARGET, strict=True):
        key = f"plan_target_{field}"
        value = column.number_input(label, 0.001, most, None, step, key=key, placeholder="as it is")
        if value is not None:
            target[field] = value / 100 if label.endswith("(%)") else value
    with st.expander("GPUs and their prices (examples: type your own)"):
        rows: list[Row] = [
            {
                "Use": True,
                "GPU": gpu.title,
                "$ an hour": gpu.per_hour,
                "Memory (GB)": gpu.memory_gb,
                "Dense BF16 (TFLOPS)": gpu.tflops,
                "GB a second": gpu.bandwidth_gbs,
                "From": gpu.source,
            }
            for gpu in choices.gpus.values()
        ]
        fixed = [name for name in rows[0] if name not in ("Use", "$ an hour")]
        edited = st.data_editor(
            frame(rows), key="plan_gpus", hide_index=True, disabled=fixed, num_rows="fixed"
        )
    if "first_token_p95" not in target:
        return {}
    picked = zip(choices.gpus, edited["Use"], edited["$ an hour"], strict=True)
    found = [{"name": name, "per_hour": float(price)} for name, is_used, price in picked if is_used]
    return {"target": target, "gpus": found or None}


def made_up() -> dict[str, Any]:
    found: dict[str, Any] = {}
    columns = st.columns(3)
    for column, sliders in zip(columns, _SLIDERS, strict=True):
        for field, label, low, high, value, step in sliders:
            found[field] = column.slider(label, low, high, value, step, key=f"plan_made_{field}")
    found["ttl"] = columns[2].selectbox("Markers", ["5m", "1h", "none"], key="plan_ttl")
    return found


def config_of(text: str) -> dict[str, Any]:
    """Raise ClientError where it is no config.json."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"config: no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ClientError("config: paste the whole config.json, a JSON object")
    return config


def draw(plan: Plan) -> None:
    whole = plan.whole
    for text in plan.warnings:
        st.warning(text, icon=":material/warning:")
    read = (
        f"**{whole.hit_rate:.1%} of the prompt tokens would be read**, and one first token in"
        f" twenty would take **{formats.seconds(whole.first_token_p95)}** or more (simulated)."
    )
    if plan.answers:
        draw_answers(plan)
        st.markdown(read)
    else:
        parts.hero(read)
    st.caption(plan.text)
    draw_cards(plan)
    st.text(plan.knee_text)
    parts.heading("What each purchase would change")
    for change in plan.buys:
        st.text(change.text)
    left, right = st.columns(2, gap="large")
    with left:
        rows: list[Row] = [
            {"x": each.gib, "y": each.reuse_rate, "kind": _EXACT} for each in plan.lru
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


def draw_answers(plan: Plan) -> None:
    parts.hero(f"**{plan.answer_text}**".replace("$", "\\$"))
    st.caption(
        "Simulated, the cheapest first. Prices are those that stand in the form. What follows below"
        " the table is about the first row."
    )
    rows = [
        {
            "GPU": each.title,
            "Engines": each.engines,
            "GPUs an engine": each.gpus_per_engine,
            "An hour ($)": each.per_hour,
            "First token p95 (s)": each.point.first_token_p95 if each.point else None,
            "Promise kept": each.point.promise_kept if each.point else None,
            "Hit rate": each.point.hit_rate if each.point else None,
            "Prefill of a token (µs)": each.prefill_us or None,
            "Decode step (ms)": each.decode_ms or None,
            "Times are": each.speed or None,
            "Note": each.why or None,
        }
        for each in plan.answers
    ]
    parts.table(rows, "plan_answers", plan.answer_text)


def draw_cards(plan: Plan) -> None:
    whole, kv = plan.whole, plan.kv
    with st.grid(4, min_column_width=170, row_height=132):
        most, p50 = f"{plan.ceiling:.1%} at most", formats.seconds(whole.first_token_p50)
        p95, fit = formats.seconds(whole.first_token_p95), formats.whole(kv.leases_that_fit)
        size = f"{kv.bytes_per_token:,} bytes a token"
        parts.card("plan_hit_rate", formats.percent(whole.hit_rate), label="Hit rate", delta=most)
        parts.card("plan_kept", formats.percent(whole.promise_kept), label="Promise kept")
        parts.card("plan_first", p95, label="First token p95", delta=f"p50 {p50}")
        parts.card("plan_leases", fit, label="Leases that fit", delta=size)


def draw_curves(key: str, heading: str, title: str, lru: Rows, points: Sequence[Point]) -> None:
    """Shares of the prompt tokens, and times to first token, by the memory of all engines together
    or by engines."""
    parts.heading(heading)
    theme = viewer.theme()
    at = [each.engines if key == "engines" else each.device_gib * each.engines for each in points]
    shares: list[Row] = list(lru)
    waits: list[Row] = []
    for x, each in zip(at, points, strict=True):
        shares.append({"x": x, "y": each.hit_rate, "kind": _SIMULATED})
        shares.append({"x": x, "y": each.reuse_rate, "kind": _REUSED})
        waits.append({"x": x, "y": max(each.first_token_p50, 0.001), "kind": "p50"})
        waits.append({"x": x, "y": max(each.first_token_p95, 0.001), "kind": "p95"})
    axis, scale = alt.Axis(format=".0%", tickCount=5), alt.Scale(domain=[0, 1])
    share = alt.Y("y:Q", title="Share of prompt tokens", scale=scale, axis=axis)
    told = ", ".join(f"{each.label} {each.hit_rate:.1%}" for each in points)
    drawn = curves(shares, PLANS[theme], title, share, "y:Q=Share|.1%")
    parts.chart(drawn, f"plan_share_{key}", f"Simulated hit rates: {told}.")
    wait = charts.decades(alt.Y, "y:Q", "First token (seconds)")
    told = ", ".join(f"{each.label} {each.first_token_p95:.3f} s" for each in points)
    drawn = curves(waits, WAITS[theme], title, wait, "y:Q=First token (s)|.3f")
    parts.chart(drawn, f"plan_wait_{key}", f"Simulated first tokens, p95: {told}.")


def curves(rows: Rows, colours: Palette, title: str, y: alt.Y, told: str) -> Any:
    """Lines by kind; a simulated point is a dot."""
    axis = charts.amounts(whole=title == _ENGINES)
    drawn = alt.Chart(frame(rows)).encode(
        x=alt.X("x:Q", title=title, scale=charts.ZERO, axis=axis),
        y=y,
        color=colour("kind:N", colours, 2),
        tooltip=charts.tips("kind:N=What", "x:Q=At", told),
    )
    dots = drawn.transform_filter("indexof(datum.kind, 'LRU') < 0").mark_circle(size=60)
    return alt.layer(drawn.mark_line(), dots).properties(height=280)


def draw_table(key: str, heading: str, points: Sequence[Point]) -> None:
    parts.heading(heading)
    rows = [
        {
            "Fleet": point.label,
            "Engines": point.engines,
            "GiB for keys and values": point.device_gib,
            "Hit rate": point.hit_rate,
            "Reused": point.reuse_rate,
            "Promise kept": point.promise_kept,
            "Share best effort": point.best_effort,
            "First token p50 (s)": point.first_token_p50,
            "First token p95 (s)": point.first_token_p95,
            "Prefill saved (s)": round(point.prefill_saved_seconds),
            "Refused": point.refused,
        }
        for point in points
    ]
    parts.table(rows, f"plan_{key}", f"{len(points)} simulated fleets.")


def draw_page() -> None:
    client = viewer.session().client
    body = form(client.get(PATH, PlanChoices))
    if body is not None:
        st.session_state.pop(_SEEN, None)
        st.session_state[_SEEN] = ask(client, body)
    if (plan := st.session_state.get(_SEEN)) is not None:
        draw(plan)
    else:
        told = "Choose the hardware and the traffic, then Plan. A plan takes some seconds."
        parts.empty(told, ":material/calculate:")


if __name__ == "__main__":
    parts.title(
        "Plan",
        "How many GPUs, and which memory keeps which promise? Simulated, with the product's pool.",
    )
    try:
        draw_page()
    except ClientError as error:
        parts.problem("There is no plan:", str(error))
