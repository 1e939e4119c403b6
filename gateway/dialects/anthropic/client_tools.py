"""The tools that the vendor defines and the client runs: what a model is told of them.

Their schemas are known to the vendor's models alone, so here they are given like any other tool.
Their calls go out as the client expects them, by the name that it sent.
"""

import re
from typing import Any

_VERSION = re.compile(r"_(\d{8})$")
_TEXT = {"type": "string"}
_LINE = {"type": "integer", "minimum": 0}
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_FILES: dict[str, dict[str, Any]] = {
    "path": _TEXT,
    "file_text": {**_TEXT, "description": "for create: the whole file"},
    "old_str": {**_TEXT, "description": "for str_replace: the text to replace, there exactly once"},
    "new_str": {**_TEXT, "description": "for str_replace: the text in its place"},
    "insert_line": {
        **_LINE,
        "description": "for insert: the line to insert behind, from 1; 0: first",
    },
    "insert_text": {**_TEXT, "description": "for insert: the text to insert"},
    "view_range": {**_RANGE, "description": "for view: first and last line, from 1; -1 is the end"},
}
_EDITS = ["view", "create", "str_replace", "insert"]


def described(kind: str) -> tuple[str, dict[str, Any]] | None:
    """Description and schema of a tool of this type; None where no client runs such a tool."""
    version = _VERSION.search(kind)
    match kind[: version.start()] if version else "":
        case "bash":
            restart = {"type": "boolean", "description": "true starts the shell anew"}
            about = "Runs a command in a bash shell that stays open, and returns what it prints."
            return about, _object({"command": _TEXT, "restart": restart}, ["command"])
        case "text_editor":
            files = dict(_FILES)
            commands = [*_EDITS]
            if kind < "text_editor_20250429":
                commands.append("undo_edit")
            if kind < "text_editor_20250728":
                del files["insert_text"]
                files["new_str"] = {**_TEXT, "description": "for str_replace, insert: the new text"}
            about = "Views, creates and edits text files. `view` also lists a directory."
            return about, _commands(commands, files)
        case "memory":
            files = {**_FILES, "old_path": _TEXT, "new_path": _TEXT}
            about = (
                "Keeps notes between conversations, in files below /memories. Look there first,"
                " and keep there what will be needed later. `rename` takes old_path, which is path"
                " again, and new_path."
            )
            return about, _commands([*_EDITS, "delete", "rename"], files)
        case _:
            return None


def _commands(names: list[str], files: dict[str, Any]) -> dict[str, Any]:
    return _object({"command": {"enum": names}, **files}, ["command", "path"])


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False}
