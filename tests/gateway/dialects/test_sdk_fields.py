"""Every field and type of the official SDKs is honoured, told or refused by name: none is unknown.

The SDKs' own type definitions are walked, so what a new version brings fails here. Google's types
refuse unknown fields: they know every field of our answers but the extension `holdfast`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest
from anthropic import types as ga
from anthropic.types import beta
from anthropic.types import message_create_params as ga_params
from anthropic.types.beta import message_create_params as beta_params
from google.genai import types as google
from openai.types import responses as openai
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_input_item_param,
    tool_param,
)
from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

from engine.protocol import Finished, TextDelta, ThinkingDelta, ToolInputDelta, ToolUseStart
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic import request as messages
from gateway.dialects.gemini import request as gemini
from gateway.dialects.gemini import response
from gateway.dialects.responses import request as responses
from gateway.prompt.ignored import ADVICE
from tests.gateway.bodies import ASKED, body, lowered, tool
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import LONG_TEXT, MODEL, post, user
from tests.gateway.openai_bodies import frames

# Parameters that the SDK sends as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}
# The newer SDK has no parameters for them; `output_format` is the older name of a beta.
OLDER = {"temperature", "top_p", "top_k", "output_format"}

# Our struct, and the SDK's types that it must know the fields of.
MESSAGES = """
CountTokensRequest MessageCountTokensParams beta.MessageCountTokensParams
Message MessageParam BetaMessageParam
MessageOutputConfig BetaSystemMessageOutputConfigParam
CacheControl CacheControlEphemeralParam BetaCacheControlEphemeralParam
DiagnosticsRequest DiagnosticsParam
Metadata MetadataParam
OutputConfig OutputConfigParam BetaOutputConfigParam
ContextManagement BetaContextManagementConfigParam
Format JSONOutputFormatParam
ThinkingEnabled BetaThinkingConfigEnabledParam
ThinkingAdaptive BetaThinkingConfigAdaptiveParam
ThinkingDisabled BetaThinkingConfigDisabledParam
ThinkingBetweenTools BetaThinkingConfigBetweenToolsParam
BlockBinding BetaThinkingBlockBindingParam
ChoiceAuto ToolChoiceAutoParam
ChoiceAny ToolChoiceAnyParam
ChoiceTool ToolChoiceToolParam
ChoiceNone ToolChoiceNoneParam
Tool ToolParam BetaToolParam
Text TextBlockParam BetaTextBlockParam
Thinking ThinkingBlockParam
ToolUse ToolUseBlockParam BetaToolUseBlockParam
ToolResult ToolResultBlockParam BetaToolResultBlockParam
SearchResult SearchResultBlockParam
Document DocumentBlockParam BetaRequestDocumentBlockParam
TextSource PlainTextSourceParam
ContentSource ContentBlockSourceParam
Citations CitationsConfigParam
"""
RESPONSES = """
TextOptions ResponseTextConfigParam
JsonSchemaFormat ResponseFormatTextJSONSchemaConfigParam
AllowedTools ToolChoiceAllowedParam
Message EasyInputMessageParam ResponseOutputMessageParam item.Message
FunctionCallOutput item.FunctionCallOutput
AdditionalTools item.AdditionalTools
FunctionCall ResponseFunctionToolCallParam
CustomToolCall ResponseCustomToolCallParam
CustomToolCallOutput ResponseCustomToolCallOutputParam
Reasoning ResponseReasoningItemParam
InputText ResponseInputTextParam
InputImage ResponseInputImageParam
InputFile ResponseInputFileParam
OutputText ResponseOutputTextParam
FunctionTool FunctionToolParam
CustomTool CustomToolParam
NamespaceTool NamespaceToolParam
CacheOptions create.PromptCacheOptions
StreamOptions create.StreamOptions
"""
# These have one name.
GEMINI = """
Part Content FunctionCall FunctionResponse Blob FileData ExecutableCode CodeExecutionResult
FunctionDeclaration Tool FunctionCallingConfig ToolConfig GenerationConfig ThinkingConfig
"""
ANSWERED: list[tuple[type[BaseModel], type[msgspec.Struct]]] = [
    (google.GenerateContentResponse, response.GenerateContentResponse),
    (google.GenerateContentResponseUsageMetadata, response.UsageMetadata),
    (google.Candidate, response.Candidate),
    (google.Content, response.Content),
    (google.Part, response.Part),
    (google.FunctionCall, response.FunctionCall),
    (google.ModalityTokenCount, response.ModalityCount),
    (google.CachedContent, response.CachedContent),
    (google.CachedContentUsageMetadata, response.CacheUsage),
    (google.ListCachedContentsResponse, response.CachedContentList),
]
MODULES = {"beta": beta, "item": response_input_item_param, "create": response_create_params}


def pairs(table: str, ours: Any, sdk: Any) -> Iterator[Any]:
    for line in table.split("\n")[1:-1]:
        field, *names = line.split()
        for name in names:
            module = MODULES.get(name.rpartition(".")[0], beta if name[:4] == "Beta" else sdk)
            theirs = getattr(module, name.rpartition(".")[2])
            yield pytest.param(theirs, getattr(ours, field), id=f"{field}-{name}")


def leaves(hint: Any) -> Iterator[Any]:
    parts = get_args(hint)
    if not parts:
        yield hint
    for part in parts:
        yield from leaves(part)


def fields_of(sdk: Any) -> set[str]:
    """Of a union, the fields of all its members."""
    if isinstance(sdk, type) and issubclass(sdk, BaseModel):
        return {field.alias or name for name, field in sdk.model_fields.items()}
    members = [sdk] if is_typeddict(sdk) else list(leaves(sdk))
    return {name for member in members for name in get_type_hints(member)}


def names_of(struct: type[msgspec.Struct]) -> set[str]:
    return set(struct.__struct_encode_fields__)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (ga_params.MessageCreateParamsStreaming, messages.MessagesRequest),
        (beta_params.MessageCreateParamsStreaming, messages.MessagesRequest),
        *pairs(MESSAGES, messages, ga),
        *pairs(RESPONSES, responses, openai),
        (google.FunctionResponsePart, gemini.ResponsePart),
        *((getattr(google, name), getattr(gemini, name)) for name in GEMINI.split()),
    ],
)
def test_every_field_of_the_sdk_is_known(theirs: Any, ours: type[msgspec.Struct]) -> None:
    ignored = HEADERS | ({"type"} if ours.__struct_config__.tag else set())
    assert fields_of(theirs) - ignored <= names_of(ours)


def test_no_field_is_of_our_own_making() -> None:
    """The other way round: what we take and the SDK does not know would be a misspelling."""
    known = fields_of(beta_params.MessageCreateParamsStreaming) | HEADERS | OLDER
    in_front = {"anthropic_beta", "anthropic_version"}
    of_other_servers = {"cache_salt", *ADVICE}
    assert names_of(messages.MessagesRequest) <= known | in_front | of_other_servers


def types_in(hint: Any) -> set[str]:
    """The values of `type` of a union's members."""
    values: set[Any] = set()
    for member in leaves(hint):
        if is_typeddict(member) and "type" in (hints := get_type_hints(member)):
            values |= set(leaves(hints["type"]))
        elif isinstance(member, type) and issubclass(member, BaseModel):
            values |= set(leaves(member.model_fields["type"].annotation))
    return {kind for kind in values if isinstance(kind, str)}


