"""What every dialect's lowering does: it builds the prompt, and a slot for each of its segments.

Tools come first, then the system prompt, then the messages in order. Each content part, call and
result is one segment. Neighbours of one role are merged. What no model reads has a placeholder.
"""

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from engine.protocol import (
    MAX_BREAKPOINTS,
    TTLS,
    Message,
    Part,
    Prompt,
    Role,
    Sampling,
    TextPart,
    Tool,
    ToolChoice,
    Ttl,
)
from gateway.base.errors import InvalidRequest
from gateway.prompt.ask import guarantees_calls
from gateway.prompt.breakpoints import Layout, Slot, mark_latest
from gateway.prompt.ignored import STRICT_REASON, Notepad
from gateway.prompt.media import Media, Unreadable, stand_in
from gateway.prompt.schemas import check_json

NATIVE_TTL: Ttl = "30m"
HELD_SHORTER = f"a breakpoint is held for {TTLS[NATIVE_TTL].words} after its last use"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Marker(Protocol):
    """A `cache_control`."""

    @property
    def ttl(self) -> Ttl: ...


class NativeMarker(Protocol):
    """A `prompt_cache_breakpoint`, OpenAI's own marker."""

    @property
    def ttl(self) -> Literal["30m", "12h"] | None: ...


class Lowering:
    """`disagreement` is said of two markers on one place with different TTLs."""

    disagreement = "two markers on one place must agree"

    def __init__(self, notepad: Notepad, unreadable: Unreadable) -> None:
        self.notepad = notepad
        self.unreadable = unreadable
        self.slots: list[Slot] = []
        self.tools: list[Tool] = []
        self.system: list[TextPart] = []
        self.messages: list[Message] = []
        self._native: list[int] = []

    def layout(self, num_implicit: int = 0) -> Layout:
        """Of OpenAI's own markers the latest count: as many as the others, and `num_implicit` more,
        leave of those that a prompt may have."""
        room = MAX_BREAKPOINTS - num_implicit
        slots = mark_latest(self.slots, self._native, NATIVE_TTL, room=room)
        return Layout(Prompt(self.messages, self.tools, self.system), slots)

    def add(self, role: Role, parts: Sequence[Part]) -> None:
        """Parts of a message; those of one role are one message."""
        if not parts:
            return
        if self.messages and self.messages[-1].role == role:
            self.messages[-1].parts.extend(parts)
        else:
            self.messages.append(Message(role, list(parts)))

    def add_told(self, texts: Sequence[TextPart]) -> None:
        """Texts of a system message: the system prompt, until there is another message."""
        if self.messages:
            self.add("system", texts)
        else:
            self.system.extend(texts)

    def mark(
        self,
        path: str,
        *markers: Marker | None,
        native: NativeMarker | None = None,
        can_carry: bool = True,
        is_absent: bool = False,
    ) -> None:
        """Add the next segment's slot, or one of what is kept out of the prompt."""
        found = [marker.ttl for marker in markers if marker is not None]
        if len(set(found)) > 1:
            raise InvalidRequest(f"{path}.cache_control.ttl: {self.disagreement}")
        if native is not None and not found:
            self.mark_native(path, native)
        self.slots.append(
            Slot(
                path=path,
                marker=found[0] if found else None,
                num_markers=self.num_markers(found),
                can_carry=can_carry and not is_absent,
                is_absent=is_absent,
            )
        )

    def num_markers(self, found: Sequence[Ttl]) -> int:
        """How many of a prompt's markers those of one place are."""
        return min(len(found), 1)

    def mark_native(self, path: str, marker: NativeMarker) -> None:
        """Mark the next slot."""
        if marker.ttl == "12h":
            self.notepad.ignore(f"{path}.prompt_cache_breakpoint.ttl", HELD_SHORTER)
        self._native.append(len(self.slots))

    def stand_in(self, path: str, media: Media) -> str:
        """Raise InvalidRequest where the setting refuses what no model here reads."""
        return stand_in(path, media, self.unreadable, self.notepad)


def arguments_of(path: str, text: str) -> dict[str, Any]:
    """The input of a call that is JSON in a string."""
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path}: must be a JSON object, written as a string")
    check_json(arguments, path)
    return arguments


def text_in(data: str) -> str | None:
    """The text in base64; None where it is no text in UTF-8."""
    try:
        return b64decode(data, validate=True).decode()
    except (Base64Error, ValueError):
        return None


def split_data_url(url: str) -> tuple[str, str]:
    """Media type and data of a `data:` URL (RFC 2397); both empty for any other address."""
    if not url.startswith("data:"):
        return "", ""
    head, _, data = url.removeprefix("data:").partition(",")
    return head[:256].partition(";")[0], data


def sampling_of(
    request: msgspec.Struct, renamed: Mapping[str, str] | None = None, **changed: Any
) -> Sampling:
    """The sampling that a request's fields say.

    A field has the name that it has in Sampling, or the one that `renamed` gives it. A `top_p` of 0
    leaves only the most likely token, like a temperature of 0.
    """
    names = renamed or {}
    given: dict[str, Any] = {"max_tokens": None}
    for name in Sampling.__struct_fields__:
        value = getattr(request, names.get(name, name), None)
        if value is not None:
            given[name] = value
    given |= changed
    if given.get("top_p") == 0:
        given |= {"temperature": 0.0, "top_p": None}
    return Sampling(**given)


def wish_strict(
    notepad: Notepad,
    choice: ToolChoice,
    schema: dict[str, Any] | None,
    tools: Iterable[tuple[str, str]],
) -> None:
    """Note the strict tools, by path and name, where calls are not held to schemas anyway."""
    if not guarantees_calls(choice, has_schema=schema is not None):
        for path, name in tools:
            notepad.wish(path, STRICT_REASON, "strict_tools", name)
