"""Advice: which markers would pay, and what breaks prefixes."""

import json
from typing import Any

import streamlit as st

from dashboard.access.sessions import Session
from dashboard.admin.client import AdminClient, ClientError, Refused, decoded, segment
from dashboard.admin.shapes.advice import AdviceReport, StreamAdvice
from dashboard.playground.paste import MAX_CHARACTERS
from dashboard.rows.advice import finding_rows, stream_rows, way_rows
from dashboard.ui import filters, formats, parts, viewer

PATH = "/admin/v1/advise"
# The gateway answers so many within the time that the dashboard waits.
MAX_TURNS = 20_000
_RANGE, _PASTED = "Requests of the range", "Pasted requests"
_MAX_PASTED = 2
_SEEN = "advice_seen"


def ask(client: AdminClient, body: dict[str, Any]) -> AdviceReport:
    wanted = {name: value for name, value in body.items() if value is not None}
    return decoded(client.send("POST", PATH, body=wanted), AdviceReport)


def draw_range(session: Session) -> None:
    """The advice is kept until the selection changes or somebody asks again."""
    chosen = filters.chosen()
    about = (session.workspace, chosen)
    kept = st.session_state.get(_SEEN)
    again = st.button("Look again", key="advise_again", icon=":material/refresh:")
    if again or kept is None or kept[0] != about:
        asked = {**chosen.params(), "max_turns": MAX_TURNS}
        # Advice is for clients, whatever engine served them.
        asked.pop("engine")
        with st.spinner("Comparing ways to place markers"):
            kept = about, ask(session.client, asked)
        st.session_state[_SEEN] = kept
    report: AdviceReport = kept[1]
    if not report.streams:
        parts.empty("No requests in this range that could be compared.", key="advice")
        return
    draw_summary(report)
    draw_streams(report.streams)
    labels = [f"{n + 1}. {each.workspace} · {each.model}" for n, each in enumerate(report.streams)]
    number = labels.index(st.selectbox("Look at", labels, key="advice_stream", width=420))
    draw_stream(session, report.streams[number])


def draw_summary(report: AdviceReport) -> None:
    gains = [each for each in report.streams if each.verdict != "leave"]
    tokens = sum(each.saves.multiples for each in gains)
    if gains:
        parts.hero(
            f"**{len(gains):,}** of {len(report.streams):,} groups of requests would be cheaper"
            f" with other markers, by **{tokens:,.0f}** input tokens' worth together."
        )
    else:
        parts.hero("**Leave the markers as they are**: nothing here would be cheaper.")
    st.caption(report.text)


def draw_streams(streams: list[StreamAdvice]) -> None:
    parts.heading("By key and model")
    parts.table(
        stream_rows(streams),
        "advice_streams",
        alt_text=f"Advice for {len(streams)} groups of requests.",
        columns={
            "Would save ($)": parts.money_column(),
            "Prefill saved (s)": st.column_config.NumberColumn(format="%.1f"),
        },
        height=420 if len(streams) > 10 else "auto",
    )


def draw_stream(session: Session, stream: StreamAdvice) -> None:
    with st.container(border=True, key="advice_stream_box"):
        st.text(stream.text)
        saves = stream.saves
        with st.grid(4, min_column_width=170, row_height=132):
            parts.card("advice_multiples", f"{saves.multiples:,.0f}", label="Saves, input tokens")
            parts.card("advice_nano", formats.dollars(saves.nano), label="Saves")
            seconds = saves.prefill_seconds
            shown = formats.NO_VALUE if seconds is None else f"{seconds:,.1f} s"
            parts.card("advice_prefill", shown, label="Prefill saved")
            end = stream.shared_end or formats.NO_VALUE
            parts.card(
                "advice_shared",
                f"{stream.shared_tokens:,}",
                label="Shared beginning, tokens",
                delta=f"up to {end}",
            )
        if stream.next_best:
            st.text(stream.next_best)
        st.text(stream.prewarm.text)
        st.text(f"From: {', '.join(stream.turns)}")
        draw_apply(session, stream)
    parts.heading("What breaks the prefix")
    if stream.findings:
        parts.table(
            finding_rows(stream.findings),
            "advice_findings",
            alt_text=f"{len(stream.findings)} things break this prefix.",
            columns={"Worth ($)": parts.money_column()},
        )
    else:
        parts.empty("Nothing breaks it.", ":material/check_circle:")
    parts.heading("Ways to place the markers")
    parts.table(
        way_rows(stream.outcomes),
        "advice_ways",
        alt_text="What each way to place markers would have cost.",
        columns={"Cost ($)": parts.money_column()},
    )


def draw_apply(session: Session, stream: StreamAdvice) -> None:
    policy = stream.policy
    if policy is None:
        if stream.markers:
            st.caption("Mark these blocks in the request; a pasted request shows how.")
        return
    ttl = policy.auto_cache_ttl
    told = f"auto_cache {policy.auto_cache}" + (f", {ttl}" if ttl else "")
    st.text(f"The key's policy does the same: {told}.")
    if session.workspace is not None:
        return
    if st.button("Set this policy for the key", key="advice_apply", icon=":material/tune:"):
        body = {"auto_cache": policy.auto_cache} | ({"auto_cache_ttl": ttl} if ttl else {})
        path = f"/admin/v1/keys/{segment(stream.key)}"
        session.client.change("POST", path, dict[str, Any], body)
        st.success("The policy is set. Requests without markers follow it from now on.")


def draw_pasted(session: Session) -> None:
    texts = []
    for number in range(_MAX_PASTED):
        label = "A JSON body or a curl command, of any API"
        text = st.text_area(
            label if number == 0 else "A second one to compare it with (optional)",
            key=f"advice_pasted_{number}",
            height=220 if number == 0 else 120,
            max_chars=MAX_CHARACTERS,
            placeholder="curl … -d '{\"messages\": […]}'",
        )
        if text.strip():
            texts.append(text)
    if not st.button("Advise", key="advise", type="primary", disabled=not texts):
        return
    report = ask(session.client, {"requests": texts})
    st.caption(report.text)
    for number, found in enumerate(report.requests):
        parts.heading(f"Request {number + 1}")
        st.caption(f"About {found.tokens:,} tokens.")
        if found.findings:
            rows = finding_rows(found.findings)
            parts.table(rows, f"pasted_{number}", alt_text=f"{len(rows)} findings.")
        else:
            parts.empty("Nothing to change.", ":material/check_circle:")
        if found.marked is not None:
            with st.expander("The request with the markers in place"):
                st.code(json.dumps(found.marked, indent=2, ensure_ascii=False), language=None)
    for stream in report.streams:
        parts.heading("Compared with each other")
        if stream.findings:
            rows = finding_rows(stream.findings)
            parts.table(rows, "pasted_compared", alt_text=f"{len(rows)} differences.")
        else:
            parts.empty("Nothing breaks their shared beginning.", ":material/check_circle:")


def page() -> None:
    parts.title("Advice", "Which markers would pay, and what breaks them?")
    session = viewer.session()
    if session is None:
        return
    mode = st.segmented_control(
        "Look at", [_RANGE, _PASTED], default=_RANGE, key="advice_mode", required=True
    )
    try:
        if mode == _PASTED:
            draw_pasted(session)
        else:
            draw_range(session)
    except Refused as error:
        st.error("The gateway refuses that:", icon=":material/block:")
        st.text(str(error))
    except ClientError as error:
        st.error(str(error), icon=":material/cloud_off:")


page()
