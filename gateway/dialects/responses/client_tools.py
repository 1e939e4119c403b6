"""Tools that OpenAI defines and the client runs: their descriptions for a model, and their calls.

Only OpenAI's models know their schemas, so here they are functions of the prompt.
"""

from collections.abc import Mapping
from typing import Any

from gateway.dialects.collector import partial_json

TOOL_SEARCH = "tool_search"
"""The client's own search for tools. The request has its schema."""
_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_NUMBER = {"type": "integer", "minimum": 1}
_WORKS = ("create_file", "update_file", "delete_file")
_DIFF = (
    "for create_file: the file, each line behind a +; for update_file: for each place a line @@,"
    " then its lines behind a blank where they stay, a - where they go, a + where they are new"
)
_TOOLS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "shell": (
        "Runs commands in a shell, and returns what each prints and how it ends.",
        {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER},
        ["commands"],
    ),
    "local_shell": (
        "Runs a program, given as its name and arguments, and returns what it prints.",
        {
            "command": _TEXTS,
            "env": {"type": "object", "additionalProperties": _TEXT},
            "timeout_ms": _NUMBER,
            "user": _TEXT,
            "working_directory": _TEXT,
        },
        ["command"],
    ),
    "apply_patch": (
        "Creates, changes or deletes a file.",
        {"type": {"enum": [*_WORKS]}, "path": _TEXT, "diff": {**_TEXT, "description": _DIFF}},
        ["type", "path"],
    ),
}


def runs_at_client(kind: str, tool: Mapping[str, Any]) -> bool:
    """Whether the client runs a tool of this type. A shell in a container runs at the vendor's."""
    place = tool.get("environment")
    return kind in _TOOLS and (not isinstance(place, dict) or place.get("type") == "local")


def described(kind: str) -> tuple[str, dict[str, Any]]:
    """The description and the schema of a tool that `runs_at_client`."""
    about, properties, required = _TOOLS[kind]
    schema = {"type": "object", "properties": properties, "required": required}
    return about, {**schema, "additionalProperties": False}


def action_of(kind: str, text: str) -> dict[str, Any]:
    """A call's action or operation, from the `text` that the model wrote. It is JSON that may be
    cut off.

    Fields that differ from the schema are left out. Those that the API always has are then empty.
    """
    value = partial_json(text)
    if kind == TOOL_SEARCH:
        return value if isinstance(value, dict) else {}
    types = _TOOLS[kind][1]
    fields: dict[str, Any] = {
        name: item
        for name, item in (value.items() if isinstance(value, dict) else ())
        if name in types and isinstance(item, _TYPES[types[name].get("type", "string")])
    }
    match kind:
        case "shell":
            return fields | {"commands": _texts(fields)}
        case "local_shell":
            env = {name: str(item) for name, item in fields.get("env", {}).items()}
            return {"type": "exec", **fields, "command": _texts(fields), "env": env}
        case _:
            work = fields.get("type")
            fields |= {"type": work if work in _WORKS else "update_file"}
            return {"path": "", **({} if work == "delete_file" else {"diff": ""}), **fields}


def arguments_in(kind: str, action: Mapping[str, Any]) -> dict[str, Any]:
    """What the model wrote, from the action that `action_of` made of it."""
    defaults = {"type": "exec", "env": {}} if kind == "local_shell" else {}
    return {
        name: item
        for name, item in action.items()
        if item is not None and not (name in defaults and item == defaults[name])
    }


_TYPES = {"string": str, "integer": int, "array": list, "object": dict}


def _texts(fields: Mapping[str, Any]) -> list[str]:
    return [str(command) for command in fields.get("commands", fields.get("command", []))]
