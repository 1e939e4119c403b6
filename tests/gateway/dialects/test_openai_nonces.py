"""The billing line of coding agents, as routers pass it on in Chat Completions."""

import json
from typing import Any

import pytest

from gateway.base.catalogue import Model
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache
from gateway.dialects.nonces import without_nonces
from gateway.dialects.openai.lower import chat_ask_of
from gateway.dialects.openai.request import decode_chat
from gateway.prompt.ask import Ask, Principal
from tests.gateway.conftest import Stack
from tests.gateway.dialects.test_nonces import LINES, NEAR
from tests.gateway.openai_bodies import EPHEMERAL, MODEL

USER = {"role": "user", "content": "hi"}
NATIVE = {"mode": "explicit"}


WHO = Principal("w", "k", "scope", auto_cache=AutoCache("off"))


def ask(*messages: Any) -> tuple[Ask, int]:
    raw = json.dumps({"model": "m", "messages": list(messages)}).encode()
    request, num_removed = without_nonces(decode_chat(raw))
    model = Model(id="m", display_name="m")
    return chat_ask_of(request, WHO, model, arrived=0.0), num_removed


def system(content: Any, role: str = "system", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_text_that_is_the_line_makes_no_segment(line: str, role: str) -> None:
    rules = text("rules", cache_control=EPHEMERAL)
    without, none = ask(system([rules], role), USER)
    assert none == 0
    for messages in (
        [system([text(line), rules], role)],
        [system(line, role), system([rules], role)],
        [system([rules], role), system(line, role)],
    ):
        made, num_removed = ask(*messages, USER)
        assert num_removed == 1
        assert made.plan.prompt == without.plan.prompt
        assert made.plan.names == without.plan.names
        assert made.plan.breakpoints == without.plan.breakpoints
    first, _ = ask(system([text(line), rules], role), USER)
    assert [s.path for s in first.plan.slots] == ["messages[0].content[1]", "messages[1].content"]


@pytest.mark.parametrize("line", LINES)
def test_of_a_longer_first_text_only_the_line_is_cut_off(line: str) -> None:
    for content in (f"{line}\nrules", [text(f"{line}\nrules")]):
        made, num_removed = ask(system(content), USER)
        assert num_removed == 1
        assert made.plan.prompt == ask(system("rules"), USER)[0].plan.prompt


@pytest.mark.parametrize("near", [*NEAR, *(f"rules\n{line}" for line in LINES[:2])])
def test_what_only_looks_alike_stays(near: str) -> None:
    made, num_removed = ask(system(near), USER)
    assert num_removed == 0 and made.plan.prompt.system[0].text == near


def test_no_other_message_is_touched() -> None:
    line = LINES[0]
    made, num_removed = ask({**USER, "content": line}, system(line), USER)
    assert num_removed == 0
    sent = [part.text for m in made.plan.prompt.messages for part in m.parts]  # type: ignore[union-attr]
    assert sent == [line, line, "hi"]


@pytest.mark.parametrize(
    "marker", [{"cache_control": EPHEMERAL}, {"prompt_cache_breakpoint": NATIVE}]
)
def test_a_removed_texts_marker_stands_on_the_segment_before_it(marker: Any) -> None:
    line = text(LINES[0], **marker)
    made, _ = ask(system([text("rules"), line]), USER)
    assert [point.segment for point in made.plan.breakpoints] == [0]
    first, _ = ask(system([line, text("rules")]), USER)
    assert first.plan.breakpoints == []


def test_a_prompt_of_nothing_else_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: "):
        ask(system(LINES[0]))


def test_two_sessions_share_their_prefix(stack: Stack) -> None:
    rules = text("You are a coding agent. " * 200, cache_control=EPHEMERAL)
    client = stack.openai()
    reads = []
    for nonce in ("0aaa9", "36ee5"):
        line = f"x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch={nonce};"
        messages: Any = [system([text(line), rules]), USER]
        answer = client.chat.completions.create(model=MODEL, messages=messages)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        reads.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert reads[0] == 0 and (reads[1] or 0) > 1000
