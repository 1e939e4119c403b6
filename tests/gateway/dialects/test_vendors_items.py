"""Items of the vendor's own servers in a conversation: read, told, or refused where without them
the answer would be wrong."""

from typing import Any

import openai
import pytest

from engine import protocol
from gateway.dialects.responses.lower import COMPACTION, seal, unseal
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import LOOK, MESSAGES, MODEL, chat, frames
from tests.gateway.responses_bodies import asked, refused

HI = {"role": "user", "content": "Hi"}
MCP = {
    "type": "mcp_call",
    "id": "mcp_1",
    "name": "ask",
    "server_label": "wiki",
    "arguments": '{"q": "lease"}',
}


def parts(stack: Stack) -> list[protocol.Part]:
    return [part for message in stack.engine.requests[-1].prompt.messages for part in message.parts]


def ran(stack: Stack, item: dict[str, Any]) -> tuple[str, Any, str]:
    """Name, input and output of the call that an item became."""
    answer = asked(stack, input=[HI, item, HI])
    assert "ignored" not in answer["holdfast"]
    [_, call, result, _] = parts(stack)
    assert isinstance(call, protocol.ToolUsePart) and isinstance(result, protocol.ToolResultPart)
    assert call.id == result.tool_use_id == item["id"]
    return call.name, call.input, result.text


def test_calls_that_the_vendor_ran_keep_their_outputs(stack: Stack) -> None:
    name = "wiki__ask"
    assert ran(stack, {**MCP, "output": "A hold."}) == (name, {"q": "lease"}, "A hold.")
    fault = {"type": "http_error", "code": 500, "message": "no"}
    assert "500" in ran(stack, {**MCP, "error": fault})[2]
    code = {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "code": "print(6 * 7)",
        "container_id": "c",
        "status": "completed",
        "outputs": [
            {"type": "logs", "logs": "42"},
            {"type": "image", "url": "https://example.com/plot.png"},
        ],
    }
    output = "42\n[image: not shown to this model]"
    assert ran(stack, code) == ("code_interpreter", {"code": "print(6 * 7)"}, output)
    assert ran(stack, {**code, "outputs": None})[2] == ""
    results = [{"file_id": "f", "filename": "a.md", "text": "A lease."}]
    files = {"type": "file_search_call", "id": "fs_1", "queries": ["lease"], "results": results}
    assert ran(stack, files) == ("file_search", {"queries": ["lease"]}, "a.md\nA lease.")


def test_what_has_no_output_is_left_out_and_told(stack: Stack) -> None:
    items = [
        {**MCP, "status": "calling"},
        {"type": "file_search_call", "id": "fs_1", "queries": ["x"], "results": None},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
    ]
    answer = asked(stack, input=[HI, *items])
    paths = [item["path"] for item in answer["holdfast"]["ignored"]]
    assert paths == ["input[1]", "input[2]", "input[3]"]
    assert len(parts(stack)) == 1


@pytest.mark.parametrize("field", ["name", "arguments", "output"])
def test_a_wrong_value_of_such_a_call_is_named(stack: Stack, field: str) -> None:
    error = refused(stack, input=[HI, {**MCP, "output": "x", field: [1]}])
    assert error["param"] == f"input[1].{field}"


def test_a_compaction_of_another_server_is_refused_and_of_this_one_read(stack: Stack) -> None:
    """Without it the model would not know what it stands for."""
    item = {"type": "compaction", "id": "cmp_1"}
    for sealed in ("gAAAA", seal("They spoke of leases.", "another workspace", COMPACTION)):
        error = refused(stack, input=[{**item, "encrypted_content": sealed}, HI])
        assert error["param"] == "input[0]" and "send the items" in error["message"]
    scope = stack.engine.requests[-1].scope if stack.engine.requests else ""
    asked(stack)
    scope = stack.engine.requests[-1].scope
    sealed = seal("They spoke of leases.", scope, COMPACTION)
    assert unseal(sealed, scope) is None, "it is no thought"
    asked(stack, input=[{**item, "encrypted_content": sealed}, HI])
    texts = [part.text for part in parts(stack) if isinstance(part, protocol.TextPart)]
    assert texts[0].endswith("\nThey spoke of leases.") and texts[1] == "Hi"


