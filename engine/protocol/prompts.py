"""A prompt: tools, system blocks and messages, or a raw text."""

import re
from typing import Any, Literal

import msgspec

IMAGE_REFERENCE = re.compile(r"\[image ([0-9a-f]{64})\]")
"""A reference in a text to an image of the prompt, by the image's id. A reference to an id that the
prompt lacks is plain text."""

Role = Literal["user", "assistant", "system"]


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tool definition."""

    name: str
    # A JSON schema, its keys in the client's order.
    input_schema: dict[str, Any]
    description: str | None = None
    # Whether calls must follow the schema (capability `strict_tools`).
    strict: bool = False


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingPart(msgspec.Struct, frozen=True, tag="thinking"):
    text: str


class ToolUsePart(msgspec.Struct, frozen=True, tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    # An object. It is the text itself if the call was cut, or if the text is no JSON object.
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

    # The HMAC-SHA256 of `data` under the scope, 64 hex digits. So two scopes have different ids.
    id: str
    media_type: str
    data: bytes
    # In pixels, by the file's header.
    width: int
    # In pixels, by the file's header.
    height: int

    @property
    def reference(self) -> str:
        return f"[image {self.id}]"


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A conversation, or a raw text."""

    messages: list[Message]
    tools: list[Tool] = []
    system: list[TextPart] = []
    # A raw text. It bypasses the chat template and excludes all else.
    text: str | None = None
    # Further tools that may be called. The messages define them, so they make no segments.
    named_tools: list[Tool] = []
    # Images, each shown in place of its reference in a text (capability `images`).
    images: list[Image] = []

    @property
    def callable_tools(self) -> list[Tool]:
        """Every tool that the model may call."""
        return [*self.tools, *self.named_tools] if self.named_tools else self.tools

    @property
    def num_segments(self) -> int:
        """The number of segments: one for each tool, each system block and each message part.

        They are numbered from 0 in that order. A raw text is one segment.
        """
        if self.text is not None:
            return 1
        num_parts = sum(len(message.parts) for message in self.messages)
        return len(self.tools) + len(self.system) + num_parts
