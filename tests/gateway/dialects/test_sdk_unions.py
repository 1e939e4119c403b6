"""Whatever the official SDKs can say or return can be sent: each class of theirs, and each member
of their unions of messages, parts, items, tools and choices.

What is refused is listed here, with the words that refuse it.
"""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest
from anthropic import types as claude
from anthropic.types import beta
from google.genai import types as google
from openai.types import chat as chats
from openai.types.responses import (
    parsed_response,
    response_create_params,
    response_input_item_param,
    tool_param,
)

from gateway.base.errors import InvalidRequest
from gateway.dialects.gemini.lower import ask_of as gemini_ask_of
from gateway.dialects.gemini.request import decode_generate
from gateway.dialects.responses.lower import prepare
from gateway.dialects.responses.request import decode_responses
from tests.gateway.bodies import ASKED, body, lowered, lowered_chat
from tests.gateway.dialects.sdk_values import Sampler

FUNCTION_CALL = {"name": "look", "arguments": "{}"}
SAMPLER = Sampler(
    {
        "arguments": "{}",
        "budget_tokens": 1024,
        "cache_control": {"type": "ephemeral"},
        "data": "eA==",
        "defer_loading": False,
        "file_data": "data:text/plain;base64,eA==",
        "function_call": FUNCTION_CALL,
        "functionCall": {"name": "look", "args": {}},
        "image_url": "https://example.com/y.png",
        "parametersJsonSchema": None,
        "topK": 1,
    }
)
SCREENSHOTS = "this model reads no screenshots"
# By the place that is walked, what is refused there: words of the refusal.
REFUSED: dict[str, tuple[str, ...]] = {
    "messages": ("all messages must have non-empty content",),
    "messages tools": (SCREENSHOTS,),
    "chat messages": ("required unless there are tool_calls",),
    "responses items": (
        "item references lead to nothing that is kept",
        "did not make this compaction",
        "compacts its own conversation",
    ),
    # A type of the SDK's, and no item: the action inside a local shell's call.
    "responses output": ("did not make this compaction", "Invalid value: 'exec'"),
    "responses tools": (SCREENSHOTS,),
    "responses choices": ("is not in tools that the model may call here",),
    "gemini contents": (
        "only a content of role 'user' may answer a call",
        "functionCall.name: must not be empty",
    ),
    "gemini tools": ("functionDeclarations[0].name: must not be empty",),
}


def walked(place: str, values: list[Any], send: Callable[[Any], object]) -> None:
    """Send each value. Every refusal is one of the place's, and each of those occurs."""
    assert values
    unseen = {*REFUSED.get(place, ())}
    for value in values:
        try:
            send(value)
        except InvalidRequest as error:
            words = [known for known in REFUSED.get(place, ()) if known in str(error)]
            assert words, (str(error), value)
            unseen -= {*words}
    assert not unseen


# Messages.


