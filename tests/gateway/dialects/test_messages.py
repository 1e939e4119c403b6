"""Messages: their parts in prompt order, what is wrong by where and why, and what agents send:
images, documents, deferred tools, threads, the vendor's own tools."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import msgspec
import pytest

from engine.protocol import (
    Done,
    Finished,
    Frame,
    GenerateRequest,
    InputUsage,
    TextPart,
    ThinkingPart,
    ToolChoice,
    ToolInputDelta,
    ToolResultPart,
    ToolUsePart,
    ToolUseStart,
)
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.decode import decode_messages
from gateway.dialects.anthropic.lower import plan_of
from gateway.dialects.bodies import MAX_DEPTH
from gateway.prompt.plan import Plan
from tests.gateway.bodies import ASKED, SHORT, body, conversation, lowered, said, text, told, tool
from tests.gateway.conftest import Stack, stacked
from tests.gateway.openai_bodies import MODEL, refused
from tests.gateway.prompt.test_media import png

JSON = "The request body is not valid JSON"
DEEP = '{"tools":[{"name":"t","input_schema":' + '{"a":' * 100_000
FULL = '{"model":"m","messages":[],"max_tokens":1,'


@pytest.mark.parametrize(
    "raw, message",
    [
        ("", JSON),
        ("{", f"{JSON}: Input data was truncated"),
        ('{"model":"m",}', f"{JSON}: trailing comma in object (byte 13)"),
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


def plan(**changes: Any) -> Plan:
    return plan_of(decode_messages(msgspec.json.encode(body(**changes))), ASKED)


def test_every_tool_and_block_is_one_segment_in_prompt_order() -> None:
    prompt_plan = plan(**conversation())
    assert prompt_plan.prompt.num_segments == len(prompt_plan.slots)
    places = ["tools.0", "tools.1", "system.0"]
    places += [f"messages.{m}.content.{n}" for m, most in enumerate((2, 3, 2)) for n in range(most)]
    assert [slot.path for slot in prompt_plan.slots] == places
    assert prompt_plan.prompt.messages[1].parts == [
        ThinkingPart("I shall look."),
        TextPart("Looking."),
        ToolUsePart("toolu_1", "look", {"b": 1, "a": [1.5, None, {"z": "é"}]}),
    ]
    assert prompt_plan.prompt.messages[2].parts == [
        ToolResultPart("toolu_1", "A hold.\nOn blocks."),
        TextPart("Notes\nNotes."),
    ]


HI = {"role": "user", "content": "hi"}
VENDORS = {"type": "web_search_20250305", "name": "web_search"}
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
        ({"tools": [VENDORS, {"name": "x"}]}, "tools.1.input_schema: Field required"),
        ({"tools": [{**tool("x"), "nam": 1}, VENDORS], "x": 1}, "x: Extra inputs are not permit"),
        (
            {"tools": [{**VENDORS, "cache_control": {"type": "ephemeral", "ttl": "7x"}}]},
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


def encoded(media_type: str, data: bytes) -> dict[str, Any]:
    return {"type": "base64", "media_type": media_type, "data": b64encode(data).decode()}


USER = {"role": "user", "content": "go"}
PNG = {"type": "image", "source": encoded("image/png", png(640, 480))}
SHOWN = "[image: PNG, 640 × 480, not shown to this model]"
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
SEARCH = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}


def called(*content: Any) -> list[dict[str, Any]]:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    return [USER, said(CALL, role="assistant"), said(result)]


def ask(stack: Stack, **changes: Any) -> Any:
    return stack.sdk().beta.messages.create(**body(**changes))


def test_an_image_stands_in_the_prompt_as_a_text_and_is_told(stack: Stack) -> None:
    message = ask(stack, messages=[said(PNG, text("What is it?"))])
    assert stack.engine.requests[-1].prompt.messages[0].parts[0] == TextPart(SHOWN)
    assert told(message) == [("messages.0.content.0", "not shown to this model: image")]
    message = ask(stack, messages=called(text("Here:"), PNG), tools=[tool("look")])
    part = stack.engine.requests[-1].prompt.messages[2].parts[0]
    assert part == ToolResultPart("t1", f"Here:\n{SHOWN}")
    assert told(message)[0][0] == "messages.2.content.0.tool_result.content.1"


@pytest.mark.parametrize(
    "kind, source, caption",
    [
        ("document", {"type": "url", "url": "https://a.com/a.pdf"}, "https://a.com/a.pdf"),
        ("document", {"type": "file", "file_id": "file_1"}, "file_1"),
        ("image", {"type": "url", "url": "https://a.com/a.png"}, "https://a.com/a.png"),
        ("document", {"type": "content", "content": [text("a"), PNG]}, f"a\n{SHOWN}"),
        ("document", encoded("application/pdf", b"%PDF-1"), "PDF"),
    ],
)
def test_what_no_model_here_reads_has_a_placeholder(
    stack: Stack, kind: str, source: Any, caption: str
) -> None:
    message = ask(stack, messages=[said({"type": kind, "source": source})])
    whole = caption if "\n" in caption else f"[{kind}: {caption}, not shown to this model]"
    assert stack.engine.requests[-1].prompt.messages[0].parts == [TextPart(whole)]
    assert len(told(message)) == 1


def test_by_the_setting_an_image_is_refused_in_the_words_that_agents_look_for(
    tmp_path: Path,
) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with stacked(tmp_path, unreadable="refuse") as strict:
        for messages in ([said(PNG)], called(PNG)):
            with pytest.raises(anthropic.BadRequestError) as caught:
                strict.sdk().messages.create(**body(messages=messages, tools=[tool("look")]))
            error = caught.value.response.json()["error"]["message"]
            assert error.startswith("messages.") and error.endswith("Could not process image")
        wrong = refused(strict, messages=[said(image)])
        assert wrong["param"] == "messages[0].content[0]"
        assert wrong["message"].endswith("Could not process image")
        assert not strict.engine.requests


LATER = {**tool("later"), "description": "Comes later.", "defer_loading": True}
REFERENCE = {"type": "tool_reference", "tool_name": "later"}


def test_a_deferred_tool_is_shown_where_it_is_named_and_loses_no_prefix(stack: Stack) -> None:
    long = [text("Rules of the house. " * 60, SHORT)]
    tools = [tool("find", SHORT), tool("look"), LATER]
    begun = ask(stack, tools=tools, system=long, messages=[USER])
    prompt = stack.engine.requests[-1].prompt
    assert [definition.name for definition in prompt.tools] == ["find", "look"]
    assert prompt.named_tools == []
    named = called(REFERENCE, REFERENCE)
    message = ask(stack, tools=tools, system=long, messages=named)
    prompt = stack.engine.requests[-1].prompt
    assert [definition.name for definition in prompt.tools] == ["find", "look"]
    assert [definition.name for definition in prompt.named_tools] == ["later"]
    part = prompt.messages[-1].parts[0]
    assert isinstance(part, ToolResultPart)
    definition, again = part.text.split("\n")
    assert '"name":"later","description":"Comes later."' in definition
    assert again == "Tool: later"
    assert message.usage.cache_read_input_tokens == begun.usage.cache_creation_input_tokens > 100
    assert told(message) == []


@pytest.mark.parametrize("first", [[SEARCH, tool("look")], []])
def test_where_nobody_names_them_deferred_tools_are_shown_from_the_start(
    stack: Stack, first: list[Any]
) -> None:
    message = ask(stack, tools=[*first, LATER])
    prompt = stack.engine.requests[-1].prompt
    assert [definition.name for definition in prompt.tools][-1] == "later"
    assert told(message)[0][0] == ("tools.0" if first else "tools")


def test_tools_may_be_added_and_removed_in_the_conversation(stack: Stack) -> None:
    definition = {"type": "tool_definition", "definition": tool("new")}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "new"}}
    added = {"type": "tool_addition", "tool": definition}
    for changes, names in (([added], ["new"]), ([added, removed], [])):
        says = [USER, said(*changes, role="system")]
        ask(stack, tools=[tool("look")], messages=says)
        definitions = stack.engine.requests[-1].prompt.named_tools
        assert [definition.name for definition in definitions] == names


@pytest.mark.parametrize("nothing", [{"content": []}, {"content": ""}, {}])
def test_a_system_message_that_only_sets_the_effort_is_no_part_of_the_prompt(
    stack: Stack, nothing: dict[str, Any]
) -> None:
    """`claude --bare` sends one behind each prompt, without content."""
    sets = {"role": "system", **nothing, "output_config": {"effort": "medium"}}
    go = said(text("Go. " * 200, SHORT))
    question = said(text("And?", SHORT))
    first = ask(stack, messages=[go, sets])
    (message,) = stack.engine.requests[-1].prompt.messages
    assert message.role == "user"
    assert told(first) == [("messages.1.output_config.effort", "this model has one effort")]
    answer = {"role": "assistant", "content": "Gone."}
    second = ask(stack, messages=[go, sets, answer, question, sets])
    roles = [message.role for message in stack.engine.requests[-1].prompt.messages]
    assert roles == ["user", "assistant", "user"]
    assert second.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens > 100


def test_a_thread_that_begins_is_an_ordinary_request_and_one_that_goes_on_is_not_found(
    stack: Stack,
) -> None:
    message = ask(stack, thread={"type": "create"})
    assert [path for path, _ in told(message)] == ["thread"]
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(stack, thread={"type": "continue", "previous_message_id": message.id})
    error = caught.value.response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_not_found"}


@pytest.mark.parametrize("fields", [{}, {"tool_choice": {"type": "auto"}}])
def test_tools_that_only_the_vendor_runs_are_left_out_and_told(stack: Stack, fields: Any) -> None:
    message = ask(stack, tools=[{**WEB_SEARCH, "cache_control": SHORT}], **fields)
    request = stack.engine.requests[-1]
    assert request.prompt.tools == [] and request.tool_choice == ToolChoice()
    assert [path for path, _ in told(message)] == ["tools.0"]


def test_tools_that_only_the_vendor_runs_are_forced_in_no_dialect(stack: Stack) -> None:
    search = {"type": "web_search"}
    google = {"googleSearch": {}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [search]}
    forced = {"functionCallingConfig": {"mode": "ANY"}}
    gemini = {"contents": [{"parts": [{"text": "x"}]}], "tools": [google], "toolConfig": forced}
    chat = {"model": MODEL, "messages": [USER], "tools": [search], "tool_choice": "required"}
    respond = {"model": MODEL, "input": "x", "tools": [search]}
    named = {"type": "tool", "name": "web_search"}
    for path, document in (
        ("/v1/messages", body(tools=[WEB_SEARCH], tool_choice={"type": "any"})),
        ("/v1/messages", body(tools=[WEB_SEARCH, tool("look")], tool_choice=named)),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {**respond, "tool_choice": "required"}),
        ("/v1/responses", {**respond, "tool_choice": allowed}),
        (f"/v1beta/models/{MODEL}:generateContent", gemini),
    ):
        reply = stack.post(path, json=document)
        assert reply.status_code == 400 and "only its vendor's servers run" in reply.text, path
    assert not stack.engine.requests


EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
BASH = {"type": "bash_20250124", "name": "bash"}


def test_tools_that_the_client_runs_are_given_to_the_model(stack: Stack) -> None:
    older = {"type": "text_editor_20250124", "name": "str_replace_editor"}
    memory = {"type": "memory_20250818", "name": "memory"}
    tools = [BASH, {**EDITOR, "max_characters": 9}, older, {**memory, "cache_control": SHORT}]
    message = ask(stack, tools=tools, tool_choice={"type": "tool", "name": "bash"})
    assert told(message) == []
    request = stack.engine.requests[-1]
    assert request.tool_choice == ToolChoice("tool", "bash")
    assert [point.segment for point in request.breakpoints] == [3]
    names = ["bash", "str_replace_based_edit_tool", "str_replace_editor", "memory"]
    assert [definition.name for definition in request.prompt.tools] == names
    assert all(definition.description for definition in request.prompt.tools)
    commands = [
        {"command": "ls"},
        {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
        {"command": "undo_edit", "path": "/a"},
        {"command": "rename", "path": "/m/a", "old_path": "/m/a", "new_path": "/m/b"},
    ]
    for definition, command in zip(request.prompt.tools, commands, strict=True):
        jsonschema.validate(command, definition.input_schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(commands[2], request.prompt.tools[1].input_schema)


def test_a_call_of_a_clients_tool_and_its_result_are_the_hosted_apis(stack: Stack) -> None:
    called = ToolUseStart("t1", "bash"), ToolInputDelta('{"command": "ls"}')
    end = Finished(reason="tool_use", output_tokens=2)

    def script(request: GenerateRequest, _: InputUsage) -> list[Frame | float | bytes]:
        return [*called, end, Done(request_id=request.request_id, output_tokens=2)]

    stack.engine.script = script
    [call] = ask(stack, tools=[BASH]).content
    assert (call.type, call.name, call.input) == ("tool_use", "bash", {"command": "ls"})
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "a.txt"}
    turns = [USER, said(call.to_dict(), role="assistant"), said(result)]
    assert told(ask(stack, tools=[BASH], messages=turns)) == []


@pytest.mark.parametrize("kind", ["computer_20250124", "computer_toolset_20260801"])
def test_a_tool_that_shows_screenshots_needs_a_model_that_sees(stack: Stack, kind: str) -> None:
    tools = [{"type": kind, "name": "computer", "display_width_px": 1, "display_height_px": 1}]
    reply = stack.post("/v1/messages", json=body(tools=tools))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"tools.0: {kind}")
    wrong = stack.post("/v1/messages", json=body(tools=[{**BASH, "shell": "zsh"}]))
    assert wrong.json()["error"]["message"] == "tools.0.shell: Extra inputs are not permitted"


def test_a_budget_as_large_as_the_answer_needs_thinking_between_calls(stack: Stack) -> None:
    thinking = {"type": "enabled", "budget_tokens": 4000}
    with pytest.raises(anthropic.BadRequestError, match="must be greater than"):
        ask(stack, max_tokens=4000, thinking=thinking)
    betas = ["interleaved-thinking-2025-05-14"]
    assert ask(stack, max_tokens=4000, thinking=thinking, betas=betas).stop_reason == "end_turn"


def test_the_older_name_of_the_output_format_is_taken(stack: Stack) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    headers = {"anthropic-beta": "structured-outputs-2025-11-13"}
    reply = stack.post("/v1/messages", json=body(output_format=form), headers=headers)
    assert reply.status_code == 200, reply.text
    assert stack.engine.requests[-1].output_schema == form["schema"]
    fields = {"output_config": {"format": {**form, "schema": {}}}, "output_format": form}
    reply = stack.post("/v1/messages", json=body(**fields))
    assert reply.json()["error"]["message"].startswith("output_format: must not differ")


def nulls(value: Any) -> set[str]:
    if isinstance(value, dict):
        names = {key for key, inner in value.items() if inner is None}
        return names.union(*(nulls(inner) for inner in value.values()))
    return set().union(*map(nulls, value)) if isinstance(value, list) else set()


def test_an_answer_has_no_optional_field_that_is_null(stack: Stack) -> None:
    """Strict third-party schemas refuse such a null; the hosted API writes three of them."""
    answer = stack.post("/v1/messages", json=body(system=[text("a", SHORT)])).json()
    always = {"stop_reason", "stop_sequence", "stop_details", "miss_reason"}
    assert nulls(answer) <= always | {"tokens", "ttl", "expires_in_seconds", "reason"}
    assert not nulls(answer["content"]) and not nulls(answer["usage"])


@pytest.mark.parametrize("field, value", [
    ("billing_policy", {"type": "billing_policy"}),
    ("container", "container_1"),
    ("fallbacks", "default"),
    ("fallbacks", [{"model": "m"}]),
    ("fallback_credit_token", "x"),
    ("mcp_servers", [{"type": "url", "name": "x", "url": "https://example.com"}]),
    ("speed", "fast"),
    ("thread", {"type": "create"}),
    ("output_config.effort", "max"),
    ("output_config.effort", "a word of next year"),
    ("output_config.task_budget", {"type": "tokens", "total": 10}),
    ("thinking.display", {"type": "adaptive", "display": "updates"}),
    ("thinking.budget_tokens", {"type": "enabled", "budget_tokens": 1024}),
    ("context_management.edits.0", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("context_management.edits.0", {"edits": [{"type": "compact_20260112"}]}),
])  # fmt: skip
def test_what_only_asks_for_better_is_told_by_name(stack: Stack, field: str, value: Any) -> None:
    name, _, inner = field.partition(".")
    fields = {name: {inner: value} if name == "output_config" else value}
    reply = stack.post("/v1/messages", json=body(max_tokens=2048, **fields))
    assert reply.status_code == 200, reply.text
    assert [entry["path"] for entry in reply.json()["holdfast"]["ignored"]] == [field]


@pytest.mark.parametrize(
    "headers, message",
    [
        ({"anthropic-user-profile-id": "uprof_1"}, "anthropic-user-profile-id: user profiles are"),
        ({"anthropic-workspace-id": "other"}, "anthropic-workspace-id: does not match"),
    ],
)
def test_parameters_that_come_as_headers_are_honoured_or_refused(
    stack: Stack, headers: dict[str, str], message: str
) -> None:
    refused = stack.post("/v1/messages", json=body(), headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(message)
    default_reply = stack.post(
        "/v1/messages", json=body(), headers={"anthropic-workspace-id": "default"}
    )
    assert default_reply.status_code == 200
