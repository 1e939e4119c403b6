"""The billing line of coding agents is kept out of prompts, and nothing else ever is."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.lower import plan_of
from gateway.dialects.anthropic.request import decode_messages
from gateway.dialects.nonces import without_nonces
from gateway.prompt.plan import Plan
from tests.gateway.bodies import LONG, SHORT, body, text, tool
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, eventually, serve, serve_gateway

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


def plan(request: dict[str, Any]) -> tuple[Plan, int]:
    made, removed = without_nonces(decode_messages(msgspec.json.encode(request)))
    return plan_of(made, "scope"), removed


@pytest.mark.parametrize("line", LINES)
def test_a_block_that_is_the_line_makes_no_segment(line: str) -> None:
    with_line, removed = plan(body(system=[text(line), text("rules", SHORT)]))
    without, none = plan(body(system=[text("rules", SHORT)]))
    assert (removed, none) == (1, 0)
    assert (with_line.prompt, with_line.names) == (without.prompt, without.names)
    assert with_line.breakpoints == without.breakpoints
    assert [slot.path for slot in with_line.slots] == ["system.1", "messages.0.content.0"]


@pytest.mark.parametrize("line", LINES)
def test_of_a_longer_first_text_only_the_line_is_cut_off(line: str) -> None:
    for system in (f"{line}\nrules", [text(f"{line}\nrules")]):
        made, removed = plan(body(system=system))
        assert removed == 1
        assert made.prompt == plan(body(system="rules"))[0].prompt
        assert made.slots[0].path == "system.0"


def test_a_system_prompt_that_is_nothing_else_is_none() -> None:
    for system in (LINES[0], [text(LINES[0])], LINES[0] + "\n"):
        made, removed = plan(body(system=system))
        assert (removed, made.prompt.system) == (1, [])


@pytest.mark.parametrize("near", NEAR)
def test_what_only_looks_alike_stays(near: str) -> None:
    for system in (near, [text(near), text("rules")]):
        made, removed = plan(body(system=system))
        assert removed == 0 and made.prompt.system[0].text == near


@given(
    system=st.lists(st.text(min_size=1), min_size=1, max_size=3),
    said=st.one_of(st.sampled_from(LINES), st.text(min_size=1).filter(lambda s: not s.isspace())),
)
@example(system=["rules", f"{LINES[0]}\nrules"], said=LINES[0])
def test_nothing_that_a_user_wrote_is_changed(system: list[str], said: str) -> None:
    """Neither a message, whatever it says, nor a system text that is not the line."""
    request = body(system=[text(value) for value in system], messages=[_user(said)], tools=[tool()])
    made, removed = plan(request)
    assert removed == 0
    assert [block.text for block in made.prompt.system] == system
    assert [part.text for part in made.prompt.messages[0].parts] == [said]  # type: ignore[union-attr]


@given(rest=st.text(min_size=1), line=st.sampled_from(LINES), breaks=st.sampled_from("\n\r"))
def test_what_follows_the_line_is_kept_to_the_letter(rest: str, line: str, breaks: str) -> None:
    end = "\r\n" if breaks == "\r" else "\n"
    made, removed = plan(body(system=[text(line + end + rest)]))
    assert removed == 1 and made.prompt.system[0].text == rest


def _user(said: str) -> dict[str, Any]:
    return {"role": "user", "content": said}


def test_a_marker_on_a_removed_block_stands_on_the_segment_before_it() -> None:
    marked = text(LINES[0], SHORT)
    after_tools, _ = plan(body(tools=[tool()], system=[marked, text("rules")]))
    assert [(point.segment, point.ttl) for point in after_tools.breakpoints] == [(0, "5m")]
    twice, _ = plan(body(tools=[tool(marker=LONG)], system=[marked, text("rules", SHORT)]))
    assert [(point.segment, point.ttl) for point in twice.breakpoints] == [(0, "1h"), (1, "5m")]
    first, _ = plan(body(system=[marked, text("rules")]))
    assert first.breakpoints == []


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"system": [text(LINES[0], SHORT), text("rules", LONG)]},
            "system.1.cache_control.ttl: a ttl='1h'",
        ),
        (
            {"system": [text(LINES[0], SHORT), *[text(str(n), SHORT) for n in range(4)]]},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        ({"system": [text(LINES[0]), text("", SHORT)]}, "system.1: cache_control cannot be set"),
    ],
)
def test_errors_speak_of_the_clients_own_blocks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(body(**changes))
    assert str(caught.value).startswith(message)


def test_two_sessions_of_a_coding_agent_share_their_prefix_and_it_is_counted(stack: Stack) -> None:
    rules = text("You are a coding agent. " * 200, SHORT)

    def ask(nonce: str) -> dict[str, Any]:
        line = f"x-anthropic-billing-header: cc_version=2.1.1.{nonce[:3]}; cc_entrypoint=cli;"
        with stack.http() as http:
            reply = http.post(
                "/v1/messages", json=body(system=[text(f"{line} cch={nonce};"), rules])
            )
        answer: dict[str, Any] = reply.json()
        return answer

    first, second = ask("0aaa9"), ask("36ee5")
    assert second["usage"]["cache_read_input_tokens"] > 1000
    assert second["holdfast"]["breakpoints"][0]["path"] == "system.1"
    assert all("billing" not in r.prompt.system[0].text for r in stack.engine.requests)
    ids = {first["id"], second["id"]}
    eventually(lambda: ids <= {turn["id"] for turn in stack.admin("turns").json()})
    rows = [turn for turn in stack.admin("turns").json() if turn["id"] in ids]
    assert [row["num_removed"] for row in rows] == [1, 1]
    assert (
        "holdfast_gateway_removed_nonces_total"
        in httpx.get(f"{stack.url}/metrics", timeout=120).text
    )


def test_the_rule_can_be_switched_off(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path, engine_url, remove_nonces=False) as url,
    ):
        headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
        request = body(system=[text(LINES[0]), text("rules")])
        assert (
            httpx.post(f"{url}/v1/messages", json=request, headers=headers, timeout=120).status_code
            == 200
        )
    assert [block.text for block in engine.requests[0].prompt.system] == [LINES[0], "rules"]
