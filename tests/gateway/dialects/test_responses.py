"""POST /v1/responses through the official SDK, over a scripted engine: its answers and events,
its tools, and what it refuses."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from msgspec import structs
from pydantic import BaseModel

from engine.protocol import (
    ErrorReply,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    InputUsage,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolChoice,
    ToolInputDelta,
    ToolResultPart,
    ToolUsePart,
    ToolUseStart,
)
from gateway.dialects.responses.client_tools import arguments_in
from gateway.dialects.responses.lower import seal, unseal
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MODEL, frames
from tests.gateway.responses_bodies import EVERYTHING, LOOK, PATCH, asked, refused, streamed, user

CALL = (
    ToolUseStart(id="call_1", name="look"),
    ToolInputDelta('{"where": '),
    ToolInputDelta('"here"}'),
    Finished(reason="tool_use", output_tokens=9),
)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_is_answered(stack: Stack) -> None:
    answer = stack.openai().responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    assert answer.output_text == "Hello there"
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert (answer.temperature, answer.top_p, answer.tool_choice) == (0.5, 1.0, "auto")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 2
    assert answer.usage.total_tokens == answer.usage.input_tokens + 2
    (request,) = stack.engine.requests
    assert request.prompt.system == [TextPart("Be brief.")]
    assert request.prompt.messages[0].parts == [TextPart("Hi")]
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, None)


def test_input_tokens_are_counted_as_they_are_billed_and_refused_as_a_turn_is(stack: Stack) -> None:
    """The SDK's call, with all that it may send."""
    asking: Any = {"model": MODEL, "input": [user("Hi", "there")], "instructions": "Be brief."}
    asking |= {"tools": [LOOK], "parallel_tool_calls": False, "truncation": "auto"}
    client = stack.openai()
    counting = client.responses.input_tokens
    counted = counting.count(**asking, personality="friendly")
    answer = client.responses.create(**asking)
    assert counted.object == "response.input_tokens"
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens > 0
    assert len(stack.engine.requests) == 1  # counting is no turn
    with pytest.raises(openai.BadRequestError, match="input: must have at least one") as refused:
        counting.count(model=MODEL, input=[])
    assert refused.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        counting.count(model="nobody", input="Hi")
    with pytest.raises(openai.BadRequestError, match="'resp_1' not found"):
        counting.count(model=MODEL, previous_response_id="resp_1")


def test_a_stream_has_all_events_in_order(stack: Stack) -> None:
    events = streamed(stack)
    assert kinds(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    whole = events[-1]["response"]
    assert whole["output"] == [events[-2]["item"]]
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {whole["output"][0]["id"]}
    with stack.openai().responses.stream(model=MODEL, input="Hi") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts == ["Hello", " there"]
    assert final.output_text == "Hello there"


def test_the_answer_without_a_stream_is_the_streams_last_event(stack: Stack) -> None:
    stack.engine.script = frames(ThinkingDelta("Hm."), TextDelta("I look."), *CALL)
    body = {"tools": [LOOK], "include": ["reasoning.encrypted_content"]}
    whole = asked(stack, **body)
    last = streamed(stack, **body)[-1]["response"]
    for changing in ("id", "created_at", "usage", "holdfast"):
        whole.pop(changing), last.pop(changing)
    ids = [[item.pop("id")[:3] for item in answer["output"]] for answer in (whole, last)]
    assert ids == [["rs_", "msg", "fc_"]] * 2
    assert whole == last


def test_a_call_and_its_output_make_the_next_prompt(stack: Stack) -> None:
    stack.engine.script = frames(ThinkingDelta("Hm."), *CALL)
    create: Any = stack.openai().responses.create
    include = ["reasoning.encrypted_content"]
    first = create(model=MODEL, input="Where?", tools=[LOOK], include=include, store=False)
    call = first.output[-1]
    assert call.type == "function_call"
    assert (call.call_id, call.name, call.arguments) == ("call_1", "look", '{"where": "here"}')
    output = {"type": "function_call_output", "call_id": "call_1", "output": "a cat"}
    carried = [item.model_dump(exclude_none=True) for item in first.output]
    create(model=MODEL, input=[user("Where?"), *carried, output], tools=[LOOK])
    _, called, answered = stack.engine.requests[-1].prompt.messages
    assert (called.role, answered.role) == ("assistant", "user")
    use = ToolUsePart("call_1", "look", {"where": "here"})
    assert called.parts == [ThinkingPart("Hm."), use]
    assert answered.parts == [ToolResultPart("call_1", "a cat")]


def test_the_events_of_a_call_and_of_reasoning(stack: Stack) -> None:
    stack.engine.script = frames(ThinkingDelta("Hm."), *CALL)
    assert kinds(streamed(stack, tools=[LOOK]))[2:-1] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
    ]
    events = streamed(stack, tools=[LOOK], reasoning={"effort": "low", "summary": "auto"})
    assert kinds(events)[2:8] == [
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
    ]
    assert events[7]["item"]["summary"] == [{"type": "summary_text", "text": "Hm."}]


