"""The playground: what does a marker here do?

It sends requests as any client does. A workspace's viewer sends with the viewer's own key. An admin
picks a workspace. At the admin's first send the admin API makes a key of that workspace, named
`playground`, which works for an hour. That key never leaves this process. Typed text is shown as
plain text.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, cast

import altair as alt
import msgspec
import streamlit as st

from dashboard import prompt
from dashboard.access.sessions import Session
from dashboard.client import AdminClient, ClientError, NotThere, Refused, segment
from dashboard.prompt import Answer, Block, Kind, ModelRequest, NotBlocks
from dashboard.settings import settings
from dashboard.ui import charts, formats, parts, viewer
from dashboard.ui.charts import Row
from dashboard.views.advice import MAX_CHARACTERS, PATH
from gateway.structs.advice import AdviceReport, RequestAdvice
from gateway.structs.fleet import About, ListedModel, MadeKey, Workspace
from gateway.structs.usage import Turn

KEY_SECONDS = 3600
MAX_BLOCK_CHARACTERS = 200_000
# The demo model knows only about caching.
HANDBOOK = (
    "You answer questions about a cache of prompts. A lease holds the blocks of a marked prefix in"
    " memory until its time is over. Each read of the entry starts its time again. What nobody"
    " marked makes room for others when memory is short. "
)
RULES = "Answer in one short sentence. If you do not know, say so. "
QUESTION = "What is a lease?"
TOOL = {
    "name": "log_ship",
    "description": "Write a ship into the book.",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}},
}
_BLOCKS = "Blocks"
_PASTED = "JSON or curl"
# Names of the session's fields.
_ACTING = "acting_as"
_SENT = "playground_sent"
_READ = "playground_read"
_ORDER = "playground_blocks"
_TEXT = "playground_pasted"
_NEXT_MODE = "playground_next_mode"
_NAMES: dict[str | None, str] = {ttl: name for name, ttl in prompt.TTLS.items()}
_PREVIEW = 240
"""How many characters of a block's text are shown."""
_LEDGER_SECONDS = 8.0
"""How long the page waits for a turn's row in the ledger."""
# A colour for each class of tokens. Those of writes are in the order of TTLs, the shortest first.
_COLOURS = ["green", "yellow", "orange", "red", "violet", "blue", "gray"]
_BADGES: dict[str, Any] = dict(zip(prompt.CLASSES, _COLOURS, strict=True))
_GAINS = {
    "sampled_first_token": "Time to first token",
    "cache_read_tokens": "Read from cache",
    "actual_nano": "Cost",
}
"""The three numbers that a second send changes, with the titles of their cards."""


class ActingClient(NamedTuple):
    """The client with which an admin sends as a workspace."""

    workspace: str
    client: AdminClient
    # When another key must be made, in seconds of the monotonic clock.
    ends: float


class SentRequest(NamedTuple):
    """One request that was sent."""

    request: ModelRequest
    # The request's blocks, in the order of the prompt. There are none if it has more than text and
    # tools.
    blocks: list[Block]
    answer: Answer
    # The request's turn; None if the ledger does not have it.
    turn: Turn | None
    # The turn of the first send of this request.
    first: Turn | None
    # How many times the request was sent, this time included.
    number: int


class PastedRequest(NamedTuple):
    """A pasted text, and how the gateway reads it."""

    text: str
    # The dialect that was chosen; None: the gateway recognises it.
    dialect: str | None
    advice: RequestAdvice


def acting_workspace(session: Session) -> str | None:
    """The workspace that sends: the viewer's own, or the one that an admin picks. None until an
    admin has picked one. Raise ClientError if the gateway does not list workspaces."""
    if session.workspace is not None:
        return session.workspace
    workspaces = session.client.get("/admin/v1/workspaces", list[Workspace])
    names = [workspace.id for workspace in workspaces if workspace.archived_at is None]
    return st.selectbox(
        "Act as the workspace",
        names,
        # If there is only one workspace, it is picked already.
        index=0 if len(names) == 1 else None,
        key="act_as",
        placeholder="Pick a workspace",
        help="Turns count as that workspace's own. The first send makes a key of it for an hour,"
        " under the name playground.",
    )


