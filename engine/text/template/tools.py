"""Tools with what chat templates ask of them, for templates that fail on less."""

from collections.abc import Sequence
from typing import Any

from engine.protocol import Prompt, Tool

MAX_COMPLETION = 2
_DEFAULT_TYPE = "string"


def with_complete_tools(prompt: Prompt, completion: int) -> Prompt:
    """The prompt with its tools completed: not at all (0), their own fields (1), or also those of
    every parameter (2).

    Hermes' and gpt-oss' templates read a description, Seed-OSS' the properties; Hermes' does not
    end on a parameter of several types.
    """
    if completion == 0:
        return prompt
    tools = [_complete(tool, completion) for tool in prompt.tools]
    return Prompt(prompt.messages, tools, prompt.system, prompt.text)


def _complete(tool: Tool, completion: int) -> Tool:
    schema = {"type": "object", "properties": {}, **tool.input_schema}
    if not isinstance(schema["properties"], dict):
        schema["properties"] = {}
    if completion == MAX_COMPLETION:
        schema = {"required": [], **schema}
        schema["properties"] = {
            name: _with_one_type(field) for name, field in schema["properties"].items()
        }
    return Tool(tool.name, schema, tool.description or "")


def _with_one_type(field: Any) -> Any:
    """A schema with a description and one type, of several the first that is not null."""
    if not isinstance(field, dict):
        return {"type": _DEFAULT_TYPE, "description": ""}
    whole = {"description": "", **field, "type": _one_type(field.get("type"))}
    if isinstance(field.get("items"), dict):
        whole["items"] = _with_one_type(field["items"])
    if isinstance(field.get("properties"), dict):
        inner = field["properties"].items()
        whole["properties"] = {name: _with_one_type(value) for name, value in inner}
    return whole


def _one_type(declared: Any) -> str:
    if isinstance(declared, str):
        return declared
    types: Sequence[Any] = declared if isinstance(declared, list) else []
    return next((t for t in types if isinstance(t, str) and t != "null"), _DEFAULT_TYPE)
