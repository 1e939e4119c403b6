"""streamGenerateContent: what stands in a stream, and what keeps it alive."""

import json
import re

import pytest
from google.genai import types

from engine.protocol import Finished, TextDelta, ToolInputDelta, ToolUseStart
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import MODEL, QUESTION, client, post
from tests.gateway.openai_bodies import frames


def test_a_stream_has_its_end_and_usage_in_the_last_chunk(stack: Stack) -> None:
    with client(stack) as sdk:
        chunks = list(sdk.models.generate_content_stream(model=MODEL, contents=QUESTION))
    assert "".join(chunk.text or "" for chunk in chunks) == "Hello there"
    ends = [chunk.candidates[0].finish_reason for chunk in chunks if chunk.candidates]
    assert ends == [None, None, types.FinishReason.STOP]
    assert [chunk.usage_metadata is None for chunk in chunks] == [True, True, False]


def test_heartbeats_are_blanks_in_an_event_and_the_sdk_ignores_them(stack: Stack) -> None:
    """It takes a comment of server-sent events for broken JSON."""
    stack.engine.num_heartbeats = 2
    with client(stack) as sdk:
        chunks = list(sdk.models.generate_content_stream(model=MODEL, contents=QUESTION))
    assert "".join(chunk.text or "" for chunk in chunks) == "Hello there"


LINE = re.compile(r"data: (.*)\n\n")
"""Genkit and `@google/generative-ai` read a stream by this: between two matches may be nothing."""


def test_a_stream_has_nothing_between_its_events(stack: Stack) -> None:
    """Neither for a heartbeat nor for a frame that makes no chunk."""
    stack.engine.script = frames(
        ToolUseStart("call_a", "look"),
        ToolInputDelta('{"where": '),
        ToolInputDelta('"here"}'),
        Finished(reason="tool_use", output_tokens=9),
    )
    stack.engine.num_heartbeats = 2
    raw = post(stack, "streamGenerateContent?alt=sse").text
    found, at = [], 0
    while match := LINE.match(raw, at):
        found.append(json.loads(match[1]))
        at = match.end()
    assert raw[at:].strip() == ""
    [call] = [part for one in found for part in one["candidates"][0]["content"]["parts"]]
    assert call["functionCall"]["args"] == {"where": "here"}


def test_a_stream_without_alt_is_one_json_list(stack: Stack) -> None:
    reply = post(stack, "streamGenerateContent")
    assert reply.headers["content-type"].startswith("application/json")
    chunks = reply.json()
    texts = [chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in chunks]
    assert texts == ["Hello", " there", ""]
    assert chunks[-1]["usageMetadata"]["candidatesTokenCount"] == 2


@pytest.mark.parametrize("alt", ["?alt=sse", ""])
def test_an_error_after_the_first_byte_is_the_streams_last_item(stack: Stack, alt: str) -> None:
    stack.engine.script = frames(TextDelta("Hel"), Finished(reason="failed", output_tokens=1))
    text = post(stack, f"streamGenerateContent{alt}").text
    if alt:
        events = [event for event in text.split("\n\n") if event.startswith("data: ")]
        items = [json.loads(event.removeprefix("data: ")) for event in events]
    else:
        items = json.loads(text)
    assert items[-1]["error"]["status"] == "INTERNAL"
