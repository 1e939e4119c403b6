"""Bodies of the Messages API: their parts in prompt order; what is wrong by where and why."""

from typing import Any

import msgspec
import pytest

from engine.protocol import TextPart, ThinkingPart, ToolResultPart, ToolUsePart
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.lower import plan_of
from gateway.dialects.anthropic.request import decode_messages
from gateway.prompt.plan import Plan
from gateway.prompt.schemas import MAX_DEPTH
from tests.gateway.bodies import ASKED, SHORT, body, conversation, lowered, said, text, tool

JSON = "The request body is not valid JSON"
DEEP = '{"tools":[{"name":"t","input_schema":' + '{"a":' * 100_000
FULL = '{"model":"m","messages":[],"max_tokens":1,'


@pytest.mark.parametrize(
    "raw, message",
    [
        ("", JSON),
        ("{", JSON),
        ("[]", "Input should be a valid object"),
        (b'{"model":"\xff"}', "The request body is not valid UTF-8"),
        ('{"model":"\\ud800"}', JSON),
        ('{"model":"\\udc00x"}', JSON),
        ('{"model":NaN}', JSON),
        (b"\xef\xbb\xbf{}", JSON),
        ('{"tools":' + "[" * 100_000, "tools.0: Input should be a valid object"),
        (DEEP, "The request body is nested too deeply"),
        ('{"model":"m","messages":[]}', "max_tokens: Field required"),
        (FULL + '"max_tokens":-1}', "max_tokens: Input should be greater"),
        (FULL + '"max_tokens":"1"}', "max_tokens: Input should be a valid int"),
        (FULL + '"max_tokens":true}', "max_tokens: Input should be a valid"),
        (FULL + '"max_tokens":1e999}', "max_tokens: Input is not valid"),
        (FULL + '"stream":0}', "stream: Input should be a v"),
        (FULL + '"top_p":2}', "top_p: Input should be less"),
        ('{"model":"m","foo":1}', "foo: Extra inputs are not permitted"),
        (
            '{"thread":{"type":"new"}}',
            "thread: Input tag 'new' found using 'type' does not match any of the expected tags:"
            " 'create', 'continue'",
        ),
        ('{"messages":[{"role":"bot"}]}', "messages.0.role: Input should be 'user', 'assistant'"),
        (
            '{"model":"m","max_tokens":1,"messages":[{"role":"user"}]}',
            "messages.0.content: Field required",
        ),
        ('{"messages":[{"role":"user","content":1}]}', "messages.0.content: Input should be a "),
        (
            '{"messages":[{"role":"user","content":[{"type":"text","text":1}]}]}',
            "messages.0.content.0.text.text: Input should be a valid string",
        ),
        (
            '{"messages":[{"role":"user","content":[{"type":"song"}]}]}',
            "messages.0.content.0: Input tag 'song' found using 'type' does not match",
        ),
        (
            '{"messages":[{"role":"user","content":[{}]}]}',
            "messages.0.content.0: Unable to extract",
        ),
        ('{"thinking":{"type":"enabled","budget_tokens":1}}', "thinking.budget_tokens: Input sho"),
        ('{"service_tier":"gold"}', "service_tier: Input should be 'auto' or 'standard_only'"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_a_bad_body_is_answered_with_where_and_why(raw: str | bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_messages(raw.encode() if isinstance(raw, str) else raw)
    assert str(caught.value).startswith(message)


def test_of_duplicate_keys_the_last_one_counts() -> None:
    raw = b'{"model":"a","model":"b","max_tokens":1,"messages":[]}'
    assert decode_messages(raw).model == "b"


def plan(**changes: Any) -> Plan:
    return plan_of(decode_messages(msgspec.json.encode(body(**changes))), ASKED)


def test_every_tool_and_block_is_one_segment_in_prompt_order() -> None:
    made = plan(**conversation())
    assert made.prompt.num_segments == len(made.slots)
    places = ["tools.0", "tools.1", "system.0"]
    places += [f"messages.{m}.content.{n}" for m, most in enumerate((2, 3, 2)) for n in range(most)]
    assert [slot.path for slot in made.slots] == places
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
    (message,) = plan(messages=[said(text("a")), said(text("b"), text("c"))]).prompt.messages
    assert message.parts == [TextPart("a"), TextPart("b"), TextPart("c")]


HI = {"role": "user", "content": "hi"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}
DEFERRED = {**tool(marker=SHORT), "defer_loading": True}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"messages": []}, "messages: at least one message is required"),
        ({"messages": [said(text(""))]}, "messages: text content blocks must be non-empty"),
        (
            {"messages": [said(text(" \n"))]},
            "messages: text content blocks must contain non-whitespace text",
        ),
        ({"system": [text("")]}, "system: text content blocks must be non-empty"),
        ({"messages": [said()]}, "messages.0: all messages must have non-empty content"),
        (
            {"messages": [said(text("q")), said(text("Sure,"), role="assistant")]},
            "This model does not support assistant message prefill. The conversation must end with"
            " a user message.",
        ),
        (
            {"messages": [said(CALL)]},
            "messages.0.content.0: `tool_use` blocks can only be in `assistant` messages",
        ),
        (
            {"messages": [said(RESULT)]},
            "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: t1",
        ),
        (
            {"messages": [said(text("q")), said(CALL, role="assistant"), said(text("so?"))]},
            "messages.2: `tool_use` ids were found without `tool_result` blocks immediately after:"
            " t1",
        ),
        (
            {"tools": [DEFERRED, tool("other")]},
            "Tool 'look' cannot have both defer_loading=true and cache_control set. Tools with"
            " defer_loading cannot use prompt caching.",
        ),
        (
            {"messages": [{"role": "system", "content": "x"}, said(text("q"))]},
            "messages.0: role 'system' cannot come first",
        ),
        (
            {"messages": [said(text("q")), {"role": "system", "output_config": {}}]},
            "messages.1: all messages must have non-empty content",
        ),
        (
            {"messages": [{"role": "system", "output_config": {"effort": "low"}}]},
            "messages: at least one message is required",
        ),
        ({"compaction": {"type": "summarize"}}, "compaction: not supported by this server"),
        ({"messages": [{**HI, "clear_at": "never"}]}, "messages.0.clear_at: only permitted"),
        ({"messages": [{**HI, "output_config": {}}]}, "messages.0.output_config: only permitted"),
        ({"tools": [SEARCH, {"name": "x"}]}, "tools.1.input_schema: Field required"),
        ({"tools": [{**tool("x"), "nam": 1}, SEARCH]}, "tools.0.nam: Extra inputs are not permit"),
        (
            {"tools": [{**SEARCH, "cache_control": {"type": "ephemeral", "ttl": "2h"}}]},
            "tools.0.cache_control.ephemeral.ttl: Input should be '5m' or '1h'",
        ),
        (
            {"context_management": {"edits": [{}]}},
            "context_management.edits.0: Unable to extract tag using discriminator",
        ),
    ],
)
def test_content_that_no_engine_could_be_sent_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(**changes)
    assert str(caught.value).startswith(message)


CLEARED = {"type": "clear_thinking_20251015"}
NOTHING = ("mcp_servers", "fallbacks", "thread", "compaction", "container")


@pytest.mark.parametrize(
    "changes",
    [
        {"system": ""},
        {"tools": [tool(), tool()]},
        dict.fromkeys(NOTHING),
        {"mcp_servers": [], "fallbacks": []},
        {"context_management": {"edits": None}},
        {"context_management": {"edits": []}},
        {"context_management": {"edits": [{**CLEARED, "keep": "all"}]}},
        {"context_management": {"edits": [{**CLEARED, "keep": {"type": "all"}}]}},
        {"context_management": {"edits": [CLEARED, {"type": "compact_20260112"}]}},
    ],
)
def test_what_is_odd_but_can_be_sent_is_taken(changes: dict[str, Any]) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    plan(**{"messages": [HI, said(thought, text("a"), role="assistant"), HI], **changes})


def test_json_inside_a_tool_call_is_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="nested more than"):
        plan(tools=[{"name": "t", "input_schema": deep}])
    huge = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":'
    huge += b'[{"name":"t","input_schema":{"a":[%d]}}]}' % 2**70
    with pytest.raises(InvalidRequest, match="64 bits"):
        lowered(huge)
