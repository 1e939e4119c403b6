"""What a client got, it sends back with its next turn, whatever ended the turn before."""

import json
from typing import Any

import msgspec
import openai
import pydantic
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
    question = {"role": "user", "content": "Where?"}
    stack.engine.script = frames(protocol.Finished(reason="stop", output_tokens=1))
    create(model=MODEL, input=[question, *carried, output], tools=[FUNCTION], store=False)
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
    message: Any = {"role": "assistant", "content": first.content}
    client.messages.create(model=MODEL, max_tokens=4, messages=[*MESSAGES, message, go_on])
    [choice] = chat(stack).choices
    chat(stack, messages=[*MESSAGES, choice.message, go_on])
    chat(stack, messages=[*MESSAGES, {"role": "assistant", "content": []}, go_on])
    create: Any = stack.openai().responses.create
    question = {"role": "user", "content": "Where?"}
    empty = create(model=MODEL, input=[question], store=False)
    carried = [item.model_dump(exclude_none=True) for item in empty.output]
    create(model=MODEL, input=[question, *carried, go_on], store=False)
    blank = {"type": "message", "role": "assistant", "content": []}
    create(model=MODEL, input=[question, blank, go_on], store=False)


class Weather(pydantic.BaseModel):
    """What an SDK parses into."""

    where: str


def ignored_paths(answer: Any) -> set[str]:
    return {field["path"] for field in answer.model_extra["holdfast"]["ignored"]}


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_the_sdk_parsed_can_be_sent_back(stack: Stack, is_streamed: bool) -> None:
    client = stack.openai().chat.completions
    stack.engine.script = frames(
        protocol.TextDelta('{"where": "there"}'),
        protocol.ToolUseStart("call_1", "look"),
        protocol.ToolInputDelta('{"where": "here"}'),
        protocol.Finished(reason="tool_use", output_tokens=9),
    )
    schema: Any = Weather
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": [openai.pydantic_function_tool(Weather, name="look")],
        "response_format": schema,
    }
    if is_streamed:
        with client.stream(**body) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.parse(**body).choices[0].message
    assert message.parsed == Weather(where="there") and message.tool_calls
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}
    answer = chat(stack, messages=[*MESSAGES, message, result], tools=body["tools"])
    paths = {"messages[1].parsed", "messages[1].tool_calls[0].function.parsed_arguments"}
    assert paths <= ignored_paths(answer)
    assert input_seen(stack) == {"where": "here"}


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_the_sdk_parsed_can_be_sent_back_in_responses(stack: Stack, is_streamed: bool) -> None:
    responses = stack.openai().responses
    stack.engine.script = frames(
        protocol.ThinkingDelta("hm"),
        protocol.TextDelta('{"where": "there"}'),
        protocol.ToolUseStart("call_1", "look"),
        protocol.ToolInputDelta('{"where": "here"}'),
        protocol.Finished(reason="tool_use", output_tokens=9),
    )
    tool = openai.pydantic_function_tool(Weather, name="look")
    body: Any = {
        "model": MODEL,
        "input": [{"role": "user", "content": "Where?"}],
        "tools": [{"type": "function", **tool["function"]}],
        "text_format": Weather,
    }
    if is_streamed:
        with responses.stream(**body) as events:
            answer = events.get_final_response()
    else:
        answer = responses.parse(**body)
    assert answer.output_parsed == Weather(where="there")
    assert answer.output[-1].parsed_arguments is not None  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": "call_1", "output": "Rain."}
    # The SDK's own objects, and all of their fields.
    dumped = [item.model_dump() for item in answer.output]
    for carried in (answer.output, dumped):
        responses.parse(**{**body, "input": [*body["input"], *carried, result]})
        assert input_seen(stack) == {"where": "here"}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_the_sdk_parsed_can_be_sent_back_in_messages(stack: Stack, is_streamed: bool) -> None:
    messages = stack.sdk().messages
    stack.engine.script = frames(
        protocol.TextDelta('{"where": "there"}'),
        protocol.ToolUseStart("call_1", "look"),
        protocol.ToolInputDelta('{"where": "here"}'),
        protocol.Finished(reason="tool_use", output_tokens=9),
    )
    tool = {"name": "look", "input_schema": LOOK["function"]["parameters"]}
    body: Any = {
        "model": MODEL,
        "max_tokens": 64,
        "messages": MESSAGES,
        "tools": [tool],
        "output_format": Weather,
    }
    if is_streamed:
        with messages.stream(**body) as events:
            answer: Any = events.get_final_message()
    else:
        answer = messages.parse(**body)
    assert answer.parsed_output == Weather(where="there")
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "Rain."}
    message = {"role": "assistant", "content": answer.content}
    messages.parse(
        **{**body, "messages": [*MESSAGES, message, {"role": "user", "content": [result]}]}
    )
    assert input_seen(stack) == {"where": "here"}


