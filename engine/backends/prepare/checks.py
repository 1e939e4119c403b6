"""The checks of a request before anything that costs more than reading it."""

from collections.abc import Sequence

from engine.backends.prepare.constraints import constraining_schemas, is_constrained, may_compile
from engine.backends.prepare.schemas import check_schemas
from engine.errors import InvalidRequest, Unsupported
from engine.protocol import (
    MAX_RECORD_BYTES,
    Breakpoint,
    Capability,
    Document,
    GenerateRequest,
    Name,
    OwnTemplateField,
    Prompt,
    needs_own_template,
)
from engine.protocol.reports import Description

_OWN_TEMPLATE: dict[OwnTemplateField, str] = {
    "prompt.text": "prompt.text: a raw prompt",
    "messages": "messages: a last message of the assistant, to be continued,",
}
MAX_SEGMENTS = 100_000
"""The most tools, system blocks and message parts of one request together."""
MAX_STOPS = 1_024
MAX_STOP_BYTES = 65_536
"""The most bytes of all stop strings together, as UTF-8."""


def check_request(request: GenerateRequest, description: Description) -> None:
    """Check all of a request but its prompt's length. The protocol's types bound single fields.

    Raise InvalidRequest, SchemaRefused or Unsupported. The message names the field.
    """
    _check_places(request)
    _check_capabilities(request, description)
    _check_values(request)
    _check_tool_choice(request)
    _check_stops(request.sampling.stop_sequences)
    check_schemas(constraining_schemas(request))


def _check_places(request: GenerateRequest) -> None:
    """Raise InvalidRequest for a breakpoint, a document or a name at a segment that is missing."""
    num_segments = request.prompt.num_segments
    fields: dict[str, Sequence[Breakpoint | Document | Name]] = {
        "breakpoints": request.breakpoints,
        "documents": request.documents,
        "names": request.names,
    }
    for field, placed in fields.items():
        for index, place in enumerate(placed):
            if place.segment >= num_segments:
                raise InvalidRequest(f"{field}[{index}].segment: no such segment")


def _check_capabilities(request: GenerateRequest, description: Description) -> None:
    needed: dict[Capability, bool] = {
        "tools": bool(request.prompt.callable_tools),
        "forced_tools": request.tool_choice.mode in ("any", "tool"),
        "structured_output": request.constrains_text,
        "thinking": request.thinking,
        "images": bool(request.prompt.images),
    }
    for capability, is_needed in needed.items():
        if is_needed and capability not in description.capabilities:
            raise Unsupported(f"this engine does not declare the capability {capability!r}")
    for field, capability in request.sampling.needs:
        if capability not in description.capabilities:
            raise Unsupported(
                f"{field}: this engine does not declare the capability {capability!r}"
            )
    if "own_template" not in description.capabilities:
        _check_foreign_template(request)


def _check_foreign_template(request: GenerateRequest) -> None:
    """Raise Unsupported for a prompt that the model's server can't render with its own template."""
    for field in needs_own_template(request.prompt):
        raise Unsupported(
            f"{_OWN_TEMPLATE[field]} is not supported: the model's server renders its own prompts"
        )


def _check_values(request: GenerateRequest) -> None:
    sampling = request.sampling
    if not request.prompt.num_segments:
        raise InvalidRequest("prompt: must not be empty")
    if len(request.record.encode()) > MAX_RECORD_BYTES:
        raise InvalidRequest(f"record: at most {MAX_RECORD_BYTES} bytes")
    if sampling.num_choices > 1 and sampling.max_tokens == 0:
        raise InvalidRequest("sampling.num_choices: must be 1 where max_tokens is 0")
    if not 0 <= (request.lease_share or 0) <= 1:
        raise InvalidRequest("lease_share: must be 0 to 1")
    if request.output_schema is not None and request.output_pattern is not None:
        raise InvalidRequest("output_pattern: excludes output_schema")
    if sampling.min_tokens and is_constrained(request):
        raise InvalidRequest("sampling.min_tokens: must be 0 where the output is constrained")
    if sampling.allowed_token_ids and may_compile(request):
        raise InvalidRequest(
            "sampling.allowed_token_ids: must be empty where the output or a call is constrained"
        )


def _check_tool_choice(request: GenerateRequest) -> None:
    choice = request.tool_choice
    names = {tool.name for tool in request.prompt.callable_tools}
    if choice.mode in ("any", "tool") and not names:
        raise InvalidRequest("tool_choice: there are no tools to choose from")
    if choice.names and choice.mode not in ("any", "auto"):
        raise InvalidRequest("tool_choice.names: only for the modes `any` and `auto`")
    if not names.issuperset(choice.names):
        raise InvalidRequest("tool_choice.names: no such tool")
    if choice.mode == "tool" and choice.name not in names:
        raise InvalidRequest("tool_choice.name: no such tool")


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"sampling.stop_sequences: at most {MAX_STOPS}")
    if sum(len(stop.encode()) for stop in stops) > MAX_STOP_BYTES:
        raise InvalidRequest(f"sampling.stop_sequences: at most {MAX_STOP_BYTES} bytes together")


def check_prompt(prompt: Prompt) -> None:
    """Raise InvalidRequest for too many segments, and for a raw text with anything beside it."""
    if prompt.text is not None and (prompt.messages or prompt.callable_tools or prompt.system):
        raise InvalidRequest("prompt.text: excludes messages, tools and system")
    if prompt.num_segments + len(prompt.named_tools) > MAX_SEGMENTS:
        raise InvalidRequest(f"prompt: at most {MAX_SEGMENTS} tools, blocks and parts")
