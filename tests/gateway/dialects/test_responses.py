"""POST /v1/responses through the official SDK, over a scripted engine; caching in OpenAI's APIs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from msgspec import structs
from pydantic import BaseModel

from engine.protocol import (
    FIRST_TTLS,
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
from gateway.dialects.responses.lower import seal, unseal
from tests.gateway.admin_client import Admin
from tests.gateway.conftest import Stack, stacked
from tests.gateway.openai_bodies import LONG_TEXT, MODEL, chat, frames
from tests.gateway.responses_bodies import EVERYTHING, LOOK, PATCH, asked, refused, streamed, user
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ADMIN_KEY, eventually

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
    ("tool", "written", "action"),
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
    stack: Stack, tool: Any, written: dict[str, Any], action: dict[str, Any]
) -> None:
    name = tool["type"]
    text = json.dumps(written)
    stack.engine.script = frames(
        ToolUseStart(id="call_1", name=name),
        *(ToolInputDelta(text[:7]), ToolInputDelta(text[7:])),
        Finished(reason="tool_use", output_tokens=9),
    )
    # The SDK knows no such choice of a local shell.
    choice = "required" if name == "local_shell" else {"type": name}
    events = streamed(stack, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    [definition] = stack.engine.requests[-1].prompt.tools
    assert definition.name == name and set(written) <= set(definition.input_schema["properties"])
    forced = ToolChoice("any") if name == "local_shell" else ToolChoice("tool", name)
    assert stack.engine.requests[-1].tool_choice == structs.replace(forced, parallel=False)
    jsonschema.validate(written, definition.input_schema)
    assert kinds(events)[2:-1] == ["output_item.added", "output_item.done"]
    (call,) = events[-1]["response"]["output"]
    field = "operation" if name == "apply_patch" else "action"
    assert (call["type"], call["call_id"], call[field]) == (f"{name}_call", "call_1", action)
    output = {"type": f"{name}_call_output", "call_id": "call_1", "output": "done"}
    if name == "shell":
        output["output"] = [{"stdout": "done", "stderr": "", "outcome": {"type": "timeout"}}]
    asked(stack, input=[user("x"), {**call, "caller": None}, output], tools=[tool])
    spoke, gave = stack.engine.requests[-1].prompt.messages[1:]
    assert spoke.parts == [ToolUsePart("call_1", name, written)], "as the model wrote it"
    assert isinstance(gave.parts[0], ToolResultPart) and "done" in gave.parts[0].text


def test_a_clients_call_that_is_cut_off_or_wrong_has_its_fields(stack: Stack) -> None:
    tools = [{"type": name} for name in ("shell", "local_shell", "apply_patch")]
    for name, written, action in (
        ("shell", '{"commands": ["ls", "pw', {"commands": ["ls", "pw"]}),
        ("local_shell", '{"command": "ls"}', {"type": "exec", "command": [], "env": {}}),
        ("apply_patch", "{", {"type": "update_file", "path": "", "diff": ""}),
    ):
        stack.engine.script = frames(
            ToolUseStart(id="call_1", name=name),
            ToolInputDelta(written),
            Finished(reason="length", output_tokens=9),
        )
        [call] = asked(stack, tools=tools)["output"]
        assert action == (call.get("action") or call["operation"])
        assert call["status"] == ("in_progress" if name == "apply_patch" else "incomplete")


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


def test_no_response_is_kept(stack: Stack) -> None:
    client = stack.openai()
    answer = client.responses.create(model=MODEL, input="Hi", store=True)
    assert answer.model_extra is not None
    assert answer.model_extra["store"] is False
    assert answer.model_extra["holdfast"]["ignored"][0]["path"] == "store"
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="none is kept"):
            call(answer.id)
    with pytest.raises(openai.BadRequestError, match="HOLDFAST_RESPONSE_DAYS") as caught:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"
    # As the AI SDK names its own answer, whatever `store` the response had.
    named: Any = {"type": "item_reference", "id": answer.output[0].id}
    with pytest.raises(openai.BadRequestError, match=r"RESPONSE_DAYS.*Send the item") as caught:
        client.responses.create(model=MODEL, input=[user("Hi"), named, user("And then?")])
    assert caught.value.param == "input[1]"


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stacked(tmp_path_factory.mktemp("keeping"), response_days=30) as stack:
        yield stack


def texts_of(request: GenerateRequest) -> list[tuple[str, str]]:
    return [
        (message.role, part.text)
        for message in request.prompt.messages
        for part in message.parts
        if isinstance(part, TextPart)
    ]


SPOKEN = [("user", "Hi"), ("assistant", "Hello there"), ("user", "And then?")]


def test_a_response_that_is_kept_is_gone_on_with(keeping: Stack) -> None:
    client = keeping.openai()
    first = client.responses.create(model=MODEL, input="Hi", instructions="Be brief.")
    assert first.model_extra is not None and first.model_extra["store"] is True
    with client.responses.stream(
        model=MODEL, input=[user("And then?")], previous_response_id=first.id
    ) as stream:
        second = stream.get_final_response()
    assert second.previous_response_id == first.id
    request = keeping.engine.requests[-1]
    assert texts_of(request) == SPOKEN and not request.prompt.system, (
        "instructions are not carried on"
    )
    # What the first wrote, the second can find: all names of its prompt are the second's too.
    before = keeping.engine.requests[-2]
    assert before.prompt.messages == request.prompt.messages[:1]
    third = client.responses.create(model=MODEL, input="x", previous_response_id=second.id)
    assert texts_of(keeping.engine.requests[-1])[:3] == SPOKEN
    assert len(texts_of(keeping.engine.requests[-1])) == 5
    client.responses.delete(first.id)
    client.responses.create(model=MODEL, input="y", previous_response_id=third.id)
    assert SPOKEN[0] not in texts_of(keeping.engine.requests[-1]), "what is deleted is gone"
    with pytest.raises(openai.BadRequestError, match="it was deleted, its time is over") as caught:
        client.responses.create(model=MODEL, input="y", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_kept_response_is_compacted_with_all_before_it(keeping: Stack) -> None:
    client = keeping.openai()
    first = client.responses.create(model=MODEL, input="One?")
    second = client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)
    compacted = client.responses.compact(model=MODEL, previous_response_id=second.id)
    users = [item.content[0].text for item in compacted.output[:-1]]  # type: ignore[union-attr]
    assert users == ["One?", "Two?"] and compacted.output[-1].type == "compaction"
    assert len(texts_of(keeping.engine.requests[-1])) == 5


def test_a_kept_response_is_shown_with_its_input_and_deleted(keeping: Stack) -> None:
    client = keeping.openai()
    turns: Any = [user("a", "b"), {"role": "assistant", "content": "c"}, user("d")]
    response = client.responses.create(model=MODEL, input=turns, metadata={"k": "v"})
    again = client.responses.retrieve(response.id)
    assert again.to_dict() == response.to_dict()
    listed = client.responses.input_items.list(response.id, order="asc", limit=2)
    items = list(listed)
    assert [item.type for item in items] == ["message"] * 3
    assert len({item.id for item in items}) == 3
    newest = client.responses.input_items.list(response.id, limit=1)
    assert [item.id for item in newest.data] == [items[-1].id] and newest.has_more
    assert list(client.responses.input_items.list(response.id, after=items[0].id)) == []
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    unkept = client.responses.create(model=MODEL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_conversation_grows_with_its_responses(keeping: Stack) -> None:
    client = keeping.openai()
    message: Any = {"type": "message", "role": "user", "content": "Hi"}
    talk = client.conversations.create(items=[message], metadata={"topic": "x"})
    client.responses.create(model=MODEL, input="One", conversation=talk.id)
    answer = client.responses.create(model=MODEL, input="Two", conversation={"id": talk.id})
    assert answer.conversation is not None and answer.conversation.id == talk.id
    words = ["Hi", "One", "Hello there", "Two"]
    assert [text for _, text in texts_of(keeping.engine.requests[-1])] == words
    items = client.conversations.items.list(talk.id, order="asc")
    assert len(list(items)) == 5
    assert client.conversations.retrieve(talk.id).metadata == {"topic": "x"}
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.BadRequestError, match="not found"):
        client.responses.create(model=MODEL, input="Three", conversation=talk.id)
    assert client.responses.retrieve(answer.id).id == answer.id


def test_a_conversations_items_are_added_and_deleted_and_its_metadata_changed(
    keeping: Stack,
) -> None:
    client = keeping.openai()
    talk = client.conversations.create(metadata={"topic": "x"})
    messages: Any = [
        {"type": "message", "role": "user", "content": word} for word in ("One", "Two")
    ]
    added = client.conversations.items.create(talk.id, items=messages)
    assert added.object == "list" and len(added.data) == 2 and not added.has_more
    first, second = (item.id or "" for item in added.data)
    assert [item.to_dict()["status"] for item in added.data] == ["completed"] * 2
    assert client.conversations.items.retrieve(first, conversation_id=talk.id) == added.data[0]
    answer = client.responses.create(model=MODEL, input="Three", conversation=talk.id)
    client.conversations.items.create(talk.id, items=[{"role": "user", "content": "Four"}])
    left = client.conversations.items.delete(first, conversation_id=talk.id)
    assert (left.id, left.metadata) == (talk.id, {"topic": "x"})
    client.conversations.items.delete(answer.output[0].id or "", conversation_id=talk.id)
    client.responses.create(model=MODEL, input="Five", conversation=talk.id)
    said = [text for _, text in texts_of(keeping.engine.requests[-1])]
    assert said == ["Two", "Three", "Four", "Five"]
    for call in (client.conversations.items.retrieve, client.conversations.items.delete):
        with pytest.raises(openai.NotFoundError, match=first):
            call(first, conversation_id=talk.id)
    assert client.conversations.update(talk.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert client.conversations.retrieve(talk.id).metadata == {"topic": "y"}
    client.conversations.delete(talk.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.create(talk.id, items=messages)
    assert client.responses.retrieve(answer.id).output_text == "Hello there"
    assert second not in str(client.responses.retrieve(answer.id).to_dict())


def test_what_no_conversation_can_be_given_is_named(keeping: Stack) -> None:
    client = keeping.openai()
    talk = client.conversations.create().id
    refer: Any = {"type": "item_reference", "id": "msg_1"}
    wrong: list[tuple[Any, str]] = [
        (lambda: client.conversations.items.create(talk, items=[]), "items"),
        (lambda: client.conversations.items.create(talk, items=[refer]), r"items\[0\]"),
        (lambda: client.conversations.create(items=[refer]), r"items\[0\]"),
        (
            lambda: client.post(f"/conversations/{talk}", body={"items": []}, cast_to=object),
            "items",
        ),
    ]
    for call, words in wrong:
        with pytest.raises(openai.BadRequestError, match=words):
            call()


def test_a_workspace_that_has_kept_all_it_may_is_told_its_bound_and_nothing_is_dropped(
    tmp_path: Path,
) -> None:
    with stacked(tmp_path, response_days=30, response_bytes=2000) as stack:
        client = stack.openai()
        response_ids: list[str] = []
        with pytest.raises(openai.RateLimitError, match="limit of 2000 bytes of kept responses"):
            for _ in range(50):
                response_ids.append(client.responses.create(model=MODEL, input="Hi").id)
        with pytest.raises(openai.RateLimitError, match="2000 bytes"):
            client.conversations.create()
        assert client.responses.create(model=MODEL, input="Hi", store=False).output_text
        for response_id in response_ids:
            client.responses.retrieve(response_id)
            client.responses.delete(response_id)

        def has_room() -> bool:
            try:
                return bool(client.responses.create(model=MODEL, input="Hi").id)
            except openai.RateLimitError:
                return False

        eventually(has_room)


def test_an_item_of_a_kept_response_is_named_by_its_id(keeping: Stack) -> None:
    client = keeping.openai()
    first = client.responses.create(model=MODEL, input="Hi")
    named = {"type": "item_reference", "id": first.output[0].id}
    again: Any = [user("Hi"), named, user("And then?")]
    client.responses.create(model=MODEL, input=again)
    assert texts_of(keeping.engine.requests[-1]) == SPOKEN
    again[1] = {"id": "msg_0000"}
    with pytest.raises(openai.BadRequestError, match="its time is over") as caught:
        client.responses.create(model=MODEL, input=again)
    assert caught.value.param == "input[1]"


def test_no_other_workspace_sees_what_is_kept(keeping: Stack) -> None:
    response = keeping.openai().responses.create(model=MODEL, input="Hi")
    talk = keeping.openai().conversations.create()
    admin = Admin(keeping.url, ADMIN_KEY)
    admin.workspace("other")
    key = admin.make_key("other")[1]
    stranger = openai.OpenAI(base_url=f"{keeping.url}/v1", api_key=key, max_retries=0)
    with pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        stranger.responses.delete(response.id)
    for named in ({"previous_response_id": response.id}, {"conversation": talk.id}):
        with pytest.raises(openai.BadRequestError, match="not found"):
            stranger.responses.create(model=MODEL, input="x", **named)
    assert keeping.openai().responses.retrieve(response.id).id == response.id


def test_thoughts_of_another_workspace_or_server_are_not_read() -> None:
    sealed = seal("Hm.", "a" * 32)
    assert unseal(sealed, "a" * 32) == "Hm."
    assert unseal(sealed, "b" * 32) is None
    for damaged in ("", "gAAAA", "hf1.", "hf1.%%%", sealed[:-4] + "AAAA", sealed + "é"):
        assert unseal(damaged, "a" * 32) is None


TALK = [user(LONG_TEXT), {"role": "assistant", "content": "Yes."}, user("And now?")]
MARK = {"mode": "explicit"}


def marked(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_text", "text": text, "prompt_cache_breakpoint": {**MARK, **more}}


def sent(stack: Stack) -> list[tuple[int, str]]:
    return [(point.segment, point.ttl) for point in stack.engine.requests[-1].breakpoints]


def posted(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    with stack.http(ADMIN_KEY) as http:
        reply = http.post(f"/admin/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_who_marks_nothing_reads_the_prompt_before(stack: Stack) -> None:
    first = asked(stack, instructions="Rules.", tools=[LOOK], input=TALK[:1])
    assert sent(stack) == [(1, "5m"), (2, "5m")]
    details = first["usage"]["input_tokens_details"]
    assert details["cached_tokens"] == 0
    assert details["cache_write_tokens"] > len(LONG_TEXT) // 4
    assert "cache_write_tokens_details" not in details, "they are held for five minutes"
    second = asked(stack, instructions="Rules.", tools=[LOOK], input=TALK)
    assert sent(stack) == [(1, "5m"), (2, "5m"), (4, "5m")]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == details["cache_write_tokens"]
    assert second["holdfast"]["auto_cache"] == {"mode": "conversation", "ttl": "5m"}
    paths = [point["path"] for point in second["holdfast"]["breakpoints"]]
    assert paths == ["instructions", "input[0].content[0]", "input[2].content[0]"]


def test_options_are_the_clients_own(stack: Stack) -> None:
    implicit = asked(stack, input=TALK, prompt_cache_options={})
    assert sent(stack) == [(2, "30m")]
    details = implicit["usage"]["input_tokens_details"]
    written = {"ttl_30m_tokens": details["cache_write_tokens"], "ttl_12h_tokens": 0}
    assert details["cache_write_tokens_details"] == written
    assert implicit["prompt_cache_options"] == {"mode": "implicit", "ttl": "30m"}
    assert "auto_cache" not in implicit["holdfast"]
    asked(stack, input=TALK, prompt_cache_options=MARK)
    assert sent(stack) == []


def test_of_many_breakpoints_the_latest_count(stack: Stack) -> None:
    content = [marked(f"{LONG_TEXT} {n}") for n in range(6)]
    talk = [{"role": "user", "content": content}]
    asked(stack, input=talk, prompt_cache_options=MARK)
    assert sent(stack) == [(2, "30m"), (3, "30m"), (4, "30m"), (5, "30m")]
    asked(stack, input=[*talk, user("x")], prompt_cache_options={"mode": "implicit"})
    assert sent(stack) == [(3, "30m"), (4, "30m"), (5, "30m"), (6, "30m")]
    asked(stack, input=[*talk, user("x")])
    assert sent(stack) == [(3, "30m"), (4, "30m"), (5, "30m"), (6, "5m")]
    short = asked(stack, input=TALK, prompt_cache_retention="in_memory")
    assert "ignored" not in short["holdfast"]
    day = asked(stack, input=TALK, prompt_cache_retention="24h")
    assert [entry["path"] for entry in day["holdfast"]["ignored"]] == ["prompt_cache_retention"]
    error = refused(stack, input=[{"role": "user", "content": [marked("")]}])
    assert error["param"] == "input[0].content[0]"


def written_for(answer: dict[str, Any]) -> tuple[int, int]:
    """The tokens that were written for 30 minutes, and for 12 hours."""
    details = answer["usage"]["input_tokens_details"]
    shares = details["cache_write_tokens_details"]
    assert sum(shares.values()) == details["cache_write_tokens"]
    return shares["ttl_30m_tokens"], shares["ttl_12h_tokens"]


def test_twelve_hours_are_held_and_billed_as_such(stack: Stack) -> None:
    answer = asked(stack, input=TALK, prompt_cache_options={"ttl": "12h"})
    assert sent(stack) == [(2, "12h")]
    assert answer["prompt_cache_options"] == {"mode": "implicit", "ttl": "12h"}
    assert "ignored" not in answer["holdfast"]
    short, long = written_for(answer)
    assert short == 0 < long
    row = Admin(stack.url).recorded(f"msg_{answer['id'].removeprefix('resp_')}")
    assert row["cache_write_12h_tokens"] == long and row["prefix_ttl"] == "12h"
    assert row["cache_write_5m_tokens"] == row["cache_write_30m_tokens"] == 0


def test_a_requests_ttl_is_the_least_of_each_breakpoint(stack: Stack) -> None:
    parts = [marked(f"{LONG_TEXT} 1", ttl="30m"), marked(f"{LONG_TEXT} 2", ttl="12h")]
    parts += [marked(f"{LONG_TEXT} 3")]
    talk = [{"role": "user", "content": parts}]
    # What stands in front of a longer one is held as long as that, and costs no more.
    answer = asked(stack, input=talk, prompt_cache_options=MARK)
    assert sent(stack) == [(0, "12h"), (1, "12h"), (2, "30m")]
    short, long = written_for(answer)
    assert 0 < short < long
    asked(stack, input=talk, prompt_cache_options={**MARK, "ttl": "12h"})
    assert sent(stack) == [(0, "12h"), (1, "12h"), (2, "12h")]
    last = [{"role": "user", "content": [marked(LONG_TEXT, ttl="12h")]}]
    asked(stack, input=last, prompt_cache_options={"mode": "implicit"})
    assert sent(stack) == [(0, "12h")], "the client's own stands where the implicit one would"


def test_an_engine_of_before_the_class_holds_its_longest_and_the_answer_says_so(
    tmp_path: Path,
) -> None:
    with stacked(tmp_path, ScriptedEngine(ttls=FIRST_TTLS)) as stack:
        answer = asked(stack, input=TALK, prompt_cache_options={"ttl": "12h"})
        assert sent(stack) == [(2, "1h")]
        assert answer["prompt_cache_options"] == {"mode": "implicit", "ttl": "30m"}
        (ignored,) = answer["holdfast"]["ignored"]
        assert ignored["path"] == "input[2].content[0]"
        assert ignored["reason"] == "this engine holds nothing for longer than 1 hour"
        assert written_for(answer)[1] == 0
        row = Admin(stack.url).recorded(f"msg_{answer['id'].removeprefix('resp_')}")
        assert row["cache_write_12h_tokens"] == 0 and row["prefix_ttl"] == "1h"


def test_prewarming_writes_and_generates_nothing(stack: Stack) -> None:
    options = {"tool_choice": "required", "prompt_cache_options": {"prewarm": True}}
    answer = asked(stack, input=TALK[:1], tools=[LOOK], **options)
    (request,) = stack.engine.requests
    assert request.sampling.max_tokens == 0
    assert request.tool_choice.mode == "auto"
    assert answer["status"] == "completed"


def test_generating_nothing_is_prewarming(stack: Stack) -> None:
    asked(stack, input=TALK[:1], generate=True)
    assert stack.engine.requests[-1].sampling.max_tokens is None
    options = {"tool_choice": "required", "generate": False}
    stack.engine.script = frames(Finished(reason="length", output_tokens=0))
    answer = asked(stack, input=TALK[:1], tools=[LOOK], **options)
    request = stack.engine.requests[-1]
    assert request.sampling.max_tokens == 0
    assert request.tool_choice.mode == "auto"
    assert sent(stack) == [(1, "30m")], "the prompt's end is held"
    assert (answer["status"], answer["output"]) == ("completed", [])


@pytest.mark.parametrize("how", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
def test_a_prewarmed_response_that_is_kept_is_gone_on_with(
    keeping: Stack, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    client = keeping.openai()
    script = frames(Finished(reason="length", output_tokens=0))
    monkeypatch.setattr(keeping.engine, "script", script)
    ready = client.responses.create(
        model=MODEL,
        input=[user(LONG_TEXT)],
        store=True,
        extra_body=how,  # type: ignore[arg-type]
    )
    assert (ready.output, ready.model_extra and ready.model_extra["store"]) == ([], True)
    before = keeping.engine.requests[-1].prompt
    client.responses.create(model=MODEL, input="And now?", previous_response_id=ready.id)
    after = keeping.engine.requests[-1].prompt
    assert after.messages[0].parts[:1] == before.messages[0].parts
    unkept = client.responses.create(
        model=MODEL,
        input=[user(LONG_TEXT)],
        extra_body=how,  # type: ignore[arg-type]
    )
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="x", previous_response_id=unkept.id)


def test_a_response_is_compared_with_an_earlier_one(stack: Stack) -> None:
    first = asked(stack, instructions="Rules.", input=TALK[:1])

    def diagnosed(response_id: str, **body: Any) -> Any:
        options = {"comparison_response_id": response_id}
        answer = asked(stack, **{"instructions": "Rules.", **body}, prompt_cache_options=options)
        assert answer["prompt_cache_options"]["comparison_response_id"] == response_id
        return answer["prompt_cache_diagnostics"]

    assert diagnosed(first["id"], input=TALK) == {"type": "unavailable"}, "not a marked place"
    asked(stack, instructions="Rules.", input=TALK)
    assert diagnosed(first["id"], input=TALK) == {"type": "cache_hit"}
    changed = diagnosed(first["id"], input=[user("Other.")])
    assert (changed["type"], changed["reason"]) == ("cache_miss", "input_changed")
    tools = diagnosed(first["id"], input=TALK, tools=[LOOK])
    assert (tools["type"], tools["reason"]) == ("cache_miss", "tools_changed")
    nobody = diagnosed("resp_" + "0" * 28, input=TALK)
    assert nobody["type"] in ("comparison_response_not_found", "unavailable")


@pytest.mark.parametrize("speaks", ["chat", "responses"])
def test_keys_and_workspaces_have_policies(stack: Stack, speaks: str) -> None:
    posted(stack, "workspaces", id=f"w-{speaks}", auto_cache="off")
    created = posted(stack, "keys", workspace=f"w-{speaks}")
    assert created["info"]["auto_cache"] is None

    def ask() -> list[tuple[int, str]]:
        client = stack.openai(created["key"])
        says: Any = [{"role": "system", "content": LONG_TEXT}, {"role": "user", "content": "Hi"}]
        if speaks == "chat":
            client.chat.completions.create(model=MODEL, messages=says)
        else:
            client.responses.create(model=MODEL, instructions=LONG_TEXT, input="Hi")
        return sent(stack)

    assert ask() == []
    posted(stack, f"workspaces/w-{speaks}", auto_cache="prefix", auto_cache_ttl="1h")
    assert ask() == [(0, "1h")]
    key = posted(stack, f"keys/{created['info']['id']}", auto_cache="conversation")
    assert key["auto_cache"] == "conversation"
    assert ask() == [(0, "1h"), (1, "1h")]
    posted(stack, f"keys/{created['info']['id']}", auto_cache=None)
    posted(stack, f"workspaces/w-{speaks}", auto_cache=None, auto_cache_ttl=None)
    assert ask() == [(0, "5m"), (1, "5m")]


def test_in_chat_completions_the_clients_markers_are_all(stack: Stack) -> None:
    hi = {"role": "user", "content": "Hi"}
    anthropic = {"cache_control": {"type": "ephemeral"}}
    native = {"prompt_cache_breakpoint": MARK}
    for marker, expected in ((anthropic, [(0, "5m")]), (native, [(0, "30m"), (1, "5m")])):
        content = [{"type": "text", "text": LONG_TEXT, **marker}]
        chat(stack, messages=[{"role": "system", "content": content}, hi])
        assert sent(stack) == expected
    stack.post("/v1/messages", json={"model": MODEL, "max_tokens": 5, "messages": [hi]})
    assert sent(stack) == [], "the Messages API caches what its client marks"