def test_unknown_fields_of_contents_and_tools_are_left_out_and_told(stack: Stack) -> None:
    """Google's dialect: what is unknown beside them stays an error."""
    call = {"functionCall": {"name": "look", "args": {"x": 1}, "extra": 1}, "vendor": {"a": [1]}}
    result = {"functionResponse": {"name": "look", "response": {"y": 1}, "metadata": {}}}
    contents = [
        {"role": "user", "parts": [{"text": "Where?", "annotations": []}], "id": "u1"},
        {"role": "model", "parts": [{"thoughtSignature": "eA=="}, call]},
        {"role": "user", "parts": [result]},
    ]
    tool = {"functionDeclarations": [{"name": "look", "vendor": 1}], "other": {}}
    body = {
        "contents": contents,
        "tools": [tool],
        "systemInstruction": {"parts": [{"text": "Rules.", "x": 1}]},
    }
    unknown = {
        *("contents[0].parts[0].annotations", "contents[0].id"),
        *("contents[1].parts[1].functionCall.extra", "contents[1].parts[1].vendor"),
        "contents[2].parts[0].functionResponse.metadata",
        *("tools[0].functionDeclarations[0].vendor", "tools[0].other"),
        "systemInstruction.parts[0].x",
    }
    path = f"/v1beta/models/{MODEL}"
    response = stack.post(f"{path}:generateContent", json=body)
    assert response.status_code == 200, response.text
    ignored = {item["path"] for item in response.json()["holdfast"]["ignored"]}
    assert ignored == {*unknown, "contents[1].parts[0]"}
    assert input_seen(stack) == {"x": 1}
    counted = stack.post(f"{path}:countTokens", json={"generateContentRequest": body})
    assert counted.status_code == 200, counted.text
    for changes in ({"unknown": 1}, {"generationConfig": {"unknown": 1}}, {"toolConfig": {"x": 1}}):
        refusal = stack.post(f"{path}:generateContent", json={**body, **changes})
        assert refusal.status_code == 400 and "Cannot find field" in refusal.text
    misspelt = {"contents": [{"role": "user", "parts": [{"txt": "Where?"}]}]}
    refusal = stack.post(f"{path}:generateContent", json=misspelt)
    assert refusal.status_code == 400 and "contents[0].parts[0].txt" in refusal.text


def test_a_cached_content_tells_of_unknown_fields(stack: Stack) -> None:
    parts = [{"text": "Rules of the house. " * 300, "vendor": 1}]
    body = {"model": f"models/{MODEL}", "contents": [{"role": "user", "parts": parts}]}
    response = stack.post("/v1beta/cachedContents", json=body)
    assert response.status_code == 200, response.text
    [ignored] = response.json()["holdfast"]["ignored"]
    assert ignored["path"] == "contents[0].parts[0].vendor"


