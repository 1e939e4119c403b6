"""Advice: which markers would pay, and what breaks prefixes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import streamlit as st

from dashboard.access.sessions import Session
from dashboard.client import segment
from dashboard.ui import filters, formats, parts, viewer
from dashboard.ui.charts import Row
from dashboard.ui.filters import Selection
from dashboard.ui.parts import in_dollars
from gateway.structs.advice import AdviceReport, Finding, NearDuplicate, StreamAdvice
from gateway.structs.fleet import KeyInfo

PATH = "/admin/v1/advise"
# The most turns that the gateway can judge within the time that the dashboard waits.
MAX_TURNS = 20_000
MAX_CHARACTERS = 1_000_000
WAYS = {
    "observed": "As it was",
    "as_sent": "The same markers, nothing lost",
    "none": "No marker",
    "shared_5m": "Shared beginning, 5 minutes",
    "shared_1h": "Shared beginning, 1 hour",
    "conversation_5m": "Conversation, 5 minutes",
    "conversation_1h": "Conversation, 1 hour",
    "conversation_5m_shared_1h": "Shared beginning 1 hour, conversation 5 minutes",
}
VERDICTS = {
    "fix": "Change the prompt",
    "prewarm": "Send the prefix ahead",
    "mark": "Change the markers",
    "unmark": "Mark nothing",
    "leave": "Leave as it is",
}
_RANGE = "Requests of the range"
_PASTED = "Pasted requests"
_SEEN = "advice_seen"


class SeenAdvice(NamedTuple):
    """Advice for the requests of a range, as the page keeps it."""

    # The only workspace that the viewer sees; None: the viewer sees all.
    workspace: str | None
    # What was selected when the page asked for the advice.
    selection: Selection
    report: AdviceReport


def find_advice(session: Session) -> AdviceReport:
    """The advice for the selection. It is kept until the selection changes, or until somebody
    clicks the button that this draws. Raise ClientError."""
    selection = filters.chosen()
    seen: SeenAdvice | None = st.session_state.get(_SEEN)
    is_asked = st.button("Look again", key="advise_again", icon=":material/refresh:")
    is_same = (
        seen is not None and seen.workspace == session.workspace and seen.selection == selection
    )
    if seen is not None and is_same and not is_asked:
        return seen.report
    # Advice is for clients, whichever engine served them.
    query = {**selection.params("engine"), "max_turns": MAX_TURNS}
    with st.spinner("Comparing ways to place markers"):
        report = session.client.ask(PATH, AdviceReport, query)
    st.session_state[_SEEN] = SeenAdvice(session.workspace, selection, report)
    return report


def draw_range(session: Session) -> None:
    report = find_advice(session)
    if not report.streams:
        parts.empty("No requests in this range that could be compared.", key="advice")
        return
    parts.hero(verdict_in_words(report))
    st.caption(report.text)
    # The groups that would save most come first.
    streams = sorted(
        report.streams, key=lambda stream: (-(stream.saves.nano or 0), -stream.saves.multiples)
    )
    query = {"workspace": filters.chosen().workspace}
    keys = session.client.get("/admin/v1/keys", list[KeyInfo], query)
    names = {key.id: key.name for key in keys}
    parts.heading("By key and model")
    rows = [_stream_row(stream, names) for stream in streams]
    alt_text = f"Advice for {formats.counted(len(streams), 'group')} of requests."
    parts.table(rows, "advice_streams", alt_text, wide=("Markers",))
    parts.heading("Prefixes that are nearly the same")
    draw_findings(report.near_duplicates, "advice_near", "No two prefixes are nearly the same.")
    labels = [
        f"{number}. {stream.workspace} · {names.get(stream.key, stream.key)} · {stream.model}"
        for number, stream in enumerate(streams, 1)
    ]
    number = labels.index(st.selectbox("Look at", labels, key="advice_stream", width=420))
    draw_stream(session, streams[number])


def _stream_row(stream: StreamAdvice, names: Mapping[str, str]) -> Row:
    """`names` are the names of keys by id."""
    return {
        "Workspace": stream.workspace,
        "Would save ($)": in_dollars(stream.saves.nano),
        "Key": names.get(stream.key, stream.key),
        "Model": stream.model,
        "Requests": stream.num_turns,
        "Advice": VERDICTS.get(stream.verdict, stream.verdict),
        "Markers": ", ".join(f"{marker.place} ({marker.ttl})" for marker in stream.markers),
        "Would save (input tokens)": round(stream.saves.multiples),
        "Prefill saved (s)": stream.saves.prefill_seconds,
        "Faults": len(stream.findings),
    }


def verdict_in_words(report: AdviceReport) -> str:
    """The page's sentence. Money comes first if prices are known."""
    changed_streams = [stream for stream in report.streams if stream.verdict != "leave"]
    if not changed_streams:
        return "**Leave the requests as they are**: nothing here would be cheaper."
    saves = report.saves
    tokens = f"{saves.multiples:,.0f}"
    worth = f"the price of **{tokens}** input tokens"
    if saves.nano is not None:
        worth = f"**{formats.dollars(saves.nano)}** (the price of {tokens} input tokens)"
    elif any(stream.saves.nano is not None for stream in changed_streams):
        nano = sum(stream.saves.nano or 0 for stream in changed_streams)
        worth = (
            f"**{formats.dollars(nano)}** where there is a price (everywhere by the price of"
            f" {tokens} input tokens)"
        )
    count = len(changed_streams)
    groups = formats.counted(len(report.streams), "group")
    return (
        f"**{count:,}** of {groups} of requests would have been cheaper: all together by {worth}."
    )


