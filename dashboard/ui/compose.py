"""The blocks of the playground's prompt: added, moved, marked and filled in.

A block's widgets are named after its number, which stays with it when it moves.
"""

import json
from typing import Any, cast

import streamlit as st

from dashboard.playground.blocks import KINDS, MAX_BLOCKS, TTLS, Block, Kind

HANDBOOK = (
    "You keep the lighthouse. The lamp is lit at dusk and put out at dawn. In fog the horn sounds"
    " every thirty seconds. Ships are greeted by name, and their positions are written into the"
    " book together with wind, visibility and the state of the sea. "
)
RULES = "Answer in one short sentence. If you do not know, say so. "
QUESTION = "What is done in fog?"
TOOL = {
    "name": "log_ship",
    "description": "Write a ship into the book.",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}},
}
PASTED = "playground_pasted"
NEXT_MODE = "playground_next_mode"
_ORDER = "playground_blocks"
_NAMES: dict[str | None, str] = {ttl: name for name, ttl in TTLS.items()}
MAX_CHARACTERS = 200_000


def blocks() -> list[Block]:
    """The blocks as they are filled in now, in their order."""
    state = st.session_state
    return [
        Block(
            kind,
            str(state.get(f"block_text_{number}", "")),
            TTLS[state.get(f"block_ttl_{number}") or "No marker"],
        )
        for number, kind in _order()
    ]


def _order() -> list[tuple[int, Kind]]:
    if _ORDER not in st.session_state:
        replace(
            [
                Block("system", HANDBOOK * 24, "1h"),
                Block("system", RULES * 8, "5m"),
                Block("user", QUESTION),
            ]
        )
    return cast("list[tuple[int, Kind]]", st.session_state[_ORDER])


def replace(found: list[Block]) -> None:
    """Begin anew with these blocks."""
    st.session_state[_ORDER] = []
    for block in found:
        _add(block)


def _add(block: Block) -> None:
    state = st.session_state
    number = state.get("playground_count", 0) + 1
    state["playground_count"] = number
    state[f"block_text_{number}"] = block.text
    state[f"block_ttl_{number}"] = _NAMES.get(block.ttl, "5 minutes")
    state[_ORDER] = [*state[_ORDER], (number, block.kind)]


def carry_on(answer: str) -> None:
    """The answer, and a place for the next question."""
    _add(Block("assistant", answer or "…"))
    _add(Block("user", ""))


def set_pasted(body: dict[str, Any]) -> None:
    st.session_state[PASTED] = json.dumps(body, indent=2, ensure_ascii=False)


def draw() -> None:
    order = _order()
    # What a widget shows is forgotten while it is not drawn, so it is put back.
    for number, _ in order:
        for name in (f"block_text_{number}", f"block_ttl_{number}"):
            if name in st.session_state:
                st.session_state[name] = st.session_state[name]
    for place, (number, kind) in enumerate(order):
        _draw_block(place, number, kind, len(order))
    if len(order) >= MAX_BLOCKS:
        st.caption(f"At most {MAX_BLOCKS} blocks. Paste a longer request as JSON.")
        return
    with st.container(horizontal=True, key="add_blocks"):
        for kind in KINDS:
            text = json.dumps(TOOL, indent=2) if kind == "tool" else ""
            st.button(
                f"Add {kind}",
                key=f"add_{kind}",
                icon=":material/add:",
                on_click=_add,
                args=(Block(kind, text),),
            )


def _draw_block(place: int, number: int, kind: Kind, count: int) -> None:
    with st.container(border=True, key=f"block_{number}"):
        label = f"{place + 1}. {kind.capitalize()}"
        st.text_area(label, key=f"block_text_{number}", height=110, max_chars=MAX_CHARACTERS)
        with st.container(horizontal=True, vertical_alignment="bottom"):
            st.segmented_control(
                f"Marker at the end of block {place + 1}",
                list(TTLS),
                key=f"block_ttl_{number}",
                required=True,
            )
            for icon, step, told in (
                (":material/arrow_upward:", -1, "up"),
                (":material/arrow_downward:", 1, "down"),
            ):
                st.button(
                    icon,
                    key=f"move_{told}_{number}",
                    help=f"Move block {place + 1} {told}",
                    disabled=not 0 <= place + step < count,
                    on_click=_move,
                    args=(place, step),
                )
            st.button(
                ":material/delete:",
                key=f"drop_{number}",
                help=f"Take block {place + 1} out",
                on_click=_drop,
                args=(place,),
            )


def _move(place: int, step: int) -> None:
    order = list(_order())
    order.insert(place + step, order.pop(place))
    st.session_state[_ORDER] = order


def _drop(place: int) -> None:
    st.session_state[_ORDER] = [each for at, each in enumerate(_order()) if at != place]
