"""A prompt: tools, system blocks and messages, or a raw text."""

import re
from typing import Any, Literal

import msgspec

IMAGE_REFERENCE = re.compile(r"\[image ([0-9a-f]{64})\]")
"""Stands for an image in a text, by its id. Of an id that the prompt lacks it is text."""

Role = Literal["user", "assistant", "system"]


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tool definition."""

    name: str
    # In the client's order of keys.
    input_schema: dict[str, Any]
    description: str | None = None
    # Whether its calls keep to the schema (capability `strict_tools`).
    strict: bool = False


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingPart(msgspec.Struct, frozen=True, tag="thinking"):
    text: str


class ToolUsePart(msgspec.Struct, frozen=True, tag="tool_use"):
    """A call that the model made. Its input is an object, or the text that stood in its place."""

    id: str
    name: str
    # A text where a call was cut, or where its input is no JSON object that can cross to here.
    input: dict[str, Any] | str


class ToolResultPart(msgspec.Struct, frozen=True, tag="tool_result"):
    tool_use_id: str
    text: str
    is_error: bool = False


Part = TextPart | ThinkingPart | ToolUsePart | ToolResultPart


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. Consecutive messages of one role are merged before they get here."""

    role: Role
    parts: list[Part]


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A PNG, JPEG, GIF or WebP file."""

    # The HMAC-SHA256 of `data` under the scope, 64 hex digits. Only who knows the scope can write
    # the reference, and equal images of two scopes have two ids.
    id: str
    media_type: str
    data: bytes
    # In pixels, as the file's header says.
    width: int
    height: int

    @property
    def reference(self) -> str:
        return f"[image {self.id}]"


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A conversation, or a raw text."""

    messages: list[Message]
    tools: list[Tool] = []
    system: list[TextPart] = []
    # A raw text bypasses the chat template and excludes all else.
    text: str | None = None
    # They may be called like `tools`. Their definitions stand in the messages: no template renders
    # them, and they are no segments.
    named_tools: list[Tool] = []
    # Each is shown where a text has its reference (capability `images`).
    images: list[Image] = []

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
        num_parts = sum(len(message.parts) for message in self.messages)
        return len(self.tools) + len(self.system) + num_parts
