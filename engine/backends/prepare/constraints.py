"""What constrains a request's output, and the request without it."""

from collections.abc import Callable
from typing import Any

import msgspec

from engine.protocol import GenerateRequest, Tool


def constraining_schemas(request: GenerateRequest) -> list[tuple[str, dict[str, Any]]]:
    """The schemas that constrain the output, each with its field.

    All other schemas are only text of the prompt.
    """
    choice = request.tool_choice
    schemas: list[tuple[str, dict[str, Any]]] = []
    is_forced = choice.mode in ("any", "tool")
    if is_forced or (request.constrains_text and choice.mode == "auto"):
        schemas += [
            (f"tools[{index}].input_schema", tool.input_schema)
            for index, tool in enumerate(request.prompt.callable_tools)
            if choice.allows(tool.name)
        ]
    if request.output_schema is not None:
        schemas.append(("output_schema", request.output_schema))
    return schemas


def without_strict(request: GenerateRequest, is_loose: Callable[[str], bool]) -> GenerateRequest:
    """The request with `strict` removed from the tools whose names `is_loose` accepts."""

    def loosened(tools: list[Tool]) -> list[Tool]:
        return [
            msgspec.structs.replace(tool, strict=False) if is_loose(tool.name) else tool
            for tool in tools
        ]

    tools = loosened(request.prompt.tools)
    named = loosened(request.prompt.named_tools)
    prompt = msgspec.structs.replace(request.prompt, tools=tools, named_tools=named)
    return msgspec.structs.replace(request, prompt=prompt)


def without_names(request: GenerateRequest) -> GenerateRequest:
    """The request in which the mode `auto` allows all tools. Other modes stay as they are."""
    choice = request.tool_choice
    if choice.mode != "auto" or not choice.names:
        return request
    free = msgspec.structs.replace(choice, names=[])
    return msgspec.structs.replace(request, tool_choice=free)


def unconstrained(request: GenerateRequest) -> GenerateRequest:
    """The request with all constraints on calls among free text removed."""
    return without_strict(without_names(request), lambda _: True)


def is_constrained(request: GenerateRequest) -> bool:
    """Whether a schema, a pattern or a forced call constrains the whole output."""
    return request.constrains_text or request.tool_choice.mode in ("any", "tool")


def may_compile(request: GenerateRequest) -> bool:
    """Whether the request's parsers compile a grammar."""
    return is_constrained(request) or request.constrains_calls
