"""Every field and type of the official SDK's Responses API is known here.

The SDK's own type definitions are walked, so what a new version brings fails here.
"""

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from openai.types import responses as sdk
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_input_item_param,
    tool_param,
)
from typing_extensions import get_type_hints, is_typeddict

from gateway.base.errors import InvalidRequest
from gateway.dialects.responses import request
from gateway.dialects.responses.request import decode_responses

PAIRS: list[tuple[Any, type[msgspec.Struct]]] = [
    (response_create_params.PromptCacheOptions, request.CacheOptions),
    (response_create_params.StreamOptions, request.StreamOptions),
    (sdk.ResponseTextConfigParam, request.TextOptions),
    (sdk.ResponseFormatTextJSONSchemaConfigParam, request.JsonSchemaFormat),
    (sdk.ToolChoiceAllowedParam, request.AllowedTools),
    (sdk.EasyInputMessageParam, request.Message),
    (sdk.ResponseOutputMessageParam, request.Message),
    (response_input_item_param.Message, request.Message),
    (response_input_item_param.FunctionCallOutput, request.FunctionCallOutput),
    (response_input_item_param.AdditionalTools, request.AdditionalTools),
    (sdk.ResponseFunctionToolCallParam, request.FunctionCall),
    (sdk.ResponseCustomToolCallParam, request.CustomToolCall),
    (sdk.ResponseCustomToolCallOutputParam, request.CustomToolCallOutput),
    (sdk.ResponseReasoningItemParam, request.Reasoning),
    (sdk.ResponseInputTextParam, request.InputText),
    (sdk.ResponseInputImageParam, request.InputImage),
    (sdk.ResponseInputFileParam, request.InputFile),
    (sdk.ResponseOutputTextParam, request.OutputText),
    (sdk.FunctionToolParam, request.FunctionTool),
    (sdk.CustomToolParam, request.CustomTool),
    (sdk.NamespaceToolParam, request.NamespaceTool),
]


def leaves(hint: Any) -> Iterator[Any]:
    parts = get_args(hint)
    if not parts:
        yield hint
    for part in parts:
        yield from leaves(part)


def types_in(union: Any) -> set[str]:
    """The values of `type` of a union's members."""
    members = [member for member in leaves(union) if is_typeddict(member)]
    hints = [get_type_hints(member) for member in members]
    found = {kind for hint in hints if "type" in hint for kind in leaves(hint["type"])}
    return {kind for kind in found if isinstance(kind, str)}


def decoded(**body: Any) -> request.Given:
    return decode_responses(msgspec.json.encode({"model": "m", "input": "x", **body}))


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_every_field_of_the_sdk_is_known(theirs: Any, ours: type[msgspec.Struct]) -> None:
    ignored = {"type"} if ours.__struct_config__.tag else set()
    assert set(get_type_hints(theirs)) - ignored <= set(ours.__struct_encode_fields__)


def test_every_parameter_is_honoured_ignored_told_or_refused() -> None:
    known = {"previous_response_id", *request.ResponsesRequest.__struct_encode_fields__}
    known |= request.FIELDS.silent | request.FIELDS.told.keys() | request.FIELDS.refused.keys()
    parameters = get_type_hints(response_create_params.ResponseCreateParamsStreaming)
    assert len(parameters) > 25
    assert set(parameters) <= known
    assert set(get_type_hints(input_token_count_params.InputTokenCountParams)) <= known


def test_every_type_of_item_is_taken_left_out_or_refused_by_name() -> None:
    kinds = types_in(response_input_item_param.ResponseInputItemParam)
    assert len(kinds) > 25
    for kind in kinds:
        try:
            decoded(input=[{"type": kind}])
        except InvalidRequest as error:
            assert "Invalid value" not in str(error), kind


def test_every_type_of_tool_is_taken_or_left_out() -> None:
    kinds = types_in(tool_param.ToolParam)
    assert len(kinds) > 12
    for kind in kinds:
        tool = {"type": kind, "name": "x", "tools": []}
        if kind in ("function", "custom"):
            del tool["tools"]
        given = decoded(tools=[tool])
        is_ours = kind in ("function", "custom", "namespace")
        assert isinstance(given.request.tools[0], request.Hosted) is not is_ours
