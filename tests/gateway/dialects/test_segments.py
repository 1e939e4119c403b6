from typing import Any

import msgspec
import pytest

from engine.protocol import TextPart, ThinkingPart, ToolResultPart, ToolUsePart
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.lower import plan_of
from gateway.dialects.anthropic.request import decode_messages
from gateway.prompt.plan import Plan
from gateway.prompt.schemas import MAX_DEPTH
from tests.gateway.bodies import SHORT, body, conversation, text, tool


def plan(request: dict[str, Any]) -> Plan:
    return plan_of(decode_messages(msgspec.json.encode(request)), "scope")


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}


def test_every_tool_and_block_is_one_segment_in_prompt_order() -> None:
    made = plan(conversation())
    assert made.prompt.num_segments == len(made.slots)
    assert [slot.path for slot in made.slots] == [
        "tools.0",
        "tools.1",
        "system.0",
        "messages.0.content.0",
        "messages.0.content.1",
        "messages.1.content.0",
        "messages.1.content.1",
        "messages.1.content.2",
        "messages.2.content.0",
        "messages.2.content.1",
    ]
    assert made.prompt.messages[1].parts == [
        ThinkingPart("I shall look."),
        TextPart("Looking."),
        ToolUsePart("toolu_1", "look", {"b": 1, "a": [1.5, None, {"z": "é"}]}),
    ]
    assert made.prompt.messages[2].parts == [
        ToolResultPart("toolu_1", "A hold.\nOn blocks."),
        TextPart("Notes\nNotes."),
    ]


def test_consecutive_messages_of_one_role_are_merged_and_their_blocks_kept() -> None:
    made = plan(body(messages=[user(text("a")), user(text("b"), text("c"))]))
    assert len(made.prompt.messages) == 1
    assert made.prompt.messages[0].parts == [TextPart("a"), TextPart("b"), TextPart("c")]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"messages": []}, "messages: at least one message is required"),
        ({"messages": [user(text(""))]}, "messages: text content blocks must be non-empty"),
        (
            {"messages": [user(text(" \n"))]},
            "messages: text content blocks must contain non-whitespace text",
        ),
        ({"system": ""}, None),
        ({"system": [text("")]}, "system: text content blocks must be non-empty"),
        ({"messages": [user()]}, "messages.0: all messages must have non-empty content"),
        (
            {"messages": [user(text("q")), {"role": "assistant", "content": "Sure,"}]},
            "This model does not support assistant message prefill. The conversation must end with"
            " a user message.",
        ),
        (
            {"messages": [user(CALL)]},
            "messages.0.content.0: `tool_use` blocks can only be in `assistant` messages",
        ),
        (
            {"messages": [user(RESULT)]},
            "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: t1",
        ),
        (
            {
                "messages": [
                    user(text("q")),
                    {"role": "assistant", "content": [CALL]},
                    user(text("so?")),
                ]
            },
            "messages.2: `tool_use` ids were found without `tool_result` blocks immediately after:"
            " t1",
        ),
        (
            {"tools": [{**tool(marker=SHORT), "defer_loading": True}, tool("other")]},
            "Tool 'look' cannot have both defer_loading=true and cache_control set. Tools with"
            " defer_loading cannot use prompt caching.",
        ),
        ({"tools": [tool(), tool()]}, None),
        (
            {"messages": [{"role": "system", "content": "x"}, user(text("q"))]},
            "messages.0: role 'system' cannot come first",
        ),
        (
            {"messages": [user(text("q")), {"role": "system", "output_config": {}}]},
            "messages.1: all messages must have non-empty content",
        ),
        (
            {"messages": [{"role": "system", "output_config": {"effort": "low"}}]},
            "messages: at least one message is required",
        ),
    ],
)
def test_content_that_no_engine_could_be_sent_is_refused(
    changes: dict[str, Any], message: str | None
) -> None:
    if message is None:
        plan(body(**changes))
        return
    with pytest.raises(InvalidRequest) as caught:
        plan(body(**changes))
    assert str(caught.value) == message


def test_json_inside_a_tool_call_is_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="nested more than"):
        plan(body(tools=[{"name": "t", "input_schema": deep}]))
    huge = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":'
    huge += b'[{"name":"t","input_schema":{"a":[%d]}}]}' % 2**70
    with pytest.raises(InvalidRequest, match="64 bits"):
        plan_of(decode_messages(huge), "scope")
