"""What a client got, it sends back with its next turn, whatever ended the turn before."""

import json
from typing import Any

import msgspec
import pytest

from engine import protocol
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import LOOK, MESSAGES, MODEL, chat, frames

CUT = '{"title": "dem'
NO_OBJECTS = [
    CUT,
    "null",
    "[1]",
    '"x"',
    '{"a": 1}{"b": 2}',
    '{"a": "line\nend"}',
    '{"a": NaN}',
    '{"a": 1e400}',
    '{"id": 123456789012345678901234567890}',
    '{"a": ' * 100 + "1" + "}" * 100,
    '{"a": ' * 5000,
]
FUNCTION = {"type": "function", "name": "look", "parameters": LOOK["function"]["parameters"]}


def cut_call(arguments: str) -> list[bytes]:
    return frames(
        protocol.ToolUseStart("call_1", "look"),
        protocol.ToolInputDelta(arguments),
        protocol.Finished(reason="length", output_tokens=9),
    )


def input_seen(stack: Stack) -> Any:
    (call,) = (
        part
        for message in stack.engine.requests[-1].prompt.messages
        for part in message.parts
        if isinstance(part, protocol.ToolUsePart)
    )
    return call.input


@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=lambda text: text[:24])
def test_a_call_without_an_object_can_be_sent_back_in_chat(stack: Stack, arguments: str) -> None:
    stack.engine.script = cut_call(arguments)
    [choice] = chat(stack, tools=[LOOK]).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == arguments
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Not valid JSON."}
    stack.engine.script = frames(protocol.Finished(reason="stop", output_tokens=1))
    chat(stack, messages=[*MESSAGES, choice.message, result], tools=[LOOK])
    assert input_seen(stack) == arguments


@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=lambda text: text[:24])
def test_a_call_without_an_object_can_be_sent_back_in_responses(
    stack: Stack, arguments: str
) -> None:
    create: Any = stack.openai().responses.create
    stack.engine.script = cut_call(arguments)
    first = create(model=MODEL, input="Where?", tools=[FUNCTION], store=False)
    assert first.status == "incomplete"
    assert first.output[-1].arguments == arguments
    carried = [item.model_dump(exclude_none=True) for item in first.output]
    output = {"type": "function_call_output", "call_id": "call_1", "output": "Not valid JSON."}
    asked = {"role": "user", "content": "Where?"}
    stack.engine.script = frames(protocol.Finished(reason="stop", output_tokens=1))
    create(model=MODEL, input=[asked, *carried, output], tools=[FUNCTION], store=False)
    assert input_seen(stack) == arguments


@pytest.mark.parametrize("value", [2**63, 10**40, -(2**63) - 1])
def test_a_long_integer_in_a_call_crosses_as_text(stack: Stack, value: int) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"id": value, "é": ["x"]}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}
    body = {
        "model": MODEL,
        "max_tokens": 4,
        "messages": [
            *MESSAGES,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }
    response = stack.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert input_seen(stack) == json.dumps(call["input"], ensure_ascii=False)
    contents = [
        {"role": "user", "parts": [{"text": "Where?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"id": value}}}]},
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "look", "response": {"id": value}}}],
        },
    ]
    path = f"/v1beta/models/{MODEL}:generateContent"
    response = stack.post(path, json={"contents": contents})
    assert response.status_code == 200, response.text
    assert msgspec.json.decode(input_seen(stack)) == {"id": value}


def test_an_answer_without_content_can_be_sent_back(stack: Stack) -> None:
    stack.engine.script = frames(protocol.Finished(reason="stop", output_tokens=1))
    client = stack.sdk()
    first = client.messages.create(model=MODEL, max_tokens=4, messages=MESSAGES)
    assert first.content == []
    go_on = {"role": "user", "content": "Go on."}
    said: Any = {"role": "assistant", "content": first.content}
    client.messages.create(model=MODEL, max_tokens=4, messages=[*MESSAGES, said, go_on])
    [choice] = chat(stack).choices
    chat(stack, messages=[*MESSAGES, choice.message, go_on])
    chat(stack, messages=[*MESSAGES, {"role": "assistant", "content": []}, go_on])
    create: Any = stack.openai().responses.create
    asked = {"role": "user", "content": "Where?"}
    empty = create(model=MODEL, input=[asked], store=False)
    carried = [item.model_dump(exclude_none=True) for item in empty.output]
    create(model=MODEL, input=[asked, *carried, go_on], store=False)
    blank = {"type": "message", "role": "assistant", "content": []}
    create(model=MODEL, input=[asked, blank, go_on], store=False)