def in_messages(message: dict[str, Any]) -> None:
    """A conversation with the message, whose calls are answered and whose answers are called for.
    What the API has in one role alone is not sent in the other."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    kinds = {block["type"] for block in blocks}
    role = message["role"]
    if kinds & {"tool_use", "thinking"} and role == "user":
        return
    if kinds & {"tool_result"} and role == "assistant":
        return
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for block in blocks:
        if block["type"] == "tool_result":
            call = {"type": "tool_use", "id": block["tool_use_id"], "name": "look", "input": {}}
            messages.append({"role": "assistant", "content": [call]})
    messages.append(message)
    for block in blocks:
        if block["type"] == "tool_use":
            answer = {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
            messages.append({"role": "user", "content": [answer]})
    if role == "assistant" and "tool_use" not in kinds:
        messages.append({"role": "user", "content": "Go on."})
    lowered(body(messages=messages))


@pytest.mark.parametrize("message", [claude.MessageParam, beta.BetaMessageParam])
def test_every_message_of_anthropics_sdk(message: Any) -> None:
    values = SAMPLER.values(message)
    assert len(values) > 500
    if message is claude.MessageParam:
        for value in values:
            in_messages(value)
    else:
        walked("messages", values, in_messages)


@pytest.mark.parametrize(
    "block",
    [
        claude.ContentBlock,
        claude.parsed_message.ParsedContentBlock,
        beta.BetaContentBlock,
        beta.parsed_beta_message.ParsedBetaContentBlock,
    ],
)
def test_every_block_that_anthropics_sdk_returns(block: Any) -> None:
    values = SAMPLER.values(block)
    assert len({value["type"] for value in values}) > 10
    for value in values:
        in_messages({"role": "assistant", "content": [value]})


@pytest.mark.parametrize("tool", [claude.ToolUnionParam, beta.BetaToolUnionParam])
def test_every_tool_of_anthropics_sdk(tool: Any) -> None:
    walked("messages tools", SAMPLER.values(tool), lambda value: lowered(body(tools=[value])))


@pytest.mark.parametrize("choice", [claude.ToolChoiceParam, beta.BetaToolChoiceParam])
def test_every_choice_of_anthropics_sdk(choice: Any) -> None:
    values = SAMPLER.values(choice)
    assert {value["type"] for value in values} == {"auto", "any", "tool", "none"}
    tools = [{"name": "x", "input_schema": {"type": "object"}}]
    for value in values:
        lowered(body(tools=tools, tool_choice=value))


# Chat Completions.


def in_chat(message: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    match message["role"]:
        case "tool":
            call = {"id": message["tool_call_id"], "type": "function", "function": FUNCTION_CALL}
            messages.append({"role": "assistant", "tool_calls": [call]})
        case "function":
            called = {**FUNCTION_CALL, "name": message["name"]}
            messages.append({"role": "assistant", "content": None, "function_call": called})
    messages.append(message)
    for call in message.get("tool_calls") or []:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "x"})
    if message.get("function_call") and not message.get("tool_calls"):
        messages.append({"role": "function", "name": FUNCTION_CALL["name"], "content": "x"})
    messages.append({"role": "user", "content": "Go on."})
    lowered_chat({"model": "m", "messages": messages})


def test_every_message_of_openais_sdk() -> None:
    values = SAMPLER.values(chats.ChatCompletionMessageParam)
    roles = {value["role"] for value in values}
    assert roles == {"developer", "system", "user", "assistant", "tool", "function"}
    walked("chat messages", values, in_chat)


@pytest.mark.parametrize(
    "message", [chats.ChatCompletionMessage, chats.ParsedChatCompletionMessage]
)
def test_every_message_that_openais_sdk_returns(message: Any) -> None:
    for value in SAMPLER.values(message):
        in_chat({"content": None, **value})


def test_every_tool_and_choice_of_chat_completions() -> None:
    tools = SAMPLER.values(chats.ChatCompletionToolUnionParam)
    assert {tool["type"] for tool in tools} == {"function", "custom"}
    request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    for tool in tools:
        [definition] = lowered_chat({**request, "tools": [tool]}).plan.prompt.tools
        assert definition.name == "x"
    listed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]}
    sampler = Sampler({"allowed_tools": listed})
    choices = sampler.values(chats.ChatCompletionToolChoiceOptionParam)
    for choice in choices:
        kind = choice["type"] if isinstance(choice, dict) else "function"
        kind = "function" if kind == "allowed_tools" else kind
        lowered_chat(
            {**request, "tools": [{"type": kind, kind: {"name": "x"}}], "tool_choice": choice}
        )
    kinds = {choice["type"] for choice in choices if isinstance(choice, dict)}
    assert kinds == {"function", "custom", "allowed_tools"}


# Responses.

ANSWERS: dict[str, dict[str, Any]] = {
    "function_call": {"type": "function_call_output", "output": "x"},
    "custom_tool_call": {"type": "custom_tool_call_output", "output": "x"},
    "shell_call": {"type": "shell_call_output", "output": []},
    "apply_patch_call": {"type": "apply_patch_call_output", "status": "completed"},
    "computer_call": {"type": "computer_call_output", "output": {"type": "computer_screenshot"}},
    "local_shell_call": {"type": "local_shell_call_output", "output": "x"},
    "tool_search_call": {"type": "tool_search_output", "tools": []},
}
CALLS: dict[str, dict[str, Any]] = {
    "function_call_output": {"type": "function_call", **FUNCTION_CALL},
    "custom_tool_call_output": {"type": "custom_tool_call", "name": "look", "input": "x"},
    "shell_call_output": {"type": "shell_call", "action": {"commands": ["x"]}},
    "apply_patch_call_output": {"type": "apply_patch_call", "operation": {}},
    "computer_call_output": {"type": "computer_call", "action": {}},
    "local_shell_call_output": {"type": "local_shell_call", "action": {}},
    "tool_search_output": {"type": "tool_search_call", "arguments": {}},
}


def in_responses(item: dict[str, Any]) -> None:
    """A conversation with the item: a call has its output behind it, an output its call before."""
    kind = item.get("type") or ""
    call_id = item.get("call_id")
    is_search = kind.startswith("tool_search")
    joined = {"call_id": call_id if is_search else call_id or item.get("id")}
    hi = {"role": "user", "content": "Hi"}
    items = [hi, item]
    if kind in ANSWERS:
        items.append({**ANSWERS[kind], **joined})
    elif kind in CALLS and (call_id or is_search or kind == "local_shell_call_output"):
        items.insert(1, {**CALLS[kind], **joined})
    request = {"model": "m", "input": [*items, hi]}
    prepare(decode_responses(msgspec.json.encode(request)), ASKED)


def test_every_item_of_openais_sdk() -> None:
    values = SAMPLER.values(response_input_item_param.ResponseInputItemParam)
    assert len(values) > 500
    walked("responses items", values, in_responses)


def test_every_item_that_openais_sdk_returns() -> None:
    values = SAMPLER.values(parsed_response.ParsedResponseOutputItem)
    assert len({value["type"] for value in values}) > 20
    walked("responses output", values, in_responses)


def test_every_tool_and_choice_of_responses() -> None:
    def prepare_request(**changes: Any) -> None:
        whole = {"model": "m", "input": "Hi", **changes}
        prepare(decode_responses(msgspec.json.encode(whole)), ASKED)

    values = SAMPLER.values(tool_param.ToolParam)
    assert len({value["type"] for value in values}) > 10
    walked("responses tools", values, lambda value: prepare_request(tools=[value]))
    tools = [{"type": "shell"}, {"type": "apply_patch"}]
    named = Sampler({"tools": [{"type": "shell"}]})
    hint = response_create_params.ToolChoice

    def choose(choice: Any) -> None:
        kind = choice["type"] if isinstance(choice, dict) else "function"
        kind = kind if kind in ("function", "custom") else "function"
        prepare_request(tools=[*tools, {"type": kind, "name": "x"}], tool_choice=choice)

    walked("responses choices", named.values(hint), choose)


# Google's.

KINDS = frozenset(
    """
