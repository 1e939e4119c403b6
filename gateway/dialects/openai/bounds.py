"""The bounds of a request in OpenAI's dialect, checked before any work is done for it."""

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.calls import check_arguments
from gateway.dialects.gathered import bounded_tokens
from gateway.dialects.openai.content import AssistantMessage, Message, ToolMessage
from gateway.dialects.openai.request import (
    ChatRequest,
    GenerationRequest,
    JsonSchemaFormat,
    NamedTool,
)
from gateway.prompt.schemas import check_schema


def check_bounds(request: GenerationRequest, bounds: RequestBounds) -> None:
    """Raise InvalidRequest that names the field and its bound; linear in the request.

    A gathered answer with log probabilities gets a limit where it has none.

    That there are at most four stop strings is part of the request's type.
    """
    _check_length(request.model, "model", bounds)
    if request.n > bounds.max_choices:
        raise InvalidRequest(f"n: must be at most {bounds.max_choices}")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    if any(len(stop) > bounds.max_stop_characters for stop in stops):
        raise InvalidRequest(
            f"stop: a stop sequence may have at most {bounds.max_stop_characters} characters"
        )
    if isinstance(request, ChatRequest):
        _check_chat(request, bounds)
        _bound_logprobs(request, bounds)


def _bound_logprobs(request: ChatRequest, bounds: RequestBounds) -> None:
    if not request.logprobs or request.stream:
        return
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    asked = getattr(request, name)
    num_probs = request.n * (request.top_logprobs + 1)
    most = bounded_tokens(asked, num_probs, bounds, field=name, param=name)
    setattr(request, name, most)


def check_metadata(num_bytes: int, bounds: RequestBounds, name: str = "metadata") -> None:
    """The field changes nothing and is not kept."""
    if num_bytes > bounds.max_metadata_bytes:
        raise InvalidRequest(f"{name}: may have at most {bounds.max_metadata_bytes} bytes")


def _check_chat(request: ChatRequest, bounds: RequestBounds) -> None:
    _check_blocks(request.messages, bounds)
    if len(request.tools) > bounds.max_tools:
        raise InvalidRequest(f"tools: may have at most {bounds.max_tools} items")
    for index, tool in enumerate(request.tools):
        path = f"tools[{index}].function"
        _check_length(tool.function.name, f"{path}.name", bounds)
        if tool.function.parameters is not None:
            check_schema(tool.function.parameters, f"{path}.parameters", bounds)
    form = request.response_format
    if isinstance(form, JsonSchemaFormat) and form.json_schema.schema is not None:
        check_schema(form.json_schema.schema, "response_format.json_schema.schema", bounds)
    if isinstance(request.tool_choice, NamedTool):
        _check_length(request.tool_choice.function.name, "tool_choice.function.name", bounds)


def _check_blocks(messages: list[Message], bounds: RequestBounds) -> None:
    left = bounds.max_blocks
    for message in messages:
        left -= len(message.content) if isinstance(message.content, list) else 1
        if isinstance(message, AssistantMessage):
            left -= len(message.tool_calls or [])
        if left < 0:
            raise InvalidRequest(
                f"messages: more than {bounds.max_blocks} content parts and tool calls"
            )
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            _check_length(message.tool_call_id, f"messages[{index}].tool_call_id", bounds)
        elif isinstance(message, AssistantMessage):
            for number, call in enumerate(message.tool_calls or []):
                path = f"messages[{index}].tool_calls[{number}]"
                _check_length(call.id, f"{path}.id", bounds)
                _check_length(call.function.name, f"{path}.function.name", bounds)
                check_arguments(call.function.arguments, f"{path}.function.arguments", bounds)


def _check_length(name: str, path: str, bounds: RequestBounds) -> None:
    if len(name) > bounds.max_name_characters:
        raise InvalidRequest(f"{path}: may have at most {bounds.max_name_characters} characters")
