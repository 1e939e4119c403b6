"""The tools of a request: which the prompt begins with, and which it shows when they are named.

A deferred tool (`defer_loading`) is not in the beginning of the prompt. A `tool_reference` or a
`tool_addition` names it; from there on its definition is in the conversation, behind what was
cached, and the model may call it. Naming one thus loses no prefix.
"""

from itertools import islice
from typing import Any

import msgspec

from engine.protocol import Tool as PromptTool
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.content import ForeignTool, Tool
from gateway.prompt.ignored import Notepad
from gateway.prompt.layout import check_json

_encode = msgspec.json.Encoder().encode
MAX_NAMED = 512
_SEARCH = "tool_search_tool"
_NO_SERVER = "this server runs no tools of its own, and the model knows no such tool"


class Tools:
    """Read the conversation in its order: what a reference shows depends on those before it."""

    def __init__(self, tools: list[Tool], notepad: Notepad) -> None:
        self._tools = tools
        self._notepad = notepad
        self._waiting: dict[str, PromptTool] = {}
        self._names = {tool.name for tool in tools}
        self._named: dict[str, PromptTool] = {}
        self._defers = self._may_defer()

    @property
    def named(self) -> list[PromptTool]:
        """The deferred tools that the conversation names, in its order, `MAX_NAMED` at most."""
        return list(islice(self._named.values(), MAX_NAMED))

    def shown(self, index: int, tool: Tool) -> PromptTool | None:
        """The tool as the prompt begins with it; None for one that is not in its beginning."""
        path = f"tools.{index}"
        if isinstance(tool, ForeignTool):
            what = _NO_SERVER
            if tool.name.startswith(_SEARCH):
                what = "this server searches no tools: deferred tools are shown from the start"
            self._notepad.ignore(path, f"{tool.name[:64]}: {what}")
            return None
        made = self._checked(path, tool)
        if "direct" not in tool.allowed_callers:
            self._notepad.ignore(path, "no server tool can call it here, so it is left out")
            return None
        if not tool.defer_loading or not self._defers:
            return made
        self._waiting[tool.name] = made
        return None

    def name(self, path: str, name: str) -> str:
        """The text of a reference: the tool's definition where it is named for the first time."""
        tool = self._waiting.pop(name, None)
        if tool is not None:
            return self._show(tool)
        if name not in self._names:
            self._notepad.ignore(path, "there is no such tool in `tools`")
        return f"Tool: {name}"

    def add(self, path: str, tool: dict[str, Any]) -> str:
        """The text of an addition: of a tool by its name, or by its definition."""
        match tool:
            case {"type": "tool_reference", "name": str(name)}:
                return self.name(path, name)
            case {"type": "tool_definition", "definition": {"name": str(name)} as definition}:
                schema = definition.get("input_schema")
                if isinstance(schema, dict) and definition.get("type") in (None, "custom"):
                    check_json(schema, f"{path}.tool.definition.input_schema")
                    about = definition.get("description")
                    description = about if isinstance(about, str) else None
                    return self._show(PromptTool(name, schema, description))
        self._notepad.ignore(path, _NO_SERVER)
        return "[tool_addition: not shown to this model]"

    def remove(self, path: str, tool: dict[str, Any]) -> str:
        name = tool.get("name")
        if not isinstance(name, str):
            self._notepad.ignore(path, _NO_SERVER)
            return "[tool_removal: not shown to this model]"
        self._named.pop(name, None)
        self._notepad.ignore(path, "the model is told, and may still call it")
        return f"The tool {name} is not available any more."

    def _show(self, tool: PromptTool) -> str:
        self._named.pop(tool.name, None)
        self._named[tool.name] = tool
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        return "Tool: " + _encode({"type": "function", "function": function}).decode()

    def _may_defer(self) -> bool:
        """Whether somebody names the deferred tools, and the template shows how to call one."""
        if any(isinstance(t, ForeignTool) and t.name.startswith(_SEARCH) for t in self._tools):
            return False
        own = [tool for tool in self._tools if not isinstance(tool, ForeignTool)]
        if not any(tool.defer_loading for tool in own):
            return True
        if all(tool.defer_loading for tool in own):
            self._notepad.ignore(
                "tools", "all are deferred, and a model learns from one how to call: all are shown"
            )
            return False
        return True

    def _checked(self, path: str, tool: Tool) -> PromptTool:
        if tool.defer_loading and tool.cache_control:
            raise InvalidRequest(
                f"Tool '{tool.name[:64]}' cannot have both defer_loading=true and cache_control"
                " set. Tools with defer_loading cannot use prompt caching."
            )
        if not tool.name:
            raise InvalidRequest(f"{path}.name: String should have at least 1 character")
        if tool.input_examples:
            self._notepad.ignore(f"{path}.input_examples", "not shown to this model")
        if tool.allowed_callers != ["direct"]:
            self._notepad.ignore(f"{path}.allowed_callers", "only the model itself calls tools")
        return PromptTool(tool.name, tool.input_schema, tool.description, strict=tool.strict)