@pytest.mark.parametrize("message", [ga.MessageParam, beta.BetaMessageParam])
def test_every_type_of_block_is_read_or_has_a_placeholder(message: Any) -> None:
    kinds = {k for member in leaves(message) for k in types_in(get_type_hints(member)["content"])}
    assert len(kinds) > 15
    assert kinds >= set(messages.SUPPORTED_BLOCKS) - {"document"}
    for kind in kinds - set(messages.SUPPORTED_BLOCKS) - {"image"}:
        request = body(messages=[{"role": "user", "content": [{"type": kind, "any": [1]}]}])
        assert lowered(request).notes.ignored[0].path == "messages.0.content.0"
        if kind not in ("redacted_thinking", "tool_addition", "tool_removal"):
            with pytest.raises(InvalidRequest, match=f"messages.0.content.0: .*'{kind}'"):
                lowered(request, replace(ASKED, unreadable="refuse"))


def test_every_type_of_block_in_a_tools_result_is_read_or_placed() -> None:
    kinds = types_in(get_type_hints(beta.BetaToolResultBlockParam)["content"])
    assert kinds <= {str(kind.__struct_config__.tag) for kind in get_args(messages.Nested)}
    sources = get_type_hints(beta.BetaContentBlockSourceParam)["content"]
    assert types_in(sources) == {"text", "image"}


@pytest.mark.parametrize("tools", [ga.ToolUnionParam, beta.BetaToolUnionParam])
def test_every_type_of_tool_but_custom_is_given_left_out_and_told_or_refused(tools: Any) -> None:
    kinds = types_in(tools) - {"custom"}
    assert len(kinds) > 15
    for kind in kinds:
        if kind.startswith(("bash_", "text_editor_", "memory_")):
            client_side = lowered(body(tools=[{"type": kind, "name": "x"}, tool("look")]))
            assert [definition.name for definition in client_side.plan.prompt.tools] == [
                "x",
                "look",
            ]
            assert not client_side.notes.ignored
            continue
        request = body(tools=[{"type": kind, "name": "x", "any": {"a": [1]}}, tool("look")])
        if kind.startswith("computer_"):
            with pytest.raises(InvalidRequest, match="screenshots"):
                lowered(request)
            continue
        without_tool = lowered(request)
        assert [definition.name for definition in without_tool.plan.prompt.tools] == ["look"]
        assert without_tool.notes.ignored[0].path == "tools.0"


def decoded(**fields: Any) -> responses.Decoded:
    return responses.decode_responses(msgspec.json.encode({"model": "m", "input": "x", **fields}))


