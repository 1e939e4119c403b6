"""Every request field of the official SDK is honoured, told or refused by name: none is unknown.

The SDK's own type definitions are walked, so a field that a new version brings fails here.
"""

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from anthropic import types as ga
from anthropic.types import beta
from anthropic.types import message_create_params as ga_params
from anthropic.types.beta import message_create_params as beta_params
from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic import request
from gateway.dialects.anthropic.lower import plan_of
from gateway.dialects.anthropic.request import decode_count_tokens, decode_messages
from gateway.prompt.ignored import Notepad
from tests.gateway.bodies import SHORT, body, text, tool
from tests.gateway.conftest import Stack

# Parameters that the SDK sends as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}
# The newer SDK has no parameters for them; `output_format` is the older name of a beta.
OLDER = {"temperature", "top_p", "top_k", "output_format"}

PAIRS: list[tuple[Any, type[msgspec.Struct]]] = [
    (ga_params.MessageCreateParamsStreaming, request.MessagesRequest),
    (beta_params.MessageCreateParamsStreaming, request.MessagesRequest),
    (ga.MessageCountTokensParams, request.CountTokensRequest),
    (beta.MessageCountTokensParams, request.CountTokensRequest),
    (ga.MessageParam, request.Message),
    (beta.BetaMessageParam, request.Message),
    (beta.BetaSystemMessageOutputConfigParam, request.MessageOutputConfig),
    (ga.CacheControlEphemeralParam, request.CacheControl),
    (beta.BetaCacheControlEphemeralParam, request.CacheControl),
    (ga.DiagnosticsParam, request.DiagnosticsRequest),
    (ga.MetadataParam, request.Metadata),
    (ga.OutputConfigParam, request.OutputConfig),
    (beta.BetaOutputConfigParam, request.OutputConfig),
    (beta.BetaContextManagementConfigParam, request.ContextManagement),
    (ga.JSONOutputFormatParam, request.Format),
    (beta.BetaThinkingConfigEnabledParam, request.ThinkingEnabled),
    (beta.BetaThinkingConfigAdaptiveParam, request.ThinkingAdaptive),
    (beta.BetaThinkingConfigDisabledParam, request.ThinkingDisabled),
    (beta.BetaThinkingConfigBetweenToolsParam, request.ThinkingBetweenTools),
    (beta.BetaThinkingBlockBindingParam, request.BlockBinding),
    (ga.ToolChoiceAutoParam, request.ChoiceAuto),
    (ga.ToolChoiceAnyParam, request.ChoiceAny),
    (ga.ToolChoiceToolParam, request.ChoiceTool),
    (ga.ToolChoiceNoneParam, request.ChoiceNone),
    (ga.ToolParam, request.Tool),
    (beta.BetaToolParam, request.Tool),
    (ga.TextBlockParam, request.Text),
    (beta.BetaTextBlockParam, request.Text),
    (ga.ThinkingBlockParam, request.Thinking),
    (ga.ToolUseBlockParam, request.ToolUse),
    (beta.BetaToolUseBlockParam, request.ToolUse),
    (ga.ToolResultBlockParam, request.ToolResult),
    (beta.BetaToolResultBlockParam, request.ToolResult),
    (ga.SearchResultBlockParam, request.SearchResult),
    (ga.DocumentBlockParam, request.Document),
    (beta.BetaRequestDocumentBlockParam, request.Document),
    (ga.PlainTextSourceParam, request.TextSource),
    (ga.ContentBlockSourceParam, request.ContentSource),
    (ga.CitationsConfigParam, request.Citations),
]


def leaves(hint: Any) -> Iterator[Any]:
    parts = get_args(hint)
    if not parts:
        yield hint
    for part in parts:
        yield from leaves(part)


def fields_of(sdk: Any) -> set[str]:
    """Of a union, the fields of all its members."""
    members = [sdk] if is_typeddict(sdk) else list(leaves(sdk))
    return {name for member in members for name in get_type_hints(member)}


def names_of(struct: type[msgspec.Struct]) -> set[str]:
    return set(struct.__struct_encode_fields__)


