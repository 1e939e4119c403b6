"""The playground: what does a marker here do?

It sends with the viewer's own key, or as the workspace that an admin picks, as any client does.
Typed text is shown as plain text.
"""

from typing import Any

import streamlit as st

from dashboard.admin.client import AdminClient, ClientError, Refused
from dashboard.playground import copy_as, paste
from dashboard.playground.blocks import Block, NotBlocks, body_of, in_order
from dashboard.playground.dialects import blocks_of_any
from dashboard.playground.paste import Pasted, Unreadable
from dashboard.settings import settings
from dashboard.ui import acting, compose, parts, sending, viewer

_BLOCKS, _PASTED = "Blocks", "JSON or curl"


def draw_request(client: AdminClient, known: list[str]) -> Pasted | None:
    """What is sent next; None where it can't be read."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        model = st.selectbox("Model", known, key="playground_model", width=220)
        longest = st.number_input(
            "Longest answer (tokens)", 1, 4096, 64, key="max_tokens", width=190
        )
    mode = st.segmented_control(
        "Write it as", [_BLOCKS, _PASTED], default=_BLOCKS, key="playground_mode", required=True
    )
    if mode == _PASTED:
        return draw_pasted(model or "")
    compose.draw()
    try:
        return Pasted("messages", body_of(compose.blocks(), model or "", int(longest)))
    except ValueError as error:
        st.error("This can't be sent:", icon=":material/data_object:")
        st.text(str(error))
        return None


def draw_pasted(model: str) -> Pasted | None:
    dialects: list[Any] = [None, *paste.NAMES]
    dialect = st.selectbox(
        "API",
        dialects,
        format_func=lambda each: "told from what is pasted" if each is None else paste.NAMES[each],
        key="pasted_dialect",
    )
    text = st.text_area(
        "A JSON body, or a curl command, of any API",
        key=compose.PASTED,
        height=320,
        max_chars=paste.MAX_CHARACTERS,
        placeholder="curl … -d '{\"messages\": […]}'",
    )
    if not text.strip():
        return None
    try:
        pasted = paste.read(text, dialect)
    except Unreadable as error:
        st.error("This is no request:", icon=":material/data_object:")
        st.text(str(error))
        return None
    st.caption(f"{paste.NAMES[pasted.dialect]}, sent as one answer to the model chosen above.")
    if st.button("Take it apart into blocks", key="take_apart"):
        take_apart(pasted)
    return Pasted(pasted.dialect, pasted.to_send(model))


def take_apart(pasted: Pasted) -> None:
    """Go on with blocks that can be moved and marked: a request of the Messages API."""
    try:
        compose.replace(blocks_of_any(pasted))
    except NotBlocks as error:
        st.warning("It stays as it is: blocks show text and tools, and it has")
        st.text(str(error))
        return
    st.session_state[compose.NEXT_MODE] = _BLOCKS
    st.rerun()


def own_blocks(asked: Pasted) -> list[Block]:
    """The blocks of what is sent, to show what became of each; none where it has other content."""
    if _is_blocks():
        return [block for block in in_order(compose.blocks()) if block.text.strip()]
    try:
        return blocks_of_any(asked)
    except NotBlocks:
        return []


def draw_sending(client: AdminClient) -> None:
    known = models(client)
    if not known:
        parts.empty("No engine serves a model.", ":material/dns:")
        return
    if (mode := st.session_state.pop(compose.NEXT_MODE, None)) is not None:
        st.session_state["playground_mode"] = mode
    top = st.container()
    left, right = st.columns(2, gap="large")
    with left:
        asked = draw_request(client, known)
        sends = st.button(
            "Send", key="send", type="primary", width="stretch", disabled=asked is None
        )
        if asked is not None:
            draw_copies(asked)
    with right:
        if sends and asked is not None:
            model = st.session_state["playground_model"]
            sending.send(client, asked, own_blocks(asked), model)
        sending.draw(_carry_on)
    with top:
        sending.draw_hero()


def _is_blocks() -> bool:
    return bool(st.session_state.get("playground_mode", _BLOCKS) == _BLOCKS)


def _carry_on(asked: Pasted, answer: str) -> None:
    """The next request: this one, its answer, and a place for the next question."""
    if _is_blocks():
        compose.carry_on(answer)
        return
    try:
        body = paste.carried_on(asked, answer, "…")
    except Unreadable:
        return
    compose.set_pasted(body)


def draw_copies(asked: Pasted) -> None:
    model = st.session_state.get("playground_model") or ""
    told = settings().gateway_url, asked.path(model), asked.body
    with st.expander("Copy as curl, Python or JavaScript", icon=":material/content_copy:"):
        writers = {
            "curl": copy_as.curl,
            "Python": copy_as.python,
            "JavaScript": copy_as.javascript,
        }
        for tab, write in zip(st.tabs(list(writers)), writers.values(), strict=True):
            with tab:
                # Plain: the colours of highlighted code can't be read on every ground.
                st.code(write(*told), language=None, height=220)


def models(client: AdminClient) -> list[str]:
    listing = client.get("/v1/models", dict[str, Any])
    return [str(each.get("id")) for each in listing.get("data", [])]


def page() -> None:
    parts.title("Playground", "What does a marker here do?")
    session = viewer.session()
    if session is None:
        return
    if session.about.sample:
        parts.empty(
            "On sample data no turn is served: start a gateway on a real database.",
            ":material/science:",
        )
        return
    if session.workspace is not None and not session.about.may_send:
        parts.empty(
            "This key can't send prompts. Sign in with a workspace's key of scope inference.",
            ":material/key:",
        )
        return
    try:
        client = acting.sender(session)
        if client is None:
            parts.empty(
                "Pick the workspace whose turn it will be: an admin key has none of its own.",
                ":material/badge:",
            )
            return
        draw_sending(client)
    except Refused as error:
        st.error("The gateway refuses that:", icon=":material/block:")
        st.text(str(error))
    except ClientError as error:
        st.error(str(error), icon=":material/power_off:")


page()
