"""The prompt, in the order in which its segments are numbered: tools, system, message parts."""

from typing import Any

import msgspec

from engine.protocol.values import Role


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tool definition; `input_schema` keeps the client's key order.

    A call of a `strict` tool keeps to the schema, in an engine with the capability `strict_tools`.
    """

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool = False


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingPart(msgspec.Struct, frozen=True, tag="thinking"):
    text: str


class ToolUsePart(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultPart(msgspec.Struct, frozen=True, tag="tool_result"):
    tool_use_id: str
    text: str
    is_error: bool = False


Part = TextPart | ThinkingPart | ToolUsePart | ToolResultPart


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. Consecutive messages of one role are merged before they get here."""

    role: Role
    parts: list[Part]


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A conversation, or a raw `text`: that bypasses the chat template and excludes all else.

    `named_tools` may be called like `tools`. Their definitions are in the messages, so that no
    template renders them and they are no segments.
    """

    messages: list[Message]
    tools: list[Tool] = []
    system: list[TextPart] = []
    text: str | None = None
    named_tools: list[Tool] = []

    @property
    def callable_tools(self) -> list[Tool]:
        """Every tool that the model may call."""
        return [*self.tools, *self.named_tools] if self.named_tools else self.tools

    @property
    def num_segments(self) -> int:
        """Segments are numbered from 0: each tool, each system block, each message part.

        A raw text is one.
        """
        if self.text is not None:
            return 1
        return len(self.tools) + len(self.system) + sum(len(m.parts) for m in self.messages)
