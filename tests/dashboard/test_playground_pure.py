"""What the playground reads, builds and writes: blocks, pasted requests, code. No browser."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dashboard.admin.shapes.turns import Turn
from dashboard.playground import copy_as, paste
from dashboard.playground.answer import Breakpoint, Extension, Message, TokenUsage, WrittenTokens
from dashboard.playground.blocks import Block, NotBlocks, blocks_of, body_of
from dashboard.playground.dialects import blocks_of_any
from dashboard.playground.gain import gained
from dashboard.playground.spans import elsewhere_rows, part_rows, prompt_spans
from tests.dashboard.ledgers import turn as row_of

TOOL = '{"name": "t", "input_schema": {"type": "object"}}'
BLOCKS = [
    Block("user", "Hi"),
    Block("system", "Be brief.", "1h"),
    Block("tool", TOOL, "5m"),
    Block("assistant", "Yes?"),
    Block("user", "Go on."),
    Block("user", "Please."),
]


def test_blocks_make_a_body_and_the_body_makes_the_blocks() -> None:
    body = body_of(BLOCKS, "m", 8)
    assert [tool["name"] for tool in body["tools"]] == ["t"]
    assert body["tools"][0]["cache_control"] == {"type": "ephemeral", "ttl": "5m"}
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    again = body_of(blocks_of(body), "m", 8)
    assert again == body


@pytest.mark.parametrize("text", ["{", "[]", "1"])
def test_a_tool_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tool"):
        body_of([Block("tool", text)], "m", 8)


def test_images_stay_a_body() -> None:
    with pytest.raises(NotBlocks):
        blocks_of({"messages": [{"role": "user", "content": [{"type": "image"}]}]})


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "messages"),
        ('{"messages": [{"role": "system", "content": "Hi"}]}', "chat"),
        ('{"messages": [], "tools": [{"type": "function"}]}', "chat"),
        ('{"prompt": "Hi"}', "completions"),
        ('{"input": "Hi"}', "responses"),
        ('{"contents": [{"parts": [{"text": "Hi"}]}]}', "gemini"),
        ("curl https://x/v1/chat/completions -H 'a: b' --data-raw '{\"messages\": []}'", "chat"),
        ("curl https://x/v1/responses \\\n  --json '{\"input\": \"it'\\''s\"}'", "responses"),
        ("curl 'https://x/v1beta/models/m:generateContent' --data='{}'", "gemini"),
    ],
)
def test_a_pasted_request_is_told_by_its_url_or_its_fields(text: str, dialect: str) -> None:
    assert paste.read(text).dialect == dialect


@pytest.mark.parametrize(
    "text", ["", "Hi", "[1]", "curl 'x", "curl -d @body.json https://x", '{"a": ' * 5000]
)
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(paste.Unreadable):
        paste.read(text)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ({"input": "Hi"}, "input"),
        ({"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}, "contents"),
    ],
)
def test_a_conversation_is_carried_on(body: dict[str, object], field: str) -> None:
    pasted = paste.read(json.dumps(body))
    carried = paste.carried_on(pasted, "Yes?", "More")[field]
    assert len(carried) == 3 and "Yes?" in str(carried[1]) and "More" in str(carried[2])


def test_code_to_copy_is_whole_and_has_no_key(tmp_path: Path) -> None:
    body = body_of([Block("user", 'it\'s "quoted" \\ $HOME\nnew line')], "m", 8)
    for path in ("/v1/messages", "/v1/chat/completions"):
        written = copy_as.curl("http://x", path, body)
        assert paste.read(written).body == body
        compile(copy_as.python("http://x", path, body), "code", "exec")
        assert json.dumps(body["model"]) in copy_as.javascript("http://x", path, body)
    shell = copy_as.curl("http://x", "/v1/messages", body).replace("curl ", "printf '%s\\n' ", 1)
    told = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=True)
    assert json.dumps(body, indent=2, ensure_ascii=False) in told.stdout


def message(automatic: int = 0) -> Message:
    usage = TokenUsage(
        input_tokens=50,
        cache_read_input_tokens=100,
        cache_creation=WrittenTokens(20, 30),
    )
    points = [Breakpoint("system.0", "read", 100, "1h"), Breakpoint("system.1", "written", 150)]
    return Message("msg_1", usage, Extension("engine-0", automatic, breakpoints=points))


@pytest.mark.parametrize(("automatic", "reused"), [(0, 0), (40, 0), (70, 20), (500, 50)])
def test_what_was_reused_unmarked_stands_behind_what_was_written(
    automatic: int, reused: int
) -> None:
    spans = {row["class"]: row["tokens"] for row in prompt_spans(message().usage, automatic)}
    assert spans.get("Automatically reused", 0) == reused
    assert spans.get("Uncached", 0) == 50 - reused
    assert sum(spans.values()) == 200


def test_a_marker_elsewhere_would_have_held_what_is_before_it() -> None:
    blocks = [Block("system", "a", "1h"), Block("system", "b", "5m"), Block("user", "c")]
    assert [row["tokens"] for row in part_rows(blocks, message())] == [100, 50, 50]
    told = elsewhere_rows(blocks, message())
    assert [row["A second send reads"] for row in told] == [100, 150, 200]
    assert [row["Known"] for row in told] == ["exactly"] * 3
    assert told[-1]["Of the prompt"] == 1.0


DIALECTS = {
    "chat": {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [
            {"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}
        ],
    },
    "responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Yes?"}],
            },
            {"role": "user", "content": "Go on."},
        ],
        "tools": [{"type": "function", "name": "t", "parameters": {"type": "object"}}],
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"parts": [{"text": "Hi"}]},
            {"role": "model", "parts": [{"text": "Yes?"}]},
            {"role": "user", "parts": [{"text": "Go on."}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "t", "parameters": {"type": "object"}}]}],
    },
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_comes_apart_into_the_same_blocks(dialect: paste.Dialect) -> None:
    pasted = paste.read(json.dumps(DIALECTS[dialect]))
    assert pasted.dialect == dialect
    found = blocks_of_any(pasted)
    assert [(block.kind, block.text) for block in found[1:]] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Yes?"),
        ("user", "Go on."),
    ]
    tool = body_of(found, "m", 8)["tools"][0]
    assert tool == {"name": "t", "description": "", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "system", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "tool", "content": "x"}, {"role": "system", "content": ""}]},
        {"messages": [{"role": "system", "content": 5}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"input": 5},
        {"contents": [{"parts": [{"inlineData": {}}]}]},
        {"contents": "x"},
        {"prompt": [1, 2]},
        {"messages": "x"},
        {"messages": [], "tools": "x"},
        {"messages": [{"role": "user", "content": "x"}] * 41},
    ],
)
def test_what_blocks_cannot_show_stays_a_body(body: dict[str, Any]) -> None:
    with pytest.raises(NotBlocks):
        blocks_of_any(paste.read(json.dumps(body)))


def sent(seconds: float | None, read: int = 0, cost: int | None = 5_000_000) -> Turn:
    row = row_of(1, datetime.now(UTC), input=9, read=read, first_token_seconds=seconds)
    known = {name: row.get(name) for name in Turn.__struct_fields__}
    return Turn(**{**known, "workspace": "w", "stream": True, "cost_nano": cost})


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (sent(0.188), sent(0.016, 1930), "12 times as soon**: 188 ms → 16 ms. It read 1,930 of"),
        (sent(0.1), sent(0.11, 5), "about as soon**: 100 ms → 110 ms"),
        (sent(0.1), sent(0.3, 5), "answered later**"),
        (sent(None), sent(0.3), "has no time to first token"),
        (sent(0.1), sent(0.1, cost=500_000), "and cost $0.000500 instead of $0.005000."),
        (sent(0.1), sent(0.1, cost=None), "prompt tokens."),
    ],
)
def test_what_a_second_send_gained_is_one_sentence(first: Turn, second: Turn, said: str) -> None:
    assert said in gained(first, second)
