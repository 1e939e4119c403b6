"""The search for tools of the Responses API: the client's own, and the vendor's servers'."""

from typing import Any

import msgspec
import pytest
from openai.types.responses import ResponseToolSearchCall

from engine import protocol
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MODEL, frames
from tests.gateway.responses_bodies import LOOK, asked, refused, streamed

QUERY = {
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
}
SEARCH: dict[str, Any] = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": QUERY,
}
DEFERRED = {**LOOK, "defer_loading": True}
NAMESPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [DEFERRED]}
HI = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_search_call", "arguments": {"query": "look"}, "execution": "client"}
OUTPUT = {"type": "tool_search_output", "execution": "client"}


def says(*calls: tuple[str, str]) -> Any:
    """A turn that calls functions by name with these arguments."""
    call_frames: list[protocol.Frame] = []
    for number, (name, arguments) in enumerate(calls):
        call_frames.append(protocol.ToolUseStart(f"call_{number}", name))
        call_frames.append(protocol.ToolInputDelta(arguments))
    return frames(*call_frames, protocol.Finished(reason="tool_use", output_tokens=9))


def sent(stack: Stack) -> protocol.Prompt:
    return stack.engine.requests[-1].prompt


def parts(stack: Stack) -> list[protocol.Part]:
    return [part for message in sent(stack).messages for part in message.parts]


def test_a_search_of_the_clients_own_is_called_and_what_it_comes_to_can_be(stack: Stack) -> None:
    client = stack.openai()
    stack.engine.script = says(("tool_search", '{"query": "look"}'))
    tools: Any = [SEARCH, DEFERRED]
    first = client.responses.create(model=MODEL, input="Hi", tools=tools, store=False)
    [search] = sent(stack).tools
    assert (search.name, search.description, search.input_schema) == (
        *("tool_search", "Finds tools."),
        QUERY,
    )
    [item] = first.output
    assert isinstance(item, ResponseToolSearchCall)
    assert (item.arguments, item.execution, item.call_id) == ({"query": "look"}, "client", "call_0")
    assert "ignored" not in (first.model_extra or {})["holdfast"]
    results: Any = {**OUTPUT, "call_id": item.call_id, "tools": [DEFERRED]}
    stack.engine.script = says(("look", '{"where": "here"}'))
    asked_again: Any = {"model": MODEL, "tools": tools, "store": False}
    again = client.responses.create(input=[HI, *first.output, results], **asked_again)
    [call] = again.output
    assert (call.type, call.name) == ("function_call", "look")  # type: ignore[union-attr]
    assert [tool.name for tool in sent(stack).tools] == ["tool_search"], "the beginning stays"
    [named] = sent(stack).named_tools
    assert (named.name, named.input_schema) == ("look", LOOK["parameters"])
    [_, searched, result] = parts(stack)
    assert isinstance(searched, protocol.ToolUsePart)
    assert (searched.name, searched.input) == ("tool_search", {"query": "look"})
    assert isinstance(result, protocol.ToolResultPart)
    assert msgspec.json.decode(result.text.removeprefix("Tool: "))["function"]["name"] == "look"
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}  # type: ignore[union-attr]
    whole: Any = [HI, *first.output, results, *again.output, answer]
    forced = {"type": "function", "name": "look"}
    client.responses.create(input=whole, tool_choice=forced, **asked_again)
    assert stack.engine.requests[-1].tool_choice.name == "look"


def test_a_streamed_search_has_the_sdks_events(stack: Stack) -> None:
    stack.engine.script = says(("tool_search", '{"query": "look"}'))
    events = streamed(stack, tools=[SEARCH])
    [end_event] = [event for event in events if event["type"] == "response.output_item.done"]
    assert end_event["item"]["arguments"] == {"query": "look"}


def test_a_namespace_that_a_search_came_to_has_its_tools_back(stack: Stack) -> None:
    results = {**OUTPUT, "call_id": "s", "tools": [NAMESPACE]}
    stack.engine.script = says(("crm__look", "{}"))
    answer = asked(stack, input=[HI, {**CALL, "call_id": "s"}, results], tools=[SEARCH, NAMESPACE])
    assert [tool.name for tool in sent(stack).tools] == ["tool_search"]
    assert [tool.name for tool in sent(stack).named_tools] == ["crm__look"]
    [call] = answer["output"]
    assert (call["name"], call["namespace"]) == ("look", "crm")


@pytest.mark.parametrize("execution", ["client", "server"])
@pytest.mark.parametrize("call_id", ["s", None])
def test_a_history_with_searches_is_read(stack: Stack, execution: str, call_id: str | None) -> None:
    """Where nothing searches now, what was found can still be called."""
    joined = {"execution": execution, "call_id": call_id, "status": "completed"}
    call = {**CALL, **joined, "id": "tsc_1"}
    output = {**OUTPUT, **joined, "id": "tso_1", "tools": [LOOK]}
    asked(stack, input=[HI, call, output, call, {**output, "tools": []}, HI])
    assert [tool.name for tool in sent(stack).named_tools] == ["look"]
    searches = [part for part in parts(stack) if isinstance(part, protocol.ToolUsePart)]
    results = [part for part in parts(stack) if isinstance(part, protocol.ToolResultPart)]
    assert [part.id for part in searches] == [part.tool_use_id for part in results]
    assert len(searches) == 2 and results[1].text == "No tools were loaded."


def test_without_a_search_of_the_clients_deferred_tools_are_shown(stack: Stack) -> None:
    answer = asked(stack, tools=[{"type": "tool_search"}, DEFERRED])
    assert [tool.name for tool in sent(stack).tools] == ["look"]
    paths = [item["path"] for item in answer["holdfast"]["ignored"]]
    assert paths == ["tools[0]", "tools[1].defer_loading"]


def test_a_search_that_stands_alone_is_named(stack: Stack) -> None:
    error = refused(stack, input=[HI, {**CALL, "call_id": "s"}, HI], tools=[SEARCH])
    assert "No tool output found for function call s" in error["message"]
    error = refused(stack, input=[HI, {**OUTPUT, "call_id": "s", "tools": []}], tools=[SEARCH])
    assert "No tool call found" in error["message"]
    answer = asked(stack, input=[HI, {**CALL, "execution": "server"}, HI])
    assert answer["holdfast"]["ignored"][0]["path"] == "input[1]"


def test_a_cut_search_can_be_sent_back(stack: Stack) -> None:
    stack.engine.script = frames(
        protocol.ToolUseStart("call_0", "tool_search"),
        protocol.ToolInputDelta('{"query": "lo'),
        protocol.Finished(reason="length", output_tokens=9),
    )
    first = asked(stack, tools=[SEARCH])
    [item] = first["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", {"query": "lo"})
    output = {**OUTPUT, "call_id": item["call_id"], "tools": []}
    asked(stack, input=[HI, item, output], tools=[SEARCH])
