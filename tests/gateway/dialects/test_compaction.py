"""POST /v1/responses/compact: a summary stands for a conversation, and is read here alone."""

from typing import Any

import openai
import pytest

from engine import protocol
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MODEL, frames
from tests.gateway.responses_bodies import LOOK, asked

HI: dict[str, Any] = {"role": "user", "content": "What is a lease?"}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "A hold."}
SAID = {"role": "assistant", "content": "A hold on blocks."}
LATER = {"role": "user", "content": [{"type": "input_text", "text": "For how long?"}]}
TALK: list[Any] = [HI, CALL, OUTPUT, SAID, LATER]
SUMMARY = "They spoke of leases."


def texts(stack: Stack) -> list[str]:
    prompt = stack.engine.requests[-1].prompt
    parts = (part for message in prompt.messages for part in message.parts)
    return [part.text for part in parts if isinstance(part, protocol.TextPart)]


def summarize(stack: Stack, text: str = SUMMARY, reason: protocol.FinishReason = "stop") -> None:
    deltas = [protocol.ThinkingDelta("hm"), protocol.TextDelta(text)]
    stack.engine.script = frames(*deltas, protocol.Finished(reason=reason, output_tokens=9))


# The SDK's type of a message in an output is the assistant's.
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_a_conversation_is_summarized_and_gone_on_with(stack: Stack) -> None:
    client = stack.openai()
    summarize(stack)
    compacted = client.responses.compact(model=MODEL, input=TALK, instructions="Rules.")
    assert compacted.usage.output_tokens == 9
    prompt = stack.engine.requests[-1].prompt
    assert texts(stack)[-2] == "For how long?" and texts(stack)[-1].startswith("Summarize")
    assert prompt.system == [protocol.TextPart("Rules.")] and not prompt.tools
    *users, item = compacted.output
    assert [user.type for user in users] == ["message", "message"]
    assert item.type == "compaction" and SUMMARY not in item.encrypted_content
    go_on: Any = {"role": "user", "content": "And then?"}
    for carried in (
        compacted.output,
        [part.model_dump() for part in compacted.output],
        [part.model_dump(exclude_unset=True) for part in compacted.output],
    ):
        client.responses.create(model=MODEL, input=[*carried, go_on], store=False)  # type: ignore[misc]
        first, second, summary, last = texts(stack)
        assert (first, second, last) == ("What is a lease?", "For how long?", "And then?")
        assert summary.endswith(f"\n{SUMMARY}")
    client.responses.compact(model=MODEL, input=[*compacted.output, go_on])  # type: ignore[list-item]
    assert texts(stack)[2] == summary, "a compaction may be compacted"


def test_a_compaction_tells_that_no_class_of_a_day_is_kept(stack: Stack) -> None:
    summarize(stack)
    compact: Any = stack.openai().responses.compact
    for retention, paths in (("24h", ["prompt_cache_retention"]), ("in_memory", [])):
        answer = compact(model=MODEL, input=TALK, prompt_cache_retention=retention)
        ignored = answer.model_extra["holdfast"].get("ignored", [])
        assert [field["path"] for field in ignored] == paths


def test_a_text_and_a_conversation_that_is_kept_can_be_compacted(stack: Stack) -> None:
    summarize(stack)
    [user, item] = stack.openai().responses.compact(model=MODEL, input="What is a lease?").output
    assert user.content[0].text == "What is a lease?" and item.type == "compaction"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stream": True}, "stream"),
        ({"tools": [LOOK]}, "tools"),
        ({"nonsense": 1}, "nonsense"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"input": [HI, CALL]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_what_is_wrong_is_named(stack: Stack, changes: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "input": TALK, **changes}
    reply = stack.post("/v1/responses/compact", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert not stack.engine.requests


def test_a_summary_that_did_not_end_is_none(stack: Stack) -> None:
    summarize(stack, reason="length")
    with pytest.raises(openai.BadRequestError, match="did not end"):
        stack.openai().responses.compact(model=MODEL, input=TALK)
    summarize(stack, text=" ")
    with pytest.raises(openai.InternalServerError):
        stack.openai().responses.compact(model=MODEL, input=TALK)


def test_a_wish_for_a_compaction_in_a_response_names_the_call(stack: Stack) -> None:
    body = {"model": MODEL, "input": [HI, {"type": "compaction_trigger"}]}
    reply = stack.post("/v1/responses", json=body)
    assert reply.status_code == 400 and "/v1/responses/compact" in reply.text
    answer = asked(stack, context_management=[{"type": "compaction"}])
    assert "/v1/responses/compact" in answer["holdfast"]["ignored"][0]["reason"]