def test_settings_that_change_in_a_conversation_are_in_effect(stack: Stack) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    update = {"type": "configuration_update", "text": {"format": form}}
    asked(stack, input=[HI, update, HI])
    assert stack.engine.requests[-1].output_schema == {"type": "object"}
    back = {"type": "configuration_update", "text": {"format": {"type": "text"}}}
    asked(stack, input=[HI, update, HI, back])
    assert stack.engine.requests[-1].output_schema is None


def test_an_output_without_a_call_is_a_text_of_the_users(stack: Stack) -> None:
    asked(stack, input=[HI, {"type": "function_call_output", "name": "look", "output": "Rain."}])
    assert parts(stack)[1] == protocol.TextPart("look:\nRain.")


CUSTOM: Any = {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_custom_tool_of_chat_is_called_with_a_text_and_sent_back(
    stack: Stack, is_streamed: bool
) -> None:
    stack.engine.script = frames(
        protocol.ToolUseStart("call_1", "patch"),
        protocol.ToolInputDelta('{"input": "*** Begin'),
        protocol.ToolInputDelta(' Patch"}'),
        protocol.ToolUseStart("call_2", "look"),
        protocol.ToolInputDelta("{}"),
        protocol.Finished(reason="tool_use", output_tokens=9),
    )
    tools = [CUSTOM, LOOK]
    if is_streamed:
        calls: list[Any] = []
        for chunk in chat(stack, tools=tools, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                if piece.id:
                    calls.append(piece.model_dump(exclude_unset=True))
        message: Any = {"role": "assistant", "content": None, "tool_calls": calls}
        custom = calls[0]["custom"]
        assert [call["index"] for call in calls] == [0, 1]
    else:
        message = chat(stack, tools=tools).choices[0].message
        custom = message.tool_calls[0].custom.model_dump()
    assert custom == {"name": "patch", "input": "*** Begin Patch"}
    results = [
        {"role": "tool", "tool_call_id": call_id, "content": "Done."}
        for call_id in ("call_1", "call_2")
    ]
    forced = {"type": "custom", "custom": {"name": "patch"}}
    chat(stack, messages=[*MESSAGES, message, *results], tools=tools, tool_choice=forced)
    assert stack.engine.requests[-1].tool_choice.name == "patch"
    inputs = [part.input for part in parts(stack) if isinstance(part, protocol.ToolUsePart)]
    assert inputs == [{"input": "*** Begin Patch"}, {}]


def test_what_is_missing_in_a_custom_tool_or_call_is_named(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(stack, tools=[{"type": "custom"}])
    assert refusal.value.param == "tools[0].custom"
    call = {"id": "c", "type": "custom", "function": {"name": "x", "arguments": "{}"}}
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(stack, messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    assert refusal.value.param == "messages[1].tool_calls[0].custom"


def test_a_conversation_from_before_there_were_tools_is_read(stack: Stack) -> None:
    called = {"name": "look", "arguments": '{"where": "here"}'}
    message = {"role": "assistant", "content": None, "function_call": called}
    result: Any = {"role": "function", "name": "look", "content": "Rain."}
    chat(stack, messages=[*MESSAGES, message, result])
    [_, call, answer] = parts(stack)
    assert isinstance(call, protocol.ToolUsePart) and isinstance(answer, protocol.ToolResultPart)
    assert (call.input, answer.text) == ({"where": "here"}, "Rain.")
    assert call.id == answer.tool_use_id
    for messages in ([*MESSAGES, result], [*MESSAGES, message, result, result]):
        with pytest.raises(openai.BadRequestError, match="role 'function'"):
            chat(stack, messages=messages)


def test_an_answer_of_nothing_can_be_sent_back_in_chat(stack: Stack) -> None:
    nothing: Any = {"role": "assistant", "content": None}
    chat(stack, messages=[*MESSAGES, nothing, HI])
    assert [type(part) for part in parts(stack)] == [protocol.TextPart, protocol.TextPart]


def test_a_call_of_the_vendors_program_is_the_models_own_here(stack: Stack) -> None:
    caller = {"type": "code_execution_20260120", "tool_id": "srvtoolu_1"}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}, "caller": caller}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "Rain."}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = stack.sdk().messages.create(model=MODEL, max_tokens=4, messages=messages)
    assert answer.model_extra is not None
    ignored = answer.model_extra["holdfast"]["ignored"]
    assert [item["path"] for item in ignored] == ["messages.1.content.0.caller"]
