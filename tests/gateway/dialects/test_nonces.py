"""The billing line of coding agents is kept out of prompts, also as routers pass it on in Chat
Completions, and nothing else ever is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.protocol import TextPart
from gateway.base.errors import InvalidRequest
from gateway.prompt.plan import Plan
from tests.gateway.bodies import LONG, SHORT, body, lowered, lowered_chat, text, tool
from tests.gateway.conftest import Stack, stacked
from tests.gateway.openai_bodies import MODEL
from tests.gateway.serving import eventually

# As they were published: with and without `cch`, of a subagent, with ids of the prompt.
LINES = [
    "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;",
    "x-anthropic-billing-header: cc_version=2.1.75; cc_entrypoint=sdk-cli;",
    "x-anthropic-billing-header: cc_version=2.1.224.b44; cc_entrypoint=cli; cc_is_subagent=true;",
    "x-anthropic-billing-header: cc_version=2.1.88.0af; cc_workload=cron; cc_entrypoint=cli;"
    " cch=00000;",
    "x-anthropic-billing-header: cc_version=2.1.263; cc_entrypoint=cli; cc_is_subagent=true;"
    " cc_prev_req=req_011CTx9YHtT6ZqW8HKfLE9jP; cc_prompt_id=018f1a2b-0000-7000-8000-000000000001;",
]
NEAR = [
    "x-anthropic-billing-header:",
    "x-anthropic-billing-header: cc_version=2.1.177.01c;",
    "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5; Be kind.",
    "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; secret=36ee5;",
    "Explain x-anthropic-billing-header: cc_version=2.1.75; cc_entrypoint=cli;",
    " x-anthropic-billing-header: cc_version=2.1.75; cc_entrypoint=cli;",
]


USER = {"role": "user", "content": "hi"}
PlanOf = Callable[[Any], tuple[Plan, int]]


def plan(request: dict[str, Any]) -> tuple[Plan, int]:
    ask = lowered(request)
    return ask.plan, ask.num_removed


def chat_plan(*messages: Any) -> tuple[Plan, int]:
    ask = lowered_chat({"model": "m", "messages": messages})
    return ask.plan, ask.num_removed


def chat_message(content: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


BOTH: list[PlanOf] = [
    lambda system: plan(body(system=system)),
    lambda system: chat_plan(chat_message(system), USER),
    lambda system: chat_plan(chat_message(system, "developer"), USER),
]
reads = pytest.mark.parametrize("plan_of", BOTH, ids=["messages", "chat", "developer"])


@reads
@pytest.mark.parametrize("line", LINES)
def test_a_block_that_is_the_line_makes_no_segment(plan_of: PlanOf, line: str) -> None:
    with_line, removed = plan_of([text(line), text("rules", SHORT)])
    without, none = plan_of([text("rules", SHORT)])
    assert (removed, none) == (1, 0)
    assert (with_line.prompt, with_line.names) == (without.prompt, without.names)
    assert with_line.breakpoints == without.breakpoints
    assert with_line.slots[0].path in ("system.1", "messages[0].content[1]")


def test_in_chat_the_line_may_be_a_message_of_its_own_among_the_first() -> None:
    rules = chat_message([text("rules", SHORT)])
    for messages in ([chat_message(LINES[0]), rules], [rules, chat_message(LINES[0], "developer")]):
        prompt_plan, removed = chat_plan(*messages, USER)
        assert (removed, prompt_plan.prompt) == (1, chat_plan(rules, USER)[0].prompt)
    prompt_plan, removed = chat_plan(chat_message(LINES[0], "user"), chat_message(LINES[0]), USER)
    texts = [part.text for m in prompt_plan.prompt.messages for part in m.parts]  # type: ignore[union-attr]
    assert (removed, texts) == (0, [LINES[0], LINES[0], "hi"])
    with pytest.raises(InvalidRequest, match=r"^messages: "):
        chat_plan(chat_message(LINES[0]))


@reads
@pytest.mark.parametrize("line", LINES)
def test_of_a_longer_first_text_only_the_line_is_cut_off(plan_of: PlanOf, line: str) -> None:
    for system in (f"{line}\nrules", [text(f"{line}\nrules")]):
        prompt_plan, removed = plan_of(system)
        assert removed == 1
        assert prompt_plan.prompt == plan_of("rules")[0].prompt
        assert prompt_plan.slots[0].path.startswith(("system.0", "messages[0].content"))


@reads
@pytest.mark.parametrize("near", [*NEAR, *(f"rules\n{line}" for line in LINES[:2])])
def test_what_only_looks_alike_stays(plan_of: PlanOf, near: str) -> None:
    for system in (near, [text(near), text("rules")]):
        prompt_plan, removed = plan_of(system)
        assert removed == 0 and prompt_plan.prompt.system[0].text == near


@pytest.mark.parametrize(
    "marker",
    [{"cache_control": SHORT}, {"prompt_cache_breakpoint": {"mode": "explicit"}}],
)
def test_in_chat_a_removed_texts_marker_stands_on_the_segment_before_it(marker: Any) -> None:
    line = {**text(LINES[0]), **marker}
    prompt_plan, _ = chat_plan(chat_message([text("rules"), line]), USER)
    assert [point.segment for point in prompt_plan.breakpoints] == [0]
    assert chat_plan(chat_message([line, text("rules")]), USER)[0].breakpoints == []


@given(
    system=st.lists(st.text(min_size=1), min_size=1, max_size=3),
    asks=st.one_of(st.sampled_from(LINES), st.text(min_size=1).filter(lambda s: not s.isspace())),
)
@example(system=["rules", f"{LINES[0]}\nrules"], asks=LINES[0])
def test_nothing_that_a_user_wrote_is_changed(system: list[str], asks: str) -> None:
    """Neither a message, whatever it says, nor a system text that is not the line."""
    request = body(
        system=[text(value) for value in system], messages=[chat_message([text(asks)], "user")]
    )
    prompt_plan, removed = plan(request)
    assert removed == 0
    assert [block.text for block in prompt_plan.prompt.system] == system
    assert prompt_plan.prompt.messages[0].parts == [TextPart(asks)]


def test_a_marker_on_a_removed_block_stands_on_the_segment_before_it() -> None:
    marked = text(LINES[0], SHORT)
    after_tools, _ = plan(body(tools=[tool()], system=[marked, text("rules")]))
    assert [(point.segment, point.ttl) for point in after_tools.breakpoints] == [(0, "5m")]
    twice, _ = plan(body(tools=[tool(marker=LONG)], system=[marked, text("rules", SHORT)]))
    assert [(point.segment, point.ttl) for point in twice.breakpoints] == [(0, "1h"), (1, "5m")]
    first, _ = plan(body(system=[marked, text("rules")]))
    assert first.breakpoints == []


@pytest.mark.parametrize(
    "system, message",
    [
        ([text(LINES[0], SHORT), text("rules", LONG)], "system.1.cache_control.ttl: a ttl='1h'"),
        (
            [text(LINES[0], SHORT), *[text(str(n), SHORT) for n in range(4)]],
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        ([text(LINES[0]), text("", SHORT)], "system.1: cache_control cannot be set"),
    ],
)
def test_errors_speak_of_the_clients_own_blocks(system: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(body(system=system))
    assert str(caught.value).startswith(message)


def test_two_sessions_of_a_coding_agent_share_their_prefix_and_it_is_counted(stack: Stack) -> None:
    rules = text("You are a coding agent. " * 200, SHORT)
    ids = set()
    for nonce in ("0aaa9", "36ee5"):
        line = f"x-anthropic-billing-header: cc_version=2.1.1.{nonce[:3]}; cc_entrypoint=cli;"
        system = [text(f"{line} cch={nonce};"), rules]
        answer = stack.post("/v1/messages", json=body(system=system)).json()
        request = {"model": MODEL, "messages": [chat_message(system), USER]}
        chat = stack.post("/v1/chat/completions", json=request).json()
        ids.add(answer["id"])
    assert answer["usage"]["cache_read_input_tokens"] > 1000
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    assert answer["holdfast"]["breakpoints"][0]["path"] == "system.1"
    assert all("billing" not in r.prompt.system[0].text for r in stack.engine.requests)
    eventually(lambda: ids <= {turn["id"] for turn in stack.admin("turns").json()})
    rows = [turn for turn in stack.admin("turns").json() if turn["id"] in ids]
    assert [row["num_removed"] for row in rows] == [1, 1]
    metrics = httpx.get(f"{stack.url}/metrics", timeout=120).text
    assert "holdfast_gateway_removed_nonces_total" in metrics


def test_the_rule_can_be_switched_off(tmp_path: Path) -> None:
    system = [text(LINES[0]), text("rules")]
    with stacked(tmp_path, remove_nonces=False) as stack:
        assert stack.post("/v1/messages", json=body(system=system)).status_code == 200
    assert [block.text for block in stack.engine.requests[0].prompt.system] == [LINES[0], "rules"]