def test_unknown_fields_of_a_conversation_are_left_out_and_told(stack: Stack) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look", "arguments": "{}", "parsed_arguments": {}},
        "provider_specific_fields": {"a": 1},
        "extra_content": {"google": {"thought_signature": "x"}},
    }
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "I look.", "annotations": []}],
        "tool_calls": [call],
        "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
        "reasoning_text": "hm",
        "reasoning_opaque": "x",
        "extra_content": {},
        "id": "msg_1",
        "phase": "final",
        "images": [],
        "citations": [],
        "__source": "client",
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Rain.", "metadata": {"a": "b"}}
    question = {"role": "user", "content": "Where?", "id": "u1", "metadata": {}}
    tool = {**LOOK, "vendor": True, "function": {**LOOK["function"], "returns": "text"}}
    answer = chat(stack, messages=[question, message, result], tools=[tool])
    assert ignored_paths(answer) == {
        *("messages[0].id", "messages[0].metadata", "messages[2].metadata"),
        "messages[1].content[0].annotations",
        "messages[1].tool_calls[0].function.parsed_arguments",
        *(f"messages[1].tool_calls[0].{n}" for n in ("provider_specific_fields", "extra_content")),
        *(
            f"messages[1].{name}"
            for name in message
            if name not in ("role", "content", "tool_calls")
        ),
        *("tools[0].vendor", "tools[0].function.returns"),
    }
    prompt = stack.engine.requests[-1].prompt
    assert input_seen(stack) == {} and [tool.name for tool in prompt.tools] == ["look"]


def test_unknown_fields_of_messages_and_items_are_left_out_and_told(stack: Stack) -> None:
    text = {"type": "text", "text": "Hi.", "annotations": []}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": {"y": 1}}, "extra": 1}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text], "metadata": {}}
    messages: Any = [
        {"role": "user", "content": [text], "id": "u1"},
        {"role": "assistant", "content": [call], "stop_reason": "tool_use", "usage": {}},
        {"role": "user", "content": [result]},
    ]
    tool: Any = {"name": "look", "input_schema": {"type": "object", "x-own": 1}, "vendor": 1}
    answer = stack.sdk().messages.create(
        model=MODEL, max_tokens=4, messages=messages, tools=[tool], system=[text]
    )
    assert ignored_paths(answer) == {
        "messages.0.content.0.text.annotations",
        "messages.0.id",
        "messages.1.content.0.tool_use.extra",
        *("messages.1.stop_reason", "messages.1.usage"),
        "messages.2.content.0.tool_result.content.0.text.annotations",
        "messages.2.content.0.tool_result.metadata",
        *("system.0.annotations", "tools.0.vendor"),
    }
    assert input_seen(stack) == {"x": {"y": 1}}
    create: Any = stack.openai().responses.create
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Where?", "x": 1}],
            "author": 1,
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "extra": 1},
        {"type": "function_call_output", "call_id": "c", "output": "Rain.", "metadata": {}},
    ]
    answer = create(model=MODEL, input=items, tools=[{**FUNCTION, "vendor": 1}], store=False)
    assert ignored_paths(answer) == {
        *("input[0].content[0].x", "input[0].author", "input[1].extra", "input[2].metadata"),
        "tools[0].vendor",
    }


