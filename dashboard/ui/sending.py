"""Sending from the playground, and what became of it: big numbers first, beside the first send."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboard.admin.client import AdminClient, ClientError, NotThere, segment
from dashboard.admin.shapes.turns import Turn
from dashboard.charts.prompt import ribbon_chart
from dashboard.playground import paste
from dashboard.playground.answer import (
    Extension,
    Message,
    PlaygroundAnswer,
    TokenUsage,
    WrittenTokens,
    follow,
)
from dashboard.playground.blocks import Block
from dashboard.playground.gain import gained
from dashboard.playground.paste import Pasted
from dashboard.playground.spans import CLASSES, elsewhere_rows, part_rows, prompt_spans
from dashboard.ui import formats, parts, viewer
from dashboard.ui.advice import reason_title
from dashboard.ui.colours import TOKENS

VERSION_HEADERS = {"anthropic-version": "2023-06-01"}
_SENT = "playground_sent"
_PREVIEW = 240
_LEDGER_SECONDS = 8.0
_COLOURS: dict[str, Any] = {
    "Read from cache": "green",
    "Written, 5 minutes": "yellow",
    "Written, 1 hour": "orange",
    "Automatically reused": "blue",
    "Uncached": "gray",
}


@dataclass(frozen=True, slots=True)
class Sent:
    """One send. `turn` is what the ledger says of it; `first` the first send of this request."""

    asked: Pasted
    blocks: Sequence[Block]
    answer: PlaygroundAnswer
    turn: Turn | None
    first: Turn | None
    number: int


def send(client: AdminClient, asked: Pasted, blocks: Sequence[Block], model: str) -> None:
    """Send it, and look it up in the ledger."""
    answer, request_id = PlaygroundAnswer(), None
    place = st.empty()
    try:
        if asked.dialect == "messages":
            body = {**asked.body, "stream": True}
            for _ in follow(client.stream("/v1/messages", body, VERSION_HEADERS), answer):
                place.text(answer.text)
        else:
            with place, st.spinner("The model answers …"):
                whole, request_id = client.call(asked.path(model), asked.body, {})
            answer.text = paste.text_of(asked.dialect, whole)
    except ClientError as error:
        answer.problem = str(error)
    place.empty()
    wanted = answer.message.id if answer.message else request_id
    turn = None if wanted is None else _recorded(client, wanted)
    before: Sent | None = st.session_state.get(_SENT)
    is_same = before is not None and _digest(before.asked) == _digest(asked)
    first = (before.first or before.turn) if before is not None and is_same else None
    number = before.number + 1 if before is not None and is_same else 1
    st.session_state[_SENT] = Sent(asked, blocks, answer, turn, first or turn, number)


def _digest(asked: Pasted) -> str:
    written = json.dumps([asked.dialect, asked.body], sort_keys=True).encode()
    return hashlib.sha256(written).hexdigest()


def _recorded(client: AdminClient, wanted: str) -> Turn | None:
    """The turn, once the ledger has it: a moment after the answer."""
    deadline = time.monotonic() + _LEDGER_SECONDS
    while time.monotonic() < deadline:
        try:
            return client.get(f"/admin/v1/turns/{segment(wanted)}", Turn, kept_seconds=0.0)
        except NotThere:
            time.sleep(0.2)
        except ClientError:
            return None
    return None


def draw(carry_on: Callable[[Pasted, str], None]) -> None:
    sent: Sent | None = st.session_state.get(_SENT)
    if sent is None:
        parts.heading("Answer")
        parts.empty(
            "Send it twice: the second time shows what the first one wrote.",
            ":material/play_circle:",
        )
        return
    if sent.answer.problem is not None:
        st.error("The turn failed:", icon=":material/power_off:")
        st.text(sent.answer.problem)
    if sent.turn is not None:
        draw_numbers(sent.turn, sent.first if sent.number > 1 else None)
    parts.heading("Answer")
    st.text(sent.answer.text or formats.NO_VALUE)
    if sent.answer.text:
        st.button(
            "Carry on the conversation",
            key="carry_on",
            icon=":material/forum:",
            on_click=carry_on,
            args=(sent.asked, sent.answer.text),
        )
    draw_usage(sent)


def draw_hero() -> None:
    """What the second send gained over the first, in one sentence."""
    sent: Sent | None = st.session_state.get(_SENT)
    if sent is None or sent.turn is None:
        parts.hero("**Send it twice**: the second send reads what the first one wrote.")
    elif sent.number == 1 or sent.first is None:
        parts.hero("**Send it once more**: the second send is compared with this first one.")
    else:
        parts.hero(gained(sent.first, sent.turn))


def draw_numbers(turn: Turn, first: Turn | None) -> None:
    """The three numbers that a second send changes."""
    with st.grid(3, min_column_width=150, row_height=128):
        for number, label, value, before in (
            (
                "sampled_first_token",
                "Time to first token",
                formats.seconds(turn.first_token_seconds),
                first and formats.seconds(first.first_token_seconds),
            ),
            (
                "cache_read_tokens",
                "Read from cache",
                f"{turn.cache_read_tokens:,}",
                first and f"{first.cache_read_tokens:,}",
            ),
            (
                "actual_nano",
                "Cost",
                formats.dollars(turn.cost_nano),
                first and formats.dollars(first.cost_nano),
            ),
        ):
            told = "first send" if before is None else f"first send: {before}"
            parts.card(number, value, label=label, delta=told)


def _usage_of(sent: Sent) -> tuple[TokenUsage, int] | None:
    """The prompt's tokens by class: of the answer, or of the ledger where it has none."""
    message, turn = sent.answer.message, sent.turn
    if message is not None:
        return message.usage, message.holdfast.automatic_tokens if message.holdfast else 0
    if turn is None:
        return None
    written = WrittenTokens(turn.cache_write_5m_tokens, turn.cache_write_1h_tokens)
    usage = TokenUsage(
        input_tokens=turn.input_tokens,
        cache_read_input_tokens=turn.cache_read_tokens,
        cache_creation=written,
    )
    return usage, turn.automatic_tokens


