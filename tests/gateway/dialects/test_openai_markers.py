"""Where OpenAI clients put their markers, and what becomes of them."""

from typing import Any

import pytest

from engine.protocol import Breakpoint, TextPart
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import EPHEMERAL, LONG_TEXT, LOOK, MESSAGES, chat, refused


def test_marked_parts_are_written_then_read(stack: Stack) -> None:
    system = {
        "role": "system",
        "content": [{"type": "text", "text": LONG_TEXT, "cache_control": EPHEMERAL}],
    }
    first = chat(stack, messages=[system, *MESSAGES])
    second = chat(stack, messages=[system, *MESSAGES])
    marked = len(LONG_TEXT) // 4 + 1
    written, read = first.usage.prompt_tokens_details, second.usage.prompt_tokens_details
    assert (written.cached_tokens, written.cache_write_tokens) == (0, marked)
    assert (read.cached_tokens, read.cache_write_tokens) == (marked, 0)
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    [report] = second.model_extra["holdfast"]["breakpoints"]
    assert report["path"] == "messages[0].content[0]"
    assert stack.engine.requests[0].prompt.system == [TextPart(LONG_TEXT)]


MARKED_PLACES = [
    pytest.param({"cache_control": {**EPHEMERAL, "ttl": "1h"}}, [Breakpoint(4, "1h")], id="top"),
    pytest.param({"prompt_cache_options": {}}, [Breakpoint(4, "30m")], id="native-implicit"),
    pytest.param({"prompt_cache_options": {"mode": "explicit"}}, [], id="native-explicit"),
    pytest.param({"tools": [{**LOOK, "cache_control": EPHEMERAL}]}, [Breakpoint(0)], id="tool"),
    pytest.param(
        {"tools": [{**LOOK, "function": {**LOOK["function"], "cache_control": EPHEMERAL}}]},
        [Breakpoint(0)],
        id="function",
    ),
]


@pytest.mark.parametrize("changes, expected", MARKED_PLACES)
def test_markers_count_wherever_clients_put_them(
    stack: Stack, changes: dict[str, Any], expected: list[Breakpoint]
) -> None:
    """Segments: the tool, one system block, three parts."""
    body = {
        "tools": [LOOK],
        "messages": [
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b", "c")]},
        ],
        **changes,
    }
    chat(stack, messages=body.pop("messages"), tools=body.pop("tools"), extra_body=body)
    assert stack.engine.requests[-1].breakpoints == expected


def test_a_messages_marker_stands_on_its_last_part(stack: Stack) -> None:
    messages = [
        {"role": "system", "content": "Rules.", "cache_control": {**EPHEMERAL, "ttl": "1h"}},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "cache_control": EPHEMERAL,
        },
    ]
    chat(stack, messages=messages)
    assert stack.engine.requests[-1].breakpoints == [Breakpoint(0, "1h"), Breakpoint(2, "5m")]


def test_of_many_native_breakpoints_the_latest_count(stack: Stack) -> None:
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    messages = [{"role": "user", "content": [part] * 6}]
    chat(stack, messages=messages, extra_body={"prompt_cache_options": {"mode": "explicit"}})
    marked = [point.segment for point in stack.engine.requests[-1].breakpoints]
    assert marked == [2, 3, 4, 5]
    chat(stack, messages=messages)
    marked = [point.segment for point in stack.engine.requests[-1].breakpoints]
    assert marked == [3, 4, 5], "three, beside the implicit one, which is at the last one's place"
    chat(
        stack,
        messages=[{"role": "user", "content": [part] * 6 + [{"type": "text", "text": "end"}]}],
        extra_body={"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
    )
    marked = [point.segment for point in stack.engine.requests[-1].breakpoints]
    assert marked == [3, 4, 5, 6]


def test_marker_rules_are_those_of_the_other_dialect(stack: Stack) -> None:
    part = {"type": "text", "text": "x", "cache_control": EPHEMERAL}
    error = refused(stack, messages=[{"role": "user", "content": [part] * 5}])
    assert error["message"] == (
        "A maximum of 4 blocks with cache_control may be provided. Found 5."
    )
    long = {**part, "cache_control": {**EPHEMERAL, "ttl": "1h"}}
    error = refused(stack, messages=[{"role": "user", "content": [part, long]}])
    assert error["param"] == "messages[0].content[1].cache_control.ttl"
