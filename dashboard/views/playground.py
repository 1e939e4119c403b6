"""The playground: what does a breakpoint here do?

It sends with the viewer's own key, as any client does. Typed text is shown as plain text.
"""

from typing import Any

import streamlit as st

from dashboard.admin.client import AdminClient, ClientError
from dashboard.charts.prompt import ribbon_chart
from dashboard.playground.answer import PlaygroundAnswer, follow
from dashboard.playground.prompt import TTLS, VERSION_HEADERS, PromptPart, request_body
from dashboard.playground.spans import CLASSES, part_rows, prompt_spans
from dashboard.ui import formats, parts, viewer
from dashboard.ui.colours import TOKENS

HANDBOOK = (
    "You keep the lighthouse. The lamp is lit at dusk and put out at dawn. In fog the horn sounds"
    " every thirty seconds. Ships are greeted by name, and their positions are written into the"
    " book together with wind, visibility and the state of the sea. "
)
RULES = "Answer in one short sentence. If you do not know, say so. "
QUESTION = "What is done in fog?"
_ANSWER = "playground_answer"
_PREVIEW = 240


def draw_prompt() -> tuple[list[PromptPart], int]:
    """The three parts of a prompt, each with the marker at its end."""
    found = []
    texts = (
        ("Handbook (system)", HANDBOOK * 24, 150, "1 hour"),
        ("Rules (system)", RULES * 8, 100, "5 minutes"),
        ("Question (user)", QUESTION, 68, "No marker"),
    )
    for number, (name, text, height, marker) in enumerate(texts):
        written = st.text_area(name, text, key=f"part_{number}", height=height, max_chars=60_000)
        ttl = st.segmented_control(
            f"Breakpoint at the end of: {name}",
            list(TTLS),
            default=marker,
            key=f"marker_{number}",
            required=True,
        )
        found.append(PromptPart(name, written, TTLS[ttl or "No marker"]))
    longest = st.number_input("Longest answer (tokens)", 1, 1024, 64, key="max_tokens")
    return found, int(longest)


def models(client: AdminClient) -> list[str]:
    listing = client.get("/v1/models", dict[str, Any])
    return [str(each.get("id")) for each in listing.get("data", [])]


def draw_sending(client: AdminClient) -> None:
    left, right = st.columns(2, gap="large")
    with left:
        known = models(client)
        if not known:
            parts.empty("No engine serves a model.", ":material/dns:")
            return
        model = st.selectbox("Model", known, key="playground_model")
        prompt, longest = draw_prompt()
        sends = st.button("Send", key="send", type="primary", width="stretch")
    with right:
        parts.heading("Answer")
        if sends:
            st.session_state[_ANSWER] = prompt, send(client, model, prompt, longest)
        elif _ANSWER in st.session_state:
            st.text(st.session_state[_ANSWER][1].text or formats.NO_VALUE)
        else:
            parts.empty(
                "Send it twice: the second time shows what the first one wrote.",
                ":material/play_circle:",
            )
        if _ANSWER in st.session_state:
            draw_usage(*st.session_state[_ANSWER])


def send(
    client: AdminClient, model: str, prompt: list[PromptPart], longest: int
) -> PlaygroundAnswer:
    """Stream the answer as it comes."""
    answer, place = PlaygroundAnswer(), st.empty()
    body = request_body(model, prompt[:-1], prompt[-1], longest)
    try:
        for _ in follow(client.stream("/v1/messages", body, VERSION_HEADERS), answer):
            place.text(answer.text)
    except ClientError as error:
        answer.problem = str(error)
    place.text(answer.text or formats.NO_VALUE)
    return answer


def draw_usage(prompt: list[PromptPart], answer: PlaygroundAnswer) -> None:
    if answer.problem is not None:
        st.error("The turn failed:", icon=":material/power_off:")
        st.text(answer.problem)
    message = answer.message
    if message is None:
        return
    parts.heading("What became of the prompt")
    spans = prompt_spans(message.usage)
    told = ", ".join(f"{span['tokens']:,} {span['class'].lower()}" for span in spans)
    parts.chart(ribbon_chart(spans, TOKENS[viewer.theme()]), "ribbon", f"Prompt tokens: {told}.")
    for number, row in enumerate(part_rows(prompt, message)):
        with st.container(border=True, key=f"piece_{number}"):
            with st.container(horizontal=True, vertical_alignment="center"):
                st.text(row["part"].name)
                for name in CLASSES:
                    if row.get(name):
                        about = "" if row["is_exact"] else "about "
                        st.badge(f"{about}{row[name]:,} {name.lower()}", color=_COLOURS[name])
            text = row["part"].text
            st.text(text[:_PREVIEW] + ("…" if len(text) > _PREVIEW else ""))
    found = message.holdfast
    if found is not None:
        facts = [("Engine", found.engine), ("Computed tokens", f"{found.computed_tokens:,}")]
        facts += [("Reused unmarked", f"{found.automatic_tokens:,}")]
        facts += [("Why the last marker missed", found.miss_reason or "it did not")]
        facts += [("Output tokens", f"{answer.output_tokens:,}"), ("Request", message.id)]
        parts.table(
            [{"What": name, "Value": value} for name, value in facts],
            "facts",
            alt_text="What the engine said of this request.",
        )


_COLOURS: dict[str, Any] = {
    "Read from cache": "green",
    "Written, 5 minutes": "yellow",
    "Written, 1 hour": "orange",
    "Uncached": "gray",
}


def page() -> None:
    parts.title("Playground", "What does a breakpoint here do?")
    session = viewer.session()
    if session is None:
        return
    if session.about.sample:
        parts.empty(
            "On sample data no turn is served: start a gateway on a real database.",
            ":material/science:",
        )
        return
    if not session.about.may_send:
        parts.empty(
            "This key can't send prompts. Sign in with a workspace's key of scope inference.",
            ":material/key:",
        )
        return
    try:
        draw_sending(session.client)
    except ClientError as error:
        st.error(str(error), icon=":material/power_off:")


page()
