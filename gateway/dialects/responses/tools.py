"""The request's tools as functions of the prompt, and the way back from a call to its tool.

Functions in a namespace get the namespace's name in front. A custom tool is a function with one
string, `input`. Tools of the vendor's are left out. Names stay unique: where two would be equal,
the later one gets a number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.protocol import Tool as PromptTool
from gateway.base.errors import InvalidRequest
from gateway.dialects.responses.request import (
    CustomTool,
    FunctionTool,
    GrammarInput,
    NamespaceTool,
    Tool,
)
from gateway.prompt.ignored import Notepad

INPUT = "input"
_SEPARATOR = "__"
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Origin(NamedTuple):
    """The tool that a function of the prompt stands for."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(slots=True)
class Toolbox:
    """All functions of the prompt.

    `paths` are where the request has them. Options without effect are noted in `notepad`.
    """

    notepad: Notepad
    functions: list[PromptTool] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    _names: dict[Origin, str] = field(default_factory=dict)
    _by_name: dict[tuple[str, bool], list[str]] = field(default_factory=dict)
    _order: dict[str, int] = field(default_factory=dict)

    def add(self, path: str, tools: Sequence[Tool]) -> None:
        """Raise InvalidRequest for a name that is empty or there twice, and for schemas that can't
        be sent to an engine."""
        # Functions without a namespace keep their names, whatever comes before them.
        for where, tool, namespace in _each(path, tools):
            if namespace is None:
                self._reserve(where, tool, None)
        for where, tool, namespace in _each(path, tools):
            name = self._reserve(where, tool, namespace) if namespace else tool.name
            self.functions.append(self._function(where, name, tool, namespace))
            self.paths.append(where)

    def name_of(self, name: str, namespace: str | None, *, is_custom: bool) -> str:
        """The function's name in the prompt, for a call of the conversation.

        A call may be of a tool that is no longer in the request, or without its namespace.
        """
        known = self._names.get(Origin(name, namespace, is_custom))
        if known is None and namespace is not None:
            return _joined(namespace, name)
        return known or name

    def find(self, name: str | None, namespace: str | None, kind: str) -> list[str]:
        """The prompt's names of the functions that a choice names, in the order of the tools."""
        if name is None:
            return []
        is_custom = kind == "custom"
        found = {
            made
            for made in self._by_name.get((name, is_custom), ())
            if namespace in (None, self.origins[made].namespace)
        }
        own = self.origins.get(name)
        if namespace is None and own is not None and own.is_custom == is_custom:
            found.add(name)
        return sorted(found, key=self._order.__getitem__)

    def keep(self, names: set[str]) -> None:
        """Leave out all other functions."""
        kept = [index for index, tool in enumerate(self.functions) if tool.name in names]
        self.functions = [self.functions[index] for index in kept]
        self.paths = [self.paths[index] for index in kept]

    def _reserve(
        self, path: str, tool: FunctionTool | CustomTool, namespace: NamespaceTool | None
    ) -> str:
        if not tool.name:
            raise InvalidRequest(f"{path}.name: must not be empty", f"{path}.name")
        origin = Origin(
            tool.name, namespace.name if namespace else None, isinstance(tool, CustomTool)
        )
        made = _joined(namespace.name, tool.name) if namespace else tool.name
        if origin in self._names or (namespace is None and made in self.origins):
            raise InvalidRequest(f"{path}.name: tool names must be unique", f"{path}.name")
        first, number = made, 1
        while made in self.origins:
            number += 1
            made = f"{first}_{number}"
        self._order[made] = len(self.origins)
        self._by_name.setdefault((origin.name, origin.is_custom), []).append(made)
        self.origins[made] = origin
        self._names[origin] = made
        return made

    def _function(
        self, path: str, name: str, tool: FunctionTool | CustomTool, namespace: NamespaceTool | None
    ) -> PromptTool:
        if tool.defer_loading:
            self.notepad.ignore(f"{path}.defer_loading", "this server searches no tools")
        if tool.allowed_callers and "direct" not in tool.allowed_callers:
            self.notepad.ignore(f"{path}.allowed_callers", "the model calls all tools itself")
        description = tool.description
        if namespace is not None and namespace.description and namespace.tools[0] is tool:
            description = "\n\n".join(filter(None, (namespace.description, description)))
        if isinstance(tool, CustomTool):
            return self._custom(path, name, tool, description)
        schema = _NO_PARAMETERS if tool.parameters is None else tool.parameters
        return PromptTool(name, schema, description, strict=bool(tool.strict))

    def _custom(
        self, path: str, name: str, tool: CustomTool, description: str | None
    ) -> PromptTool:
        """Its grammar is told to the model; the input is not held to it."""
        what: dict[str, Any] = {"type": "string"}
        if isinstance(tool.format, GrammarInput):
            self.notepad.ignore(f"{path}.format", "the model is told the grammar, not held to it")
            what["description"] = (
                f"Text of this {tool.format.syntax} grammar:\n{tool.format.definition}"
            )
        schema = {"type": "object", "properties": {INPUT: what}, "required": [INPUT]}
        return PromptTool(name, schema, description)


def _each(
    path: str, tools: Sequence[Tool]
) -> Iterator[tuple[str, FunctionTool | CustomTool, NamespaceTool | None]]:
    for index, tool in enumerate(tools):
        where = f"{path}[{index}]"
        if isinstance(tool, FunctionTool | CustomTool):
            yield where, tool, None
        elif isinstance(tool, NamespaceTool):
            for number, inner in enumerate(tool.tools):
                yield f"{where}.tools[{number}]", inner, tool


def _joined(namespace: str, name: str) -> str:
    """The namespace's name in front, unless the name has it there."""
    if name.startswith(namespace):
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"