def test_a_custom_tool_is_called_with_a_text(stack: Stack) -> None:
    stack.engine.script = frames(
        ToolUseStart(id="call_1", name="patch"),
        ToolInputDelta('{"input": "line 1\\nl'),
        ToolInputDelta('ine 2"}'),
        Finished(reason="tool_use", output_tokens=9),
    )
    events = streamed(stack, tools=[PATCH])
    assert kinds(events)[2:-1] == [
        *("output_item.added", "custom_tool_call_input.delta"),
        *("custom_tool_call_input.done", "output_item.done"),
    ]
    (call,) = events[-1]["response"]["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", "line 1\nline 2")
    output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
    asked(stack, input=[user("x"), call, output], tools=[PATCH])
    prompt = stack.engine.requests[-1].prompt
    assert prompt.tools[0].input_schema["required"] == ["input"]
    assert prompt.messages[1].parts == [ToolUsePart("call_1", "patch", {"input": "line 1\nline 2"})]


@pytest.mark.parametrize(
    ("tool", "model_input", "action"),
    [
        (
            {"type": "shell", "environment": {"type": "local"}},
            *({"timeout_ms": 9, "commands": ["ls -l", "pwd"]},) * 2,
        ),
        (
            {"type": "local_shell"},
            {"command": ["ls", "-l"], "working_directory": "/tmp"},
            {"type": "exec", "command": ["ls", "-l"], "working_directory": "/tmp", "env": {}},
        ),
        (
            {"type": "apply_patch"},
            *({"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},) * 2,
        ),
        ({"type": "apply_patch"}, *({"type": "delete_file", "path": "a.py"},) * 2),
    ],
)
def test_openais_tools_that_run_at_the_client_are_called_in_their_own_shapes(
    stack: Stack, tool: Any, model_input: dict[str, Any], action: dict[str, Any]
) -> None:
    name = tool["type"]
    text = json.dumps(model_input)
    stack.engine.script = frames(
        ToolUseStart(id="call_1", name=name),
        *(ToolInputDelta(text[:7]), ToolInputDelta(text[7:])),
        Finished(reason="tool_use", output_tokens=9),
    )
    # The SDK knows no such choice of a local shell.
    choice = "required" if name == "local_shell" else {"type": name}
    events = streamed(stack, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    [definition] = stack.engine.requests[-1].prompt.tools
    assert definition.name == name and set(model_input) <= set(
        definition.input_schema["properties"]
    )
    forced = ToolChoice("any") if name == "local_shell" else ToolChoice("tool", name)
    assert stack.engine.requests[-1].tool_choice == structs.replace(forced, parallel=False)
    jsonschema.validate(model_input, definition.input_schema)
    assert kinds(events)[2:-1] == ["output_item.added", "output_item.done"]
    (call,) = events[-1]["response"]["output"]
    field = "operation" if name == "apply_patch" else "action"
    assert (call["type"], call["call_id"], call[field]) == (f"{name}_call", "call_1", action)
    output = {"type": f"{name}_call_output", "call_id": "call_1", "output": "done"}
    if name == "shell":
        output["output"] = [{"stdout": "done", "stderr": "", "outcome": {"type": "timeout"}}]
    asked(stack, input=[user("x"), {**call, "caller": None}, output], tools=[tool])
    spoke, gave = stack.engine.requests[-1].prompt.messages[1:]
    assert spoke.parts == [ToolUsePart("call_1", name, model_input)], "as the model wrote it"
    assert isinstance(gave.parts[0], ToolResultPart) and "done" in gave.parts[0].text


def test_a_clients_call_that_is_cut_off_or_wrong_has_its_fields(stack: Stack) -> None:
    tools = [{"type": name} for name in ("shell", "local_shell", "apply_patch")]
    for name, model_input, action in (
        ("shell", '{"commands": ["ls", "pw', {"commands": ["ls", "pw"]}),
        ("local_shell", '{"command": "ls"}', {"type": "exec", "command": [], "env": {}}),
        ("apply_patch", "{", {"type": "update_file", "path": "", "diff": ""}),
    ):
        stack.engine.script = frames(
            ToolUseStart(id="call_1", name=name),
            ToolInputDelta(model_input),
            Finished(reason="length", output_tokens=9),
        )
        [call] = asked(stack, tools=tools)["output"]
        assert action == (call.get("action") or call["operation"])
        assert call["status"] == ("in_progress" if name == "apply_patch" else "incomplete")


def test_an_empty_object_in_an_action_is_left_out_only_where_it_is_the_default() -> None:
    action = {"commands": ["ls"], "env": {}}
    assert arguments_in("shell", action) == action
    assert arguments_in("local_shell", {"type": "exec", **action}) == {"commands": ["ls"]}


def test_a_shell_in_the_vendors_container_is_left_out_and_a_computer_refused(stack: Stack) -> None:
    hosted = {"type": "shell", "environment": {"type": "container_auto"}}
    answer = asked(stack, tools=[hosted, {**LOOK, "name": "shell"}, {"type": "shell"}])
    assert [entry["path"] for entry in answer["holdfast"]["ignored"]] == ["tools[0]"]
    assert [tool.name for tool in stack.engine.requests[-1].prompt.tools] == ["shell", "shell_2"]
    error = refused(stack, tools=[{"type": "computer_use_preview"}])
    assert error["param"] == "tools[0].type" and "screenshots" in error["message"]
    assert "not in tools" in refused(stack, tools=[hosted], tool_choice=hosted)["message"]


def test_tools_of_a_namespace_have_names_of_their_own_and_map_back(stack: Stack) -> None:
    namespace: dict[str, Any] = {"type": "namespace", "name": "mcp__files", "description": "Files."}
    namespace["tools"] = [{**LOOK, "description": None}, PATCH]
    taken = {**LOOK, "name": "mcp__files__look"}
    stack.engine.script = frames(ToolUseStart("call_1", "mcp__files__look_2"), *CALL[1:])
    tools = [LOOK, namespace, {"type": "web_search"}, taken]
    answer = asked(stack, tools=tools)
    definitions = stack.engine.requests[-1].prompt.tools
    names = [tool.name for tool in definitions]
    assert names == ["look", "mcp__files__look_2", "mcp__files__patch", "mcp__files__look"]
    assert definitions[1].description == "Files."
    (call,) = answer["output"]
    assert (call["name"], call["namespace"]) == ("look", "mcp__files")
    assert answer["tools"] == tools
    assert [entry["path"] for entry in answer["holdfast"]["ignored"]] == ["tools[2]"]
    output = {"type": "function_call_output", "call_id": "call_1", "output": []}
    asked(stack, input=[user("x"), call, output], tools=tools)
    use = ToolUsePart("call_1", "mcp__files__look_2", {"where": "here"})
    assert stack.engine.requests[-1].prompt.messages[1].parts == [use]


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


BOTH = ["look", "patch"]


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("none", ToolChoice("none"), BOTH),
        ("required", ToolChoice("any"), BOTH),
        ({"type": "function", "name": "look"}, ToolChoice("tool", "look"), BOTH),
        ({"type": "custom", "name": "patch"}, ToolChoice("tool", "patch"), BOTH),
        (allowed("auto", PATCH), ToolChoice("auto", names=["patch"]), BOTH),
        (allowed("auto", LOOK, {"type": "custom", "name": "patch"}), ToolChoice("auto"), BOTH),
        (allowed("required", PATCH), ToolChoice("any", names=["patch"]), BOTH),
        (allowed("auto"), ToolChoice("none"), BOTH),
    ],
)
def test_every_choice_of_tools_is_held(
    stack: Stack, choice: Any, expected: ToolChoice, names: list[str]
) -> None:
    answer = asked(stack, tools=[LOOK, PATCH], tool_choice=choice, parallel_tool_calls=False)
    assert answer["tool_choice"] == choice
    (request,) = stack.engine.requests
    assert request.tool_choice == structs.replace(expected, parallel=False)
    assert [tool.name for tool in request.prompt.tools] == names


def test_the_answers_form(stack: Stack) -> None:
    class Place(BaseModel):
        where: str

    stack.engine.script = frames(
        TextDelta('{"where": "here"}'), Finished(reason="stop", output_tokens=9)
    )
    answer = stack.openai().responses.parse(model=MODEL, input="Hi", text_format=Place)
    assert answer.output_parsed == Place(where="here")
    request = stack.engine.requests[-1]
    assert request.output_schema is not None
    assert request.output_schema["properties"]["where"]["type"] == "string"
    asked(stack, text={"format": {"type": "json_object"}})
    assert stack.engine.requests[-1].output_schema == {"type": "object"}


def test_an_answer_that_was_cut_off_is_incomplete(stack: Stack) -> None:
    stack.engine.script = frames(TextDelta("He"), Finished(reason="length", output_tokens=1))
    answer = asked(stack, max_output_tokens=1)
    assert (answer["status"], answer["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert answer["output"][0]["status"] == "incomplete"
    assert kinds(streamed(stack, max_output_tokens=1))[-1] == "incomplete"


def test_a_failure_in_the_midst_is_the_streams_last_event(stack: Stack) -> None:
    def script(request: GenerateRequest, _: InputUsage) -> list[Frame | float | bytes]:
        return [TextDelta("Hel"), Failed(code="internal", message="secret detail")]

    stack.engine.script = script
    events = streamed(stack)
    assert kinds(events)[-2:] == ["output_text.delta", "failed"]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "secret" not in str(failed)
    with pytest.raises(openai.InternalServerError):
        stack.openai().responses.create(model=MODEL, input="Hi")


def test_what_agents_send_is_answered(stack: Stack) -> None:
    """Fields that ask for better have no effect, and what had none is told."""
    answer = asked(stack, **EVERYTHING)
    paths = [item["path"] for item in answer["holdfast"]["ignored"]]
    assert {"input[1].content[1]", "input[2]", "input[3]", "tools[1]"} <= set(paths)
    (request,) = stack.engine.requests
    assert request.prompt.system == [TextPart("Rules. " * 30)]
    placeholder = "[image: PNG, not shown to this model]"
    assert request.prompt.messages[0].parts[1:] == [TextPart(placeholder), TextPart("a.txt\nhello")]
    roles = [message.role for message in request.prompt.messages]
    assert roles[:3] == ["user", "assistant", "user"] and roles[-1] == "system"


def test_the_engines_refusals_name_this_apis_fields(stack: Stack) -> None:
    stack.engine.refusal = ErrorReply("prompt_too_long", "prompt is too long: 9 tokens > 8 maximum")
    error = refused(stack)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    stack.engine.refusal = ErrorReply("invalid_request", "tools[1].input_schema: too deep", True)
    nested = {"type": "namespace", "name": "n", "tools": [LOOK]}
    error = refused(stack, tools=[PATCH, nested])
    assert error["param"] == "tools[1].tools[0].parameters"


CALLED = {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
AUDIO = {"role": "user", "content": [{"type": "audio"}]}
SEARCH = {"type": "web_search"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "with `store` set to false"),
        ({"conversation": "conv_1"}, "conversation", "not found"),
        ({"background": True}, "background", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"input": []}, "input", "at least one message"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "item references"),
        ({"input": [{"id": "msg_1"}]}, "input[0]", "item references"),
        ({"input": [{"type": "nonsense"}]}, "input[0].type", "Invalid value: 'nonsense'"),
        ({"input": [{"type": 3}]}, "input[0].type", "Expected 'str'"),
        ({"input": [[]]}, "input[0]", "must be an object"),
        ({"input": [{"role": "user"}]}, "input[0].content", "Missing required"),
        ({"input": [user("x"), AUDIO]}, "input[1].content[0].type", "Invalid value: 'audio'"),
        ({"input": [user("x"), {"role": "assistant", "content": "y"}]}, "input", "must not end"),
        ({"input": [user("x"), OUTPUT]}, "input", "No tool call found"),
        ({"input": [CALLED, user("x")]}, "input", "No tool output found for function call c"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name", "unique"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing required"),
        ({"tools": [{}]}, "tools[0].type", "Missing required"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "function", "name": "no"}},
            *("tool_choice", "not in tools"),
        ),
        ({"tools": [SEARCH], "tool_choice": SEARCH}, "tool_choice", "not in tools"),
        ({"tool_choice": {"name": "x"}}, "tool_choice", "missing required"),
        ({"metadata": {"a": "b" * 513}}, "metadata[...]", "length <= 512"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"nonsense": 1}, "nonsense", "Unrecognized"),
    ],
)
def test_what_is_wrong_is_named(stack: Stack, body: Any, param: str, words: str) -> None:
    error = refused(stack, **body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert not stack.engine.requests


def test_thoughts_of_another_workspace_or_server_are_not_read() -> None:
    sealed = seal("Hm.", "a" * 32)
    assert unseal(sealed, "a" * 32) == "Hm."
    assert unseal(sealed, "b" * 32) is None
    for damaged in ("", "gAAAA", "hf1.", "hf1.%%%", sealed[:-4] + "AAAA", sealed + "é"):
        assert unseal(damaged, "a" * 32) is None