def test_every_parameter_of_responses_is_honoured_ignored_told_or_refused() -> None:
    fields = responses.FIELDS
    known = {"previous_response_id", *names_of(responses.ResponsesRequest)}
    known |= fields.silent | fields.told.keys() | fields.refused.keys()
    parameters = get_type_hints(response_create_params.ResponseCreateParamsStreaming)
    assert len(parameters) > 25
    assert set(parameters) <= known
    assert set(get_type_hints(input_token_count_params.InputTokenCountParams)) <= known


def test_every_type_of_item_and_tool_of_responses_is_taken_left_out_or_refused_by_name() -> None:
    items = types_in(response_input_item_param.ResponseInputItemParam)
    tools = tool_param.ToolParam
    assert len(items) > 25 and len(types_in(tools)) > 12
    for kind in items:
        try:
            decoded(input=[{"type": kind}])
        except InvalidRequest as error:
            assert "Invalid value" not in str(error), kind
    for kind in types_in(tools):
        inner = {} if kind in ("function", "custom") else {"tools": []}
        definitions = [{"type": kind, "name": "x", **inner}]
        if kind.startswith("computer"):
            with pytest.raises(InvalidRequest, match="screenshots"):
                decoded(tools=definitions)
            continue
        result = decoded(tools=definitions)
        at_client = ("shell", "local_shell", "apply_patch")
        is_ours = kind in ("function", "custom", "namespace", *at_client)
        assert isinstance(result.request.tools[0], responses.Hosted) is not is_ours


@pytest.mark.parametrize(("sdk", "ours"), ANSWERED)
def test_every_field_of_googles_answers_is_the_sdks(
    sdk: type[BaseModel], ours: type[msgspec.Struct]
) -> None:
    assert names_of(ours) - {"holdfast"} <= fields_of(sdk)


def test_every_ending_and_modality_is_one_that_the_sdk_knows() -> None:
    endings = set(get_args(response.FinishReason))
    assert endings <= {reason.value for reason in google.FinishReason}
    assert {"TEXT"} <= {modality.value for modality in google.MediaModality}


def test_every_setting_of_google_is_done_ignored_told_or_refused_by_its_name() -> None:
    settings = fields_of(google.GenerationConfig)
    assert len(settings) > 20
    for name in settings:
        for value in (1, "x", True, {}, [], 0.5):
            request = {"contents": [user({"text": "x"})], "generationConfig": {name: value}}
            try:
                gemini.decode_generate(msgspec.json.encode(request), MODEL)
                break
            except InvalidRequest as error:
                assert name in str(error), (name, error)
        else:
            raise AssertionError(f"no value of {name} is taken")


def strict(sdk: type[BaseModel], answer: dict[str, Any]) -> None:
    """Raise where Google's type does not have a field of the answer, or has it otherwise."""
    answer.pop("holdfast", None)
    sdk.model_validate(answer)


def test_googles_own_types_accept_every_answer_and_every_chunk(stack: Stack) -> None:
    fields = {"tools": [{"functionDeclarations": [{"name": "look"}]}]}
    answers: list[dict[str, Any]] = []
    for reason in ("stop", "length", "tool_use", "stop_sequence", "context"):
        stack.engine.script = frames(
            ThinkingDelta("hm"),
            TextDelta("Looking."),
            ToolUseStart("call_a", "look"),
            ToolInputDelta('{"a": [1, {"b": null}]}'),
            Finished(reason=reason, output_tokens=9, thinking_tokens=2),  # type: ignore[arg-type]
        )
        for thinks in ({}, {"thinkingConfig": {"includeThoughts": True}}):
            whole = post(stack, **fields, generationConfig=thinks)
            live = post(stack, "streamGenerateContent", **fields, generationConfig=thinks)
            answers += [whole.json()] if whole.status_code == 200 else []
            answers += live.json() if live.status_code == 200 else []
    assert len(answers) > 25
    assert any("functionCall" in str(answer) for answer in answers)
    for answer in answers:
        strict(google.GenerateContentResponse, answer)


def test_googles_own_types_accept_what_is_counted_listed_and_cached(stack: Stack) -> None:
    counted = post(stack, "countTokens").json()
    counted.pop("promptTokensDetails")
    strict(google.CountTokensResponse, counted)
    with stack.http() as http:
        listed = http.get("/v1beta/models").json()["models"]
        # The SDK gives it another name: `supported_actions`.
        known = fields_of(google.Model) | {"supportedGenerationMethods", "baseModelId"}
        assert listed and known >= {name for model in listed for name in model}
        assert known >= names_of(response.Model)
        content = {"contents": [user({"text": LONG_TEXT})], "ttl": "300s", "displayName": "rules"}
        reply = http.post("/v1beta/cachedContents", json={"model": f"models/{MODEL}", **content})
        assert reply.status_code == 200, reply.text
        strict(google.CachedContent, reply.json())
        url = f"/v1beta/{reply.json()['name']}"
        strict(google.ListCachedContentsResponse, http.get("/v1beta/cachedContents").json())
        strict(google.CachedContent, http.get(url).json())
        strict(google.CachedContent, http.patch(url, json={"ttl": "600s"}).json())
        strict(google.DeleteCachedContentResponse, http.delete(url).json())