@pytest.mark.parametrize(("sdk", "ours"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_of_the_sdk_is_known(sdk: Any, ours: type[msgspec.Struct]) -> None:
    ignored = HEADERS | ({"type"} if ours.__struct_config__.tag else set())
    assert fields_of(sdk) - ignored <= names_of(ours)


def test_no_field_is_of_our_own_making() -> None:
    """The other way round: what we take and the SDK does not know would be a misspelling."""
    known = fields_of(beta_params.MessageCreateParamsStreaming) | HEADERS | OLDER
    assert names_of(request.MessagesRequest) <= known


def block_types(hint: Any) -> set[str]:
    found: set[str] = set()
    for member in leaves(hint):
        if is_typeddict(member):
            found |= set(leaves(get_type_hints(member)["type"]))
        elif isinstance(member, type) and issubclass(member, BaseModel):
            found |= set(leaves(member.model_fields["type"].annotation))
    return found


@pytest.mark.parametrize("message", [ga.MessageParam, beta.BetaMessageParam])
def test_every_type_of_block_is_read_or_has_a_placeholder(message: Any) -> None:
    kinds = {
        kind
        for member in leaves(message)
        for kind in block_types(get_type_hints(member)["content"])
    }
    assert len(kinds) > 15
    assert kinds >= set(request.SUPPORTED_BLOCKS) - {"document"}
    assert kinds <= request.PLACED_BLOCKS | set(request.SUPPORTED_BLOCKS)
    for kind in kinds - set(request.SUPPORTED_BLOCKS) - {"image"}:
        asked = body(messages=[{"role": "user", "content": [{"type": kind, "any": [1]}]}])
        notepad = Notepad()
        plan_of(decode_messages(msgspec.json.encode(asked)), "scope", notepad)
        assert notepad.notes().ignored[0].path == "messages.0.content.0"
        if kind in ("redacted_thinking", "tool_addition", "tool_removal"):
            continue
        with pytest.raises(InvalidRequest, match=f"messages.0.content.0: .*'{kind}'"):
            plan_of(decode_messages(msgspec.json.encode(asked)), "scope", unreadable="refuse")


def test_every_type_of_block_in_a_tools_result_is_read_or_placed() -> None:
    kinds = block_types(get_type_hints(beta.BetaToolResultBlockParam)["content"])
    ours = {str(kind.__struct_config__.tag) for kind in get_args(request.Nested)}
    assert kinds <= ours
    sources = get_type_hints(beta.BetaContentBlockSourceParam)["content"]
    assert block_types(sources) == {"text", "image"}


@pytest.mark.parametrize("tools", [ga.ToolUnionParam, beta.BetaToolUnionParam])
def test_every_type_of_tool_but_custom_is_left_out_and_told(tools: Any) -> None:
    kinds = {kind for kind in block_types(tools) if isinstance(kind, str)} - {"custom"}
    assert len(kinds) > 15
    for kind in kinds:
        asked = body(tools=[{"type": kind, "name": "x", "any": {"a": [1]}}, tool("look")])
        notepad = Notepad()
        made = plan_of(decode_messages(msgspec.json.encode(asked)), "scope", notepad)
        assert [shown.name for shown in made.prompt.tools] == ["look"]
        assert notepad.notes().ignored[0].path == "tools.0"


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
    asked = {name: {inner: value} if name == "output_config" else value}
    with stack.http() as http:
        reply = http.post("/v1/messages", json=body(max_tokens=2048, **asked))
    assert reply.status_code == 200, reply.text
    assert [one["path"] for one in reply.json()["holdfast"]["ignored"]] == [field]


def test_what_would_be_another_answer_is_refused_by_name() -> None:
    asked = body(compaction={"type": "summarize"})
    with pytest.raises(InvalidRequest, match="compaction: not supported by this server"):
        decode_messages(msgspec.json.encode(asked))


@pytest.mark.parametrize("empty", [None, []])
def test_left_empty_such_a_field_is_no_matter(empty: Any) -> None:
    decode_messages(msgspec.json.encode(body(mcp_servers=empty, fallbacks=empty)))
    decode_messages(msgspec.json.encode(body(thread=None, compaction=None, container=None)))


THOUGHT = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm", "signature": "c2ln"}, text("a")],
    },
    {"role": "user", "content": "q"},
]


@pytest.mark.parametrize(
    "edits, messages, error",
    [
        (None, THOUGHT, None),
        ([], THOUGHT, None),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], THOUGHT, None),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "all"}}], THOUGHT * 2, None),
        ([{"type": "clear_thinking_20251015"}], THOUGHT, None),
        ([{"type": "clear_thinking_20251015"}], THOUGHT * 2, None),
        ([{"type": "clear_thinking_20251015"}, {"type": "compact_20260112"}], THOUGHT, None),
        ([{}], THOUGHT, "context_management.edits.0: Unable to extract tag using discriminator"),
    ],
)
def test_context_management_never_fails_a_request(
    edits: Any, messages: Any, error: str | None
) -> None:
    asked = body(messages=messages, context_management={"edits": edits})
    del asked["max_tokens"]
    for decode in (decode_messages, decode_count_tokens):
        raw = msgspec.json.encode(
            {**asked, **({"max_tokens": 1} if decode is decode_messages else {})}
        )
        if error is None:
            decode(raw)
            continue
        with pytest.raises(InvalidRequest) as caught:
            decode(raw)
        assert str(caught.value).startswith(error)


def test_fields_of_system_messages_are_refused_elsewhere_and_by_name() -> None:
    for changes, message in [
        ({"role": "user", "clear_at": "never"}, "messages.0.clear_at: only permitted"),
        ({"role": "user", "output_config": {}}, "messages.0.output_config: only permitted"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            decode_messages(msgspec.json.encode(body(messages=[{"content": "x", **changes}])))


def test_what_a_coding_agent_sends_is_answered(stack: Stack) -> None:
    """The fields of such agents, through the SDK's beta call (which adds `?beta=true`)."""
    message = stack.sdk().beta.messages.create(
        model="holdfast-demo",
        max_tokens=2000,
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14", "unknown-1"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "user_1_account__session_2"},
        service_tier="auto",
        thinking={"type": "adaptive"},
        output_config={"effort": "medium"},
        system=[
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1.1.abc; cc_entrypoint=cli;",
            },
            {"type": "text", "text": "You are an agent.", "cache_control": SHORT},  # type: ignore[typeddict-item]
        ],
        tools=[
            {
                "name": "Bash",
                "description": "Run",
                "input_schema": {"type": "object"},
                "eager_input_streaming": True,
            }
        ],
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "system", "content": "Be brief.", "clear_at": "never"},
        ],
    )
    assert message.stop_reason == "end_turn"
    (sent,) = stack.engine.requests
    assert sent.prompt.messages[-1].role == "system"


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
    with stack.http() as http:
        refused = http.post("/v1/messages", json=body(), headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(message)
        own = http.post("/v1/messages", json=body(), headers={"anthropic-workspace-id": "default"})
        assert own.status_code == 200