def draw_stream(session: Session, stream: StreamAdvice) -> None:
    saves = stream.saves
    with st.container(border=True, key="advice_stream_box"):
        st.text(stream.text)
        with st.grid(4, min_column_width=170):
            parts.card("advice_nano", formats.dollars(saves.nano), label="Saves")
            parts.card("advice_multiples", f"{saves.multiples:,.0f}", label="Saves, input tokens")
            seconds = saves.prefill_seconds
            prefill = f"{seconds:,.1f} s" if seconds is not None else formats.NO_VALUE
            unknown = "a token's time is not known yet" if seconds is None else None
            parts.card("advice_prefill", prefill, label="Prefill saved", delta=unknown)
            shared = f"{stream.shared_tokens:,}"
            end = stream.shared_end or formats.NO_VALUE
            label = "Shared beginning, tokens"
            parts.card("advice_shared", shared, label=label, delta=f"up to {end}")
        if stream.next_best:
            st.text(stream.next_best)
        if stream.verdict != "prewarm":
            st.text(stream.prewarm.text)
        parts.request_links(stream.turns)
        draw_apply(session, stream)
    parts.heading("What breaks the prefix")
    draw_findings(stream.findings, "advice_findings", "Nothing breaks it.")
    parts.heading("Ways to place the markers")
    ttls = formats.ttls_written(outcome.writes for outcome in stream.outcomes)
    rows = [
        {
            "Markers": WAYS.get(outcome.name, outcome.name),
            "Cost ($)": in_dollars(outcome.nano),
            "Cost (input tokens)": round(outcome.multiples),
            "Read": outcome.cache_read_tokens,
            **{f"Written {ttl}": outcome.writes[ttl] for ttl in ttls},
            "Input": outcome.input_tokens,
            "Requests with a read": outcome.requests_with_read,
        }
        for outcome in stream.outcomes
    ]
    parts.table(rows, "advice_ways", "What each way to place markers would have cost.")


