"""The bounds of a request in Google's dialect, checked before any work is done for it."""

from typing import Any

import msgspec

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.calls import check_input
from gateway.dialects.gathered import bounded_tokens
from gateway.dialects.gemini.content import Part
from gateway.dialects.gemini.request import GenerateRequest, GenerationConfig, Prompted
from gateway.prompt.schemas import check_schema


def check_bounds(request: Prompted, bounds: RequestBounds) -> None:
    """Raise InvalidRequest that names the field and its bound; linear in the request."""
    _check_length(request.model, "model", bounds)
    _check_tools(request, bounds)
    contents = request.contents
    num_parts = sum(max(len(content.parts), 1) for content in contents)
    if request.system_instruction is not None:
        num_parts += len(request.system_instruction.parts)
    if num_parts > bounds.max_blocks:
        raise InvalidRequest(f"contents: more than {bounds.max_blocks} parts")
    for index, content in enumerate(contents):
        for number, part in enumerate(content.parts):
            _check_names(part, f"contents[{index}].parts[{number}]", bounds)
    if isinstance(request, GenerateRequest):
        _check_generation(request.generation_config, bounds)


def bound_logprobs(config: GenerationConfig, bounds: RequestBounds) -> None:
    """For an answer that is gathered. It gets a limit where it has none."""
    if config.response_logprobs:
        num_probs = config.candidate_count * ((config.logprobs or 0) + 1)
        field = "generationConfig.maxOutputTokens"
        asked = config.max_output_tokens
        most = bounded_tokens(asked, num_probs, bounds, field=field, param=None)
        config.max_output_tokens = most


def check_metadata(labels: Any, bounds: RequestBounds) -> None:
    """The field changes nothing and is not kept."""
    if len(msgspec.json.encode(labels)) > bounds.max_metadata_bytes:
        raise InvalidRequest(f"labels: may have at most {bounds.max_metadata_bytes} bytes")


def _check_tools(request: Prompted, bounds: RequestBounds) -> None:
    if sum(len(tool.function_declarations) + 1 for tool in request.tools) > 2 * bounds.max_tools:
        raise InvalidRequest(f"tools: may have at most {bounds.max_tools} functions")
    for index, tool in enumerate(request.tools):
        for number, function in enumerate(tool.function_declarations):
            path = f"tools[{index}].functionDeclarations[{number}]"
            _check_length(function.name, f"{path}.name", bounds)
            if function.parameters is not None:
                check_schema(function.parameters, f"{path}.parameters", bounds)
            if function.parameters_json_schema is not None:
                where = f"{path}.parametersJsonSchema"
                check_schema(function.parameters_json_schema, where, bounds)


def _check_generation(config: GenerationConfig, bounds: RequestBounds) -> None:
    if config.candidate_count > bounds.max_choices:
        raise InvalidRequest(
            f"generationConfig.candidateCount: must be at most {bounds.max_choices}"
        )
    if len(config.stop_sequences) > bounds.max_stop_sequences:
        raise InvalidRequest(
            f"generationConfig.stopSequences: may have at most {bounds.max_stop_sequences} items"
        )
    if any(len(stop) > bounds.max_stop_characters for stop in config.stop_sequences):
        raise InvalidRequest(
            "generationConfig.stopSequences: a stop sequence may have at most"
            f" {bounds.max_stop_characters} characters"
        )
    if config.response_schema is not None:
        check_schema(config.response_schema, "generationConfig.responseSchema", bounds)
    if config.response_json_schema is not None:
        check_schema(config.response_json_schema, "generationConfig.responseJsonSchema", bounds)


def _check_names(part: Part, path: str, bounds: RequestBounds) -> None:
    if (call := part.function_call) is not None:
        _check_length(call.name, f"{path}.functionCall.name", bounds)
        _check_length(call.id or "", f"{path}.functionCall.id", bounds)
        check_input(call.args, f"{path}.functionCall.args", bounds)
    if (response := part.function_response) is not None:
        _check_length(response.name, f"{path}.functionResponse.name", bounds)
        _check_length(response.id or "", f"{path}.functionResponse.id", bounds)


def _check_length(name: str, path: str, bounds: RequestBounds) -> None:
    if len(name) > bounds.max_name_characters:
        raise InvalidRequest(f"{path}: may have at most {bounds.max_name_characters} characters")
