"""What coding agents send: images, documents, deferred tools, threads, the vendor's own tools."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from engine.protocol import TextPart, ToolChoice, ToolResultPart
from tests.gateway.bodies import SHORT, body, text, tool
from tests.gateway.conftest import Stack
from tests.gateway.dialects.test_ignored import told
from tests.gateway.prompt.test_media import png
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, serve, serve_gateway

PNG = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": b64encode(png(640, 480)).decode(),
    },
}
SHOWN = "[image: PNG, 640 × 480, not shown to this model]"
PDF = {
    "type": "document",
    "title": "Terms",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0x"},
}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
SEARCH = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": list(content)}


def called(*content: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [result(*content)]},
    ]


def ask(stack: Stack, **changes: Any) -> Any:
    return stack.sdk().beta.messages.create(**body(**changes))


def test_an_image_stands_in_the_prompt_as_a_text_and_is_told(stack: Stack) -> None:
    message = ask(stack, messages=[{"role": "user", "content": [PNG, text("What is it?")]}])
    assert stack.engine.requests[-1].prompt.messages[0].parts[0] == TextPart(SHOWN)
    assert told(message) == [("messages.0.content.0", "not shown to this model: image")]
    message = ask(stack, messages=called(text("Here:"), PNG), tools=[tool("look")])
    part = stack.engine.requests[-1].prompt.messages[2].parts[0]
    assert part == ToolResultPart("t1", f"Here:\n{SHOWN}")
    assert told(message)[0][0] == "messages.2.content.0.tool_result.content.1"


@pytest.mark.parametrize(
    "block, shown",
    [
        (PDF, "Terms\n[document: PDF, not shown to this model]"),
        (
            {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}},
            "[document: https://example.com/a.pdf, not shown to this model]",
        ),
        (
            {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
            "[document: file_1, not shown to this model]",
        ),
        (
            {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
            "[image: https://example.com/a.png, not shown to this model]",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [text("a"), PNG]}},
            f"a\n{SHOWN}",
        ),
    ],
)
def test_what_no_model_here_reads_has_a_placeholder(stack: Stack, block: Any, shown: str) -> None:
    message = ask(stack, messages=[{"role": "user", "content": [block]}])
    assert stack.engine.requests[-1].prompt.messages[0].parts == [TextPart(shown)]
    assert len(told(message)) == 1


def test_texts_in_base64_are_read(stack: Stack) -> None:
    source = {"type": "base64", "media_type": "text/csv", "data": b64encode(b"a,b").decode()}
    message = ask(
        stack, messages=[{"role": "user", "content": [{"type": "document", "source": source}]}]
    )
    assert stack.engine.requests[-1].prompt.messages[0].parts == [TextPart("a,b")]
    assert told(message) == []
    wrong = {"type": "document", "source": {**source, "data": "!"}}
    with pytest.raises(anthropic.BadRequestError, match=r"document\.source\.data: Input should be"):
        ask(stack, messages=[{"role": "user", "content": [wrong]}])


def test_by_the_setting_an_image_is_refused_in_the_words_that_agents_look_for(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine()
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path, engine_url, unreadable="refuse") as url,
    ):
        strict = Stack(url, engine, tmp_path)
        for messages in ([{"role": "user", "content": [PNG]}], called(PNG)):
            with pytest.raises(anthropic.BadRequestError) as caught:
                strict.sdk(API_KEY).messages.create(**body(messages=messages, tools=[tool("look")]))
            said = caught.value.response.json()["error"]["message"]
            assert said.startswith("messages.") and said.endswith("Could not process image")
    assert not engine.requests


LATER = {**tool("later"), "description": "Comes later.", "defer_loading": True}
REFERENCE = {"type": "tool_reference", "tool_name": "later"}


def test_a_deferred_tool_is_shown_where_it_is_named_and_loses_no_prefix(stack: Stack) -> None:
    find = tool("find", SHORT)
    long = [{"type": "text", "text": "Rules of the house. " * 60, "cache_control": SHORT}]
    tools = [find, tool("look"), LATER]
    asked: list[Any] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{**CALL, "name": "find"}]},
    ]
    begun = ask(stack, tools=tools, system=long, messages=asked[:1])
    prompt = stack.engine.requests[-1].prompt
    assert [shown.name for shown in prompt.tools] == ["find", "look"]
    assert prompt.named_tools == []
    named = [*asked, {"role": "user", "content": [result(REFERENCE, REFERENCE)]}]
    message = ask(stack, tools=tools, system=long, messages=named)
    prompt = stack.engine.requests[-1].prompt
    assert [shown.name for shown in prompt.tools] == ["find", "look"]
    assert [shown.name for shown in prompt.named_tools] == ["later"]
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
    assert [shown.name for shown in prompt.tools][-1] == "later"
    assert told(message)[0][0] == ("tools.0" if first else "tools")


def test_tools_may_be_added_and_removed_in_the_conversation(stack: Stack) -> None:
    added = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": tool("new")},
    }
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "new"}}
    says = [{"role": "user", "content": "q"}, {"role": "system", "content": [added]}]
    ask(stack, tools=[tool("look")], messages=says)
    prompt = stack.engine.requests[-1].prompt
    assert [shown.name for shown in prompt.named_tools] == ["new"]
    says[1]["content"] = [added, removed]
    ask(stack, tools=[tool("look")], messages=says)
    assert stack.engine.requests[-1].prompt.named_tools == []


@pytest.mark.parametrize("nothing", [{"content": []}, {"content": ""}, {}])
def test_a_system_message_that_only_sets_the_effort_is_no_part_of_the_prompt(
    stack: Stack, nothing: dict[str, Any]
) -> None:
    """`claude --bare` sends one behind each prompt, without content."""
    sets = {"role": "system", **nothing, "output_config": {"effort": "medium"}}
    go = {"role": "user", "content": [text("Go. " * 200, SHORT)]}
    first = ask(stack, messages=[go, sets])
    (message,) = stack.engine.requests[-1].prompt.messages
    assert message.role == "user"
    assert told(first) == [("messages.1.output_config.effort", "this model has one effort")]
    answer = {"role": "assistant", "content": "Gone."}
    more = {"role": "user", "content": [text("And?", SHORT)]}
    second = ask(stack, messages=[go, sets, answer, more, sets])
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


@pytest.mark.parametrize(
    "choice", [None, {"type": "tool", "name": "web_search"}, {"type": "any"}, {"type": "auto"}]
)
def test_the_vendors_tools_are_left_out_and_told(stack: Stack, choice: Any) -> None:
    asked = {} if choice is None else {"tool_choice": choice}
    message = ask(stack, tools=[{**WEB_SEARCH, "cache_control": SHORT}], **asked)
    sent = stack.engine.requests[-1]
    assert sent.prompt.tools == [] and sent.tool_choice == ToolChoice()
    paths = [path for path, _ in told(message)]
    assert paths[0] == "tools.0"
    assert ("tool_choice" in paths) == (choice is not None and choice["type"] != "auto")


def test_errors_beside_the_vendors_tools_keep_their_paths(stack: Stack) -> None:
    wrong: list[tuple[Any, str]] = [
        ([WEB_SEARCH, {"name": "x"}], "tools.1.input_schema: Field required"),
        ([{**tool("x"), "nam": 1}, WEB_SEARCH], "tools.0.nam: Extra inputs are not permitted"),
        (
            [{**WEB_SEARCH, "cache_control": {"type": "ephemeral", "ttl": "2h"}}],
            "tools.0.cache_control.ephemeral.ttl: Input should be '5m' or '1h'",
        ),
    ]
    for tools, message in wrong:
        with stack.http() as http:
            reply = http.post("/v1/messages", json=body(tools=tools))
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == message


def test_a_budget_as_large_as_the_answer_needs_thinking_between_calls(stack: Stack) -> None:
    thinking = {"type": "enabled", "budget_tokens": 4000}
    with pytest.raises(anthropic.BadRequestError, match="must be greater than"):
        ask(stack, max_tokens=4000, thinking=thinking)
    betas = ["interleaved-thinking-2025-05-14"]
    assert ask(stack, max_tokens=4000, thinking=thinking, betas=betas).stop_reason == "end_turn"


def test_the_older_name_of_the_output_format_is_taken(stack: Stack) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    with stack.http() as http:
        headers = {"anthropic-beta": "structured-outputs-2025-11-13"}
        reply = http.post("/v1/messages", json=body(output_format=form), headers=headers)
        assert reply.status_code == 200, reply.text
        assert stack.engine.requests[-1].output_schema == form["schema"]
        other = {"output_config": {"format": {**form, "schema": {}}}, "output_format": form}
        reply = http.post("/v1/messages", json=body(**other))
        assert reply.json()["error"]["message"].startswith("output_format: must not differ")


def test_an_answer_has_no_optional_field_that_is_null(stack: Stack) -> None:
    """Strict third-party schemas refuse such a null; the hosted API writes three of them."""
    always = {"stop_reason", "stop_sequence", "stop_details", "miss_reason"}

    def nulls(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {key for key, inner in value.items() if inner is None}
            return own.union(*(nulls(inner) for inner in value.values()))
        return set().union(*map(nulls, value)) if isinstance(value, list) else set()

    with stack.http() as http:
        reply: httpx.Response = http.post("/v1/messages", json=body(system=[text("a", SHORT)]))
        assert nulls(reply.json()) <= always | {"tokens", "ttl", "expires_in_seconds", "reason"}
        assert not nulls(reply.json()["content"]) and not nulls(reply.json()["usage"])