def _message_of(sent: Sent, usage: TokenUsage, automatic_tokens: int) -> Message:
    """What the ledger knows of an answer that told no places of markers."""
    engine = (sent.turn.engine if sent.turn else None) or ""
    wanted = sent.turn.id if sent.turn else ""
    return Message(wanted, usage, Extension(engine, automatic_tokens))


def draw_usage(sent: Sent) -> None:
    found = _usage_of(sent)
    if found is None:
        return
    parts.heading("What became of the prompt")
    spans = prompt_spans(*found)
    told = ", ".join(f"{span['tokens']:,} {span['class'].lower()}" for span in spans)
    drawn = ribbon_chart(spans, TOKENS[viewer.theme()])
    parts.chart(drawn, "ribbon", f"Prompt tokens: {told}.")
    message = sent.answer.message or _message_of(sent, *found)
    if sent.blocks:
        for number, row in enumerate(part_rows(sent.blocks, message)):
            _draw_part(number, row)
        parts.heading("Had the last marker stood elsewhere")
        parts.table(
            elsewhere_rows(sent.blocks, message),
            "elsewhere",
            alt_text="What a second send would read, by the block that ends with the last marker.",
            columns={"Of the prompt": parts.share_column()},
        )
    draw_facts(sent)


def _draw_part(number: int, row: dict[str, Any]) -> None:
    with st.container(border=True, key=f"piece_{number}"):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.text(row["part"].name)
            for name in CLASSES:
                if row.get(name):
                    about = "" if row["is_exact"] else "about "
                    st.badge(f"{about}{row[name]:,} {name.lower()}", color=_COLOURS[name])
        text = row["part"].text
        st.text(text[:_PREVIEW] + ("…" if len(text) > _PREVIEW else ""))


def draw_facts(sent: Sent) -> None:
    turn = sent.turn
    if turn is None:
        return
    missed = "it did not" if turn.miss_reason is None else reason_title(turn.miss_reason)
    facts = [
        ("Engine", turn.engine),
        ("Computed tokens", f"{turn.computed_tokens:,}"),
        ("Reused unmarked", f"{turn.automatic_tokens:,}"),
        ("Why the last marker missed", missed),
        ("Output tokens", f"{turn.output_tokens:,}"),
        ("Request", turn.id),
        ("Request id", turn.http_request_id),
    ]
    parts.table(
        [{"What": name, "Value": value} for name, value in facts],
        "facts",
        alt_text="What the ledger says of this request.",
    )