def sender(session: Session, workspace: str) -> AdminClient:
    """The client that sends: the viewer's own, or one with a key of that workspace. Raise
    ClientError if no key could be made."""
    if session.workspace is not None:
        return session.client
    acting: ActingClient | None = st.session_state.get(_ACTING)
    if acting is not None and acting.workspace == workspace and acting.ends > time.monotonic():
        return acting.client
    if acting is not None:
        acting.client.close()
    ends_at = datetime.now(UTC) + timedelta(seconds=KEY_SECONDS)
    body = {"workspace": workspace, "name": "playground", "expires_at": ends_at.isoformat()}
    new_key = session.client.change("POST", "/admin/v1/keys", MadeKey, body)
    client = AdminClient(settings().gateway_url, new_key.key)
    # Another key is made a minute before this one ends.
    ends = time.monotonic() + KEY_SECONDS - 60
    st.session_state[_ACTING] = ActingClient(workspace, client, ends)
    return client


def model_names(listed: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The label of each id of `/v1/models`. That of an alias says what the alias stands for."""
    names = dict[str, str]()
    for entry in listed:
        model_id = str(entry.get("id"))
        root = entry.get("root")
        is_alias = root is not None and entry.get("parent") is None
        names[model_id] = f"{model_id} (alias of {root})" if is_alias else model_id
    return names


def draw_session(session: Session) -> None:
    workspace = acting_workspace(session)
    if workspace is None:
        parts.empty(
            "Pick the workspace that sends: an admin key has no workspace of its own.",
            ":material/badge:",
        )
        return
    about = session.client.get("/admin/v1/about", About)
    models = model_names([msgspec.structs.asdict(entry) for entry in about.listed])
    if not models:
        parts.empty("No engine serves a model.", ":material/dns:")
        return
    next_mode = st.session_state.pop(_NEXT_MODE, None)
    if next_mode is not None:
        st.session_state["playground_mode"] = next_mode
    top = st.container()
    left, right = st.columns(2, gap="large")
    with left:
        with st.container(horizontal=True, vertical_alignment="bottom"):
            model = st.selectbox(
                "Model",
                list(models),
                key="playground_model",
                width=320,
                format_func=models.__getitem__,
            )
            longest = st.number_input(
                "Longest answer (tokens)", 1, 4096, 64, key="max_tokens", width=190
            )
        mode = st.segmented_control(
            "Write it as", [_BLOCKS, _PASTED], default=_BLOCKS, key="playground_mode", required=True
        )
        if mode == _PASTED:
            request, blocks = draw_pasted(session.client, model, about.listed)
        else:
            request, blocks = draw_blocks(model, int(longest))
        is_sent = st.button(
            "Send", key="send", type="primary", width="stretch", disabled=request is None
        )
        if request is not None:
            draw_code(request, model)
    with right:
        if is_sent and request is not None:
            send(session, workspace, request, blocks, model)
        draw_sent()
    with top:
        draw_sentence(st.session_state.get(_SENT))


def draw_code(request: ModelRequest, model: str) -> None:
    """Draw the request as a curl command and as a Python program."""
    url = settings().gateway_url
    path = request.path(model)
    with st.expander("Copy as curl or Python", icon=":material/content_copy:"):
        curl_tab, python_tab = st.tabs(["curl", "Python"])
        # The code is plain: the colours of highlighted code can't be read on every ground.
        curl_tab.code(prompt.curl(url, path, request.body), language=None, height=220)
        python_tab.code(prompt.python(url, path, request.body), language=None, height=220)


def draw_sentence(sent: SentRequest | None) -> None:
    """Draw the page's sentence: what to do next, or what the second send gained."""
    if sent is None or sent.turn is None:
        parts.hero("**Send it twice**: the second send reads what the first one wrote.")
    elif sent.number == 1 or sent.first is None:
        parts.hero("**Send it once more**: the second send is compared with this first one.")
    else:
        parts.hero(prompt.gained(sent.first, sent.turn))


def draw_blocks(model: str, longest: int) -> tuple[ModelRequest | None, list[Block]]:
    """Draw the blocks of the prompt. Return the request and its blocks in order. If they can't be
    sent, return None and no block.

    A block's widgets are named after the block's number. The number stays the same when the block
    moves.
    """
    order = _order()
    # Streamlit forgets the value of a widget that is not drawn. Setting the value again keeps it.
    for number, _ in order:
        for name in (f"block_text_{number}", f"block_ttl_{number}"):
            if name in st.session_state:
                st.session_state[name] = st.session_state[name]
    for place, (number, kind) in enumerate(order):
        with st.container(border=True, key=f"block_{number}"):
            _draw_block(place, number, kind, len(order))
    if len(order) >= prompt.MAX_BLOCKS:
        st.caption(f"At most {prompt.MAX_BLOCKS} blocks. Paste a longer request as JSON.")
    else:
        with st.container(horizontal=True, key="add_blocks"):
            for kind in prompt.KINDS:
                text = json.dumps(TOOL, indent=2) if kind == "tool" else ""
                st.button(
                    f"Add {kind}",
                    key=f"add_{kind}",
                    icon=":material/add:",
                    on_click=_add,
                    args=(Block(kind, text),),
                )
    state = st.session_state
    blocks = [
        Block(
            kind,
            str(state.get(f"block_text_{number}", "")),
            prompt.TTLS[state.get(f"block_ttl_{number}") or "No marker"],
        )
        for number, kind in order
    ]
    try:
        request = ModelRequest("messages", prompt.body_of(blocks, model, longest))
    except ValueError as error:
        parts.problem("This can't be sent:", str(error), ":material/data_object:")
        return None, []
    return request, prompt.in_order(blocks)


def _draw_block(place: int, number: int, kind: Kind, num_blocks: int) -> None:
    """Draw one block's text, marker and buttons. The block stands at `place`, counted from 0."""
    label = f"{place + 1}. {kind.capitalize()}"
    st.text_area(label, key=f"block_text_{number}", height=110, max_chars=MAX_BLOCK_CHARACTERS)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.segmented_control(
            f"Marker at the end of block {place + 1}",
            list(prompt.TTLS),
            key=f"block_ttl_{number}",
            required=True,
        )
        st.button(
            ":material/arrow_upward:",
            key=f"move_up_{number}",
            help=f"Move block {place + 1} up",
            disabled=place == 0,
            on_click=_move,
            args=(place, place - 1),
        )
        st.button(
            ":material/arrow_downward:",
            key=f"move_down_{number}",
            help=f"Move block {place + 1} down",
            disabled=place == num_blocks - 1,
            on_click=_move,
            args=(place, place + 1),
        )
        st.button(
            ":material/delete:",
            key=f"drop_{number}",
            help=f"Take block {place + 1} out",
            on_click=_take_out,
            args=(place,),
        )


def _order() -> list[tuple[int, Kind]]:
    """The number and kind of each block, from the top to the bottom of the page."""
    if _ORDER not in st.session_state:
        _replace(
            [
                Block("system", HANDBOOK * 24, "1h"),
                Block("system", RULES * 8, "5m"),
                Block("user", QUESTION),
            ]
        )
    return cast("list[tuple[int, Kind]]", st.session_state[_ORDER])


def _replace(blocks: list[Block]) -> None:
    """Begin anew with these blocks."""
    st.session_state[_ORDER] = []
    for block in blocks:
        _add(block)


def _add(block: Block) -> None:
    state = st.session_state
    number = state.get("playground_count", 0) + 1
    state["playground_count"] = number
    state[f"block_text_{number}"] = block.text
    state[f"block_ttl_{number}"] = _NAMES.get(block.ttl, _NAMES["5m"])
    state[_ORDER] = [*state[_ORDER], (number, block.kind)]


def _move(place: int, new_place: int) -> None:
    order = list(_order())
    order.insert(new_place, order.pop(place))
    st.session_state[_ORDER] = order


def _take_out(place: int) -> None:
    order = list(_order())
    del order[place]
    st.session_state[_ORDER] = order


def draw_pasted(
    client: AdminClient, model: str, listed: Sequence[ListedModel]
) -> tuple[ModelRequest | None, list[Block]]:
    """Draw the field for a request of any dialect. Return the request and its blocks.

    The request is None if nothing is pasted yet, or if the gateway refuses it. There are no blocks
    if the request has more than text and tools.
    """
    dialect = st.selectbox(
        "API",
        [None, *prompt.DIALECTS],
        format_func=lambda name: prompt.DIALECTS.get(name, "recognised from what is pasted"),
        key="pasted_dialect",
    )
    text = st.text_area(
        "A JSON body, or a curl command, of any API",
        key=_TEXT,
        height=320,
        max_chars=MAX_CHARACTERS,
        placeholder="curl … -d '{\"messages\": […]}'",
    )
    if not text.strip():
        return None, []
    pasted: PastedRequest | None = st.session_state.get(_READ)
    if pasted is None or (pasted.text, pasted.dialect) != (text, dialect):
        body = {"requests": [text], "dialect": dialect}
        try:
            report = client.ask(PATH, AdviceReport, body)
        except Refused as error:
            parts.problem("This body would be refused:", str(error), ":material/data_object:")
            return None, []
        pasted = PastedRequest(text, dialect, report.requests[0])
        st.session_state[_READ] = pasted
    advice = pasted.advice
    name = prompt.DIALECTS.get(advice.dialect, advice.dialect)
    st.caption(f"{name}, sent as one answer to the model chosen above.")
    parts.unseen_images(advice.num_images, model, listed)
    blocks = []
    obstacle = "images, calls or results of tools"
    try:
        blocks = prompt.blocks_of(advice.as_messages) if advice.as_messages is not None else []
    except NotBlocks as error:
        obstacle = str(error)
    if st.button("Take it apart into blocks", key="take_apart"):
        if not blocks:
            st.warning("It stays as it is: blocks show text and tools, and it has")
            st.text(obstacle)
        else:
            # From here on it is a request of the Messages API. Its blocks can be moved and marked.
            _replace(blocks)
            st.session_state[_NEXT_MODE] = _BLOCKS
            st.rerun()
    return ModelRequest(advice.dialect, advice.body).for_model(model), blocks


def send(
    session: Session, workspace: str, request: ModelRequest, blocks: list[Block], model: str
) -> None:
    """Send the request, and look its turn up in the ledger. The session then has both."""
    answer = Answer()
    turn_id = None
    place = st.empty()
    try:
        client = sender(session, workspace)
        if request.dialect == "messages":
            headers = {"anthropic-version": "2023-06-01"}
            lines = client.stream(request.path(model), {**request.body, "stream": True}, headers)
            for _ in prompt.follow(lines, answer):
                place.text(answer.text)
            turn_id = answer.id
        else:
            with place, st.spinner("The model answers …"):
                body, turn_id = client.call(request.path(model), request.body)
            answer.text = prompt.text_of(request.dialect, body)
    except ClientError as error:
        answer.problem = str(error)
    place.empty()
    turn = None if turn_id is None else _recorded(session.client, turn_id)
    last_sent: SentRequest | None = st.session_state.get(_SENT)
    if last_sent is not None and last_sent.request == request:
        first = last_sent.first or last_sent.turn
        number = last_sent.number + 1
    else:
        first = None
        number = 1
    st.session_state[_SENT] = SentRequest(request, blocks, answer, turn, first or turn, number)


def _recorded(client: AdminClient, turn_id: str) -> Turn | None:
    """The turn, once the ledger has it, which is a moment after the answer. None if the ledger does
    not have it in time."""
    deadline = time.monotonic() + _LEDGER_SECONDS
    while time.monotonic() < deadline:
        try:
            return client.get(f"/admin/v1/turns/{segment(turn_id)}", Turn, kept_seconds=0.0)
        except NotThere:
            time.sleep(0.2)
        except ClientError:
            return None
    return None


def draw_sent() -> None:
    sent: SentRequest | None = st.session_state.get(_SENT)
    if sent is None:
        parts.heading("Answer")
        parts.empty(
            "Send it twice: the second time shows what the first one wrote.",
            ":material/play_circle:",
        )
        return
    if sent.answer.problem is not None:
        parts.problem("The turn failed:", sent.answer.problem, ":material/power_off:")
    if sent.turn is not None:
        draw_gains(sent.turn, sent.first if sent.number > 1 else None)
    if sent.answer.text or sent.answer.problem is None:
        parts.heading("Answer")
        st.text(sent.answer.text or formats.NO_VALUE)
    if sent.answer.text and st.session_state.get("playground_mode") == _BLOCKS:
        st.button(
            "Carry on the conversation",
            key="carry_on",
            icon=":material/forum:",
            on_click=_carry_on,
            args=(sent.answer.text,),
        )
    if sent.turn is not None:
        draw_parts(sent, prompt.counts_of(sent.turn))
        parts.request_links([sent.turn.id])
    elif sent.answer.problem is None:
        st.caption("The ledger does not say yet what became of the prompt.")


def draw_gains(turn: Turn, first: Turn | None) -> None:
    """Draw cards of the numbers that a second send changes, each beside the number of the first
    send. `first` is None if `turn` is the first send."""
    values = gain_values(turn)
    first_values = {} if first is None else gain_values(first)
    with st.grid(3, min_column_width=150):
        for number, label in _GAINS.items():
            note = f"first send: {first_values[number]}" if first_values else "first send"
            parts.card(number, values[number], label=label, delta=note)


def gain_values(turn: Turn) -> dict[str, str]:
    """The numbers of `_GAINS` in words."""
    return {
        "sampled_first_token": formats.seconds(turn.first_token_seconds),
        "cache_read_tokens": formats.whole(turn.cache_read_tokens),
        "actual_nano": formats.dollars(turn.cost_nano),
    }


def _carry_on(answer: str) -> None:
    """Add the answer behind the blocks, and behind it an empty block for the next question."""
    _add(Block("assistant", answer))
    _add(Block("user", ""))


def draw_parts(sent: SentRequest, counts: dict[str, int]) -> None:
    parts.heading("What became of the prompt")
    spans = prompt.prompt_spans(counts)
    summary = ", ".join(f"{span['tokens']:,} {span['class'].lower()}" for span in spans)
    total = sum(counts.values())
    classes = (span["class"] for span in spans)
    colours = charts.with_tokens(charts.TOKENS[viewer.theme()], classes)
    drawn = (
        alt.Chart(charts.frame(spans))
        .mark_bar(size=40)
        .encode(
            x=alt.X(
                "start:Q",
                title="Prompt (tokens)",
                axis=alt.Axis(format=",d", tickMinStep=1, tickCount=6, grid=False),
                scale=alt.Scale(domain=[0, max(total, 1)], nice=False),
            ),
            x2=alt.X2("end:Q"),
            color=charts.colour("class:N", colours, 2, sort=None),
            tooltip=charts.tips("class:N=Class", "tokens:Q=Tokens|,"),
        )
        .properties(height=200)
    )
    parts.chart(drawn, "ribbon", f"Prompt tokens: {summary}.")
    if not sent.blocks:
        return
    rows = prompt.part_rows(sent.blocks, counts, sent.answer.ends)
    for number, row in enumerate(rows):
        with st.container(border=True, key=f"piece_{number}"):
            _draw_part(row)
    parts.heading("Had the last marker stood elsewhere")
    alt_text = "What a second send would do, by the block that ends with the last marker."
    st.caption(alt_text)
    parts.table(prompt.elsewhere_rows(rows), "elsewhere", alt_text)


def _draw_part(row: Row) -> None:
    """Draw one part of the prompt: its name, its tokens by class, and the beginning of its text."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.text(row["part"].name)
        for name in prompt.CLASSES:
            if row.get(name):
                precision = "" if row["is_exact"] else "about "
                st.badge(f"{precision}{row[name]:,} {name.lower()}", color=_BADGES[name])
    text = row["part"].text
    st.text(text[:_PREVIEW] + ("…" if len(text) > _PREVIEW else ""))


def draw() -> None:
    session = viewer.session()
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
    with parts.problems_told():
        draw_session(session)


if __name__ == "__main__":
    parts.title("Playground", "Try a prompt and see what is cached")
    draw()
