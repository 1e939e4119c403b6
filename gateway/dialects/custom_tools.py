"""Tools whose input is free text. The model sees each as a function with one string."""

from typing import Any

from engine.protocol import Tool
from gateway.dialects.collector import partial_json

INPUT = "input"
"""The one field of such a function."""
GRAMMAR_REASON = "the model is told the grammar, not held to it"


def function_of(
    name: str, description: str | None, *, syntax: str = "", definition: str | None = None
) -> Tool:
    """The function of a tool. Its input may have a grammar: a `definition` in a `syntax`."""
    text: dict[str, Any] = {"type": "string"}
    if definition is not None:
        text["description"] = f"Text of this {syntax} grammar:\n{definition}"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    return Tool(name, schema, description)


def text_of(written: str) -> str:
    """The text in the JSON that a model wrote, which may be cut off. Without such a text it is all
    that the model wrote."""
    if not written:
        return written
    value = partial_json(written)
    text = value.get(INPUT, "") if isinstance(value, dict) else None
    return text if isinstance(text, str) else written