def test_what_is_known_stays_an_error(stack: Stack) -> None:
    """A marker where none can be, a wrong value, and an unknown field at the top."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "x", "unknown": 1}
    marked = {**thought, "cache_control": {"type": "ephemeral"}}
    for changes, path in (
        ({"messages": [{"role": "user", "content": 1, "id": "x"}]}, "messages.0.content"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": [marked]}]}, "cache_control"),
        ({"unknown": 1, "messages": [{**MESSAGES[0], "id": "x"}]}, "unknown: Extra inputs"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages.0.content: Field required"),
    ):
        body = {"model": MODEL, "max_tokens": 4, "messages": MESSAGES, **changes}
        response = stack.post("/v1/messages", json=body)
        assert response.status_code == 400 and path in response.text, response.text


ADVICE = {
    "cache_prompt": True,
    "id_slot": 3,
    "nvext": {"agent_hints": {"osl": 10}},
    "priority": 2,
    "session_id": "s",
}


def test_advice_of_other_servers_clients_is_left_out_and_told(stack: Stack) -> None:
    client = stack.openai()
    answers: list[Any] = [
        chat(stack, extra_body=ADVICE),
        client.completions.create(model=MODEL, prompt="x", extra_body=ADVICE),
        client.responses.create(model=MODEL, input="x", extra_body=ADVICE),
        stack.sdk().messages.create(
            model=MODEL, max_tokens=4, messages=MESSAGES, extra_body=ADVICE
        ),
    ]
    for answer in answers:
        assert ignored_paths(answer) == {*ADVICE}


def test_what_gateways_in_front_put_into_a_body_is_taken(stack: Stack) -> None:
    headers = {"anthropic_version": "bedrock-2023-05-31", "anthropic_beta": ["x"], "betas": ["y"]}
    answer = stack.sdk().messages.create(
        model=MODEL, max_tokens=4, messages=MESSAGES, extra_body=headers
    )
    assert answer.model_extra is not None
    assert "ignored" not in answer.model_extra["holdfast"]
    path = f"/v1beta/models/{MODEL}:generateContent"
    contents = [{"role": "user", "parts": [{"text": "Where?"}]}]
    response = stack.post(path, json={"contents": contents, "cachedContent": ""})
    assert response.status_code == 200, response.text


def test_a_response_that_a_resumed_session_doubles_is_left_out_and_told(stack: Stack) -> None:
    """As Gemini CLI 0.61.0 sends it after `--resume`: each response twice, with its call's id."""
    call = {"functionCall": {"id": "c1", "name": "look", "args": {"x": 1}}}
    result = {"functionResponse": {"id": "c1", "name": "look", "response": {"output": "Rain."}}}
    contents = [
        {"role": "user", "parts": [{"text": "Where?"}]},
        {"role": "model", "parts": [call]},
        {"role": "user", "parts": [result, {"text": "It is a picture."}, result]},
    ]
    path = f"/v1beta/models/{MODEL}:generateContent"
    response = stack.post(path, json={"contents": contents})
    assert response.status_code == 200, response.text
    [ignored] = response.json()["holdfast"]["ignored"]
    assert ignored["path"] == "contents[2].parts[2].functionResponse"
    kinds = [type(part) for part in stack.engine.requests[-1].prompt.messages[-1].parts]
    assert kinds == [protocol.ToolResultPart, protocol.TextPart]
    unasked = {"functionResponse": {"id": "c2", "name": "look", "response": {"output": "Snow."}}}
    contents[-1]["parts"].append(unasked)
    response = stack.post(path, json={"contents": contents})
    assert response.status_code == 400 and "parts[3].functionResponse" in response.text
    steps = [
        {"type": "user_input", "content": [{"type": "text", "text": "Where?"}]},
        {"type": "function_call", "id": "c1", "name": "look", "arguments": {"x": 1}},
        *2 * [{"type": "function_result", "call_id": "c1", "name": "look", "result": "Rain."}],
    ]
    body = {"model": MODEL, "input": steps, "store": False}
    response = stack.post("/v1beta/interactions", json=body)
    assert response.status_code == 200, response.text
    assert [entry["path"] for entry in response.json()["holdfast"]["ignored"]] == ["input[3]"]


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_any_part_of_a_conversation_is_counted(stack: Stack, first: int, last: int) -> None:
    """Gemini CLI counts a new response, with its image, alone."""
    call = {"functionCall": {"id": "c1", "name": "look", "args": {"x": 1}}}
    result = {"functionResponse": {"id": "c1", "name": "look", "response": {"output": "Rain."}}}
    contents = [
        {"role": "user", "parts": [{"text": "Where?"}]},
        {"role": "model", "parts": [call]},
        {"role": "user", "parts": [result]},
    ][min(first, last - 1) : last]
    path = f"/v1beta/models/{MODEL}:countTokens"
    response = stack.post(path, json={"contents": contents})
    assert response.status_code == 200, response.text
    assert response.json()["totalTokens"] > 0
