"""What one request may ask for: checked before anything that costs more than reading it."""

from collections.abc import Iterator
from typing import Any

from engine.backends.prepare.prepared import RequestLimits
from engine.backends.prepare.schemas import check_schemas
from engine.errors import InvalidRequest, PromptTooLong
from engine.protocol import Description, GenerateRequest, Prompt, ToolUsePart


def check_size(prompt: Prompt, limits: RequestLimits) -> None:
    """Raises InvalidRequest for more segments than an engine takes."""
    if prompt.num_segments + len(prompt.named_tools) > limits.segments:
        raise InvalidRequest(f"prompt: at most {limits.segments} tools, blocks and parts")


def check_length(prompt: Prompt, description: Description) -> None:
    """Raises PromptTooLong where even the longest token would not bring the text into the context.

    `longest_token_bytes` 0 means that the tokenizer gives no such bound.
    """
    longest = description.longest_token_bytes
    if not longest:
        return
    num_bytes = sum(len(text.encode()) for text in _texts(prompt))
    room = description.max_context_tokens - 1
    if num_bytes > room * longest:
        raise PromptTooLong(-(-num_bytes // longest), room)


def check_demand(request: GenerateRequest, limits: RequestLimits) -> None:
    """Raises InvalidRequest for too many or too long stop strings, and for schemas beyond bounds.

    Only schemas that the output must keep to are bounded here: others are text of the prompt.
    """
    stops = request.sampling.stop_sequences
    if len(stops) > limits.stops:
        raise InvalidRequest(f"sampling.stop_sequences: at most {limits.stops}")
    if sum(len(stop.encode()) for stop in stops) > limits.stop_bytes:
        raise InvalidRequest(f"sampling.stop_sequences: at most {limits.stop_bytes} bytes together")
    check_schemas(_schemas(request), limits)


def check_strict(request: GenerateRequest, limits: RequestLimits) -> None:
    """Raises SchemaRefused where the strict tools' schemas are beyond the same bounds."""
    tools = request.prompt.callable_tools
    strict = [(f"tool `{tool.name}`", tool.input_schema) for tool in tools if tool.strict]
    check_schemas(strict, limits)


def _texts(prompt: Prompt) -> Iterator[str]:
    """What a client wrote as text; of objects nothing, since a template may write them shorter."""
    if prompt.text is not None:
        yield prompt.text
    for block in prompt.system:
        yield block.text
    for message in prompt.messages:
        for part in message.parts:
            if not isinstance(part, ToolUsePart):
                yield part.text


def _schemas(request: GenerateRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that bind the output, each with the field that it stands in."""
    choice = request.tool_choice
    is_forced = choice.mode in ("any", "tool")
    if is_forced or (request.output_schema is not None and choice.mode == "auto"):
        for index, tool in enumerate(request.prompt.callable_tools):
            if choice.allows(tool.name):
                yield f"tools[{index}].input_schema", tool.input_schema
    if request.output_schema is not None:
        yield "output_schema", request.output_schema