def by_change(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Group the findings that ask for the same change of the same block. Near-duplicates of
    different workspaces or models stay apart. Groups and findings keep their order."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        group: tuple[str, ...] = (finding.path, finding.kind, finding.change)
        if isinstance(finding, NearDuplicate):
            group = (*group, finding.workspace, finding.model)
        groups.setdefault(group, []).append(finding)
    return list(groups.values())


def draw_finding(finding: Finding, key: str) -> None:
    with st.container(border=True, key=key):
        st.text(f"{finding.path}: {finding.text} {finding.change}")
        facts: list[str] = []
        if finding.tokens:
            facts.append(formats.counted(finding.tokens, "token"))
        if finding.nano:
            facts.append(f"worth {formats.dollars(finding.nano)}")
        if finding.num_turns:
            facts.append(formats.counted(finding.num_turns, "request"))
        if facts:
            st.text(" · ".join(facts))
        parts.request_links([turn for turn in finding.turns if turn.startswith("msg_")])


def draw_findings(findings: Sequence[Finding], key: str, none: str) -> None:
    """Draw the first finding of each change in full, and the other findings of that change behind a
    click. If there is no finding, draw the text `none`."""
    if not findings:
        parts.empty(none, ":material/check_circle:")
        return
    for number, (first, *others) in enumerate(by_change(findings)):
        draw_finding(first, f"{key}_{number}")
        if others:
            count = formats.counted(len(others), "more like it", "more like it")
            worth = sum(finding.nano or 0 for finding in others)
            label = f"{count}, worth {formats.dollars(worth)}" if worth else count
            with st.expander(label, key=f"{key}_{number}_more"):
                for place, finding in enumerate(others):
                    draw_finding(finding, f"{key}_{number}_{place}")
    rows = [
        {
            "Block": finding.path,
            "What": finding.text,
            "What to change": finding.change,
            "Tokens": finding.tokens,
            "Worth ($)": in_dollars(finding.nano),
            "Requests": finding.num_turns or None,
            "From": ", ".join(finding.turns),
        }
        for finding in findings
    ]
    parts.as_download(rows, key)


def draw_apply(session: Session, stream: StreamAdvice) -> None:
    policy = stream.policy
    if policy is None:
        if stream.markers:
            st.caption("Mark these blocks in the request; a pasted request shows how.")
        return
    ttl = policy.auto_cache_ttl
    ttl_words = f", {ttl}" if ttl else ""
    st.text(f"The key's policy does the same: auto_cache {policy.auto_cache}{ttl_words}.")
    if viewer.may_change() and st.button(
        "Set this policy for the key", key="advice_apply", icon=":material/tune:"
    ):
        body: dict[str, Any] = {"auto_cache": policy.auto_cache}
        if ttl:
            body["auto_cache_ttl"] = ttl
        path = f"/admin/v1/keys/{segment(stream.key)}"
        session.client.change("POST", path, dict[str, Any], body)
        st.success("The policy is set. Requests without markers follow it from now on.")


def draw_pasted(session: Session) -> None:
    first = _pasted_text("A JSON body or a curl command, of any API", 0, height=220)
    second = _pasted_text("A second one to compare it with (optional)", 1, height=120)
    texts = [text for text in (first, second) if text.strip()]
    if not st.button("Advise", key="advise", type="primary", disabled=not texts):
        return
    report = session.client.ask(PATH, AdviceReport, {"requests": texts})
    st.caption(report.text)
    for number, advice in enumerate(report.requests):
        parts.heading(f"Request {number + 1}")
        st.caption(f"About {formats.counted(advice.tokens, 'token')}.")
        model = advice.body.get("model")
        listed = viewer.about(session).listed
        parts.unseen_images(advice.num_images, model if isinstance(model, str) else None, listed)
        draw_findings(advice.findings, f"pasted_{number}", "Nothing to change.")
        if advice.marked is not None:
            with st.expander("The request with the markers in place"):
                st.code(json.dumps(advice.marked, indent=2, ensure_ascii=False), language=None)
    for stream in report.streams:
        parts.heading("Compared with each other")
        none = "Nothing breaks their shared beginning."
        draw_findings(stream.findings, "pasted_compared", none)
        draw_findings(report.near_duplicates, "pasted_near", "They are not nearly the same.")


def _pasted_text(label: str, number: int, *, height: int) -> str:
    return st.text_area(
        label,
        key=f"advice_pasted_{number}",
        height=height,
        max_chars=MAX_CHARACTERS,
        placeholder="curl … -d '{\"messages\": […]}'",
    )


if __name__ == "__main__":
    parts.title("Advice", "Which markers would pay, and what breaks them?")
    mode = st.segmented_control(
        "Look at", [_RANGE, _PASTED], default=_RANGE, key="advice_mode", required=True
    )
    with parts.problems_told():
        session = viewer.session()
        if mode == _PASTED:
            draw_pasted(session)
        else:
            draw_range(session)