text functionCall functionResponse inlineData fileData executableCode codeExecutionResult toolCall
toolResponse
""".split()
)


def parts() -> Iterator[dict[str, Any]]:
    """Parts of one kind each, with all that is said besides; and one of no kind."""
    for value in SAMPLER.values(google.Part):
        common = {name: field for name, field in value.items() if name not in KINDS}
        yield common
        for name in KINDS & value.keys():
            yield {**common, name: value[name]}


def in_gemini(part: dict[str, Any]) -> None:
    hi = {"role": "user", "parts": [{"text": "Hi"}]}
    contents = [hi]
    answered = part.get("functionResponse")
    if answered:
        call = {name: answered.get(name) for name in ("name", "id")}
        contents.append({"role": "model", "parts": [{"functionCall": call}]})
        contents.append({"role": "user", "parts": [part]})
    else:
        contents.append({"role": "model", "parts": [part]})
        call = part.get("functionCall")
        if call:
            response = {"name": call["name"], "response": {}}
            contents.append({"role": "user", "parts": [{"functionResponse": response}]})
    ask({"contents": [*contents, hi]})


def ask(request: dict[str, Any]) -> None:
    decoded = decode_generate(msgspec.json.encode(request), "m")
    gemini_ask_of(decoded, ASKED, stream=False)


def test_every_part_of_googles_sdk() -> None:
    values = [*parts()]
    assert len(values) > 500 and KINDS <= {name for value in values for name in value}
    walked("gemini contents", values, in_gemini)


def test_every_tool_and_mode_of_googles_sdk() -> None:
    hi = {"role": "user", "parts": [{"text": "Hi"}]}
    walked(
        "gemini tools",
        SAMPLER.values(google.Tool),
        lambda tool: ask({"contents": [hi], "tools": [tool]}),
    )
    tools = [{"functionDeclarations": [{"name": "x"}]}]
    for config in SAMPLER.values(google.ToolConfig):
        ask({"contents": [hi], "tools": tools, "toolConfig": config})


def test_a_sampler_has_every_member_of_a_union() -> None:
    values = SAMPLER.values(tool_param.ToolParam)
    kinds = {value["type"] for value in values}
    for member in get_args(tool_param.ToolParam):
        of_member = {value["type"] for value in SAMPLER.values(member)}
        assert of_member and of_member <= kinds
