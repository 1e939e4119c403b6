"""From a Responses request's content to the engine's prompt: an ordered list of segments.

Tools come first, then `instructions` and the system and developer messages at the beginning, then
everything else in order. Each content part, call and output is one segment; a string is one part.
Later system messages stay where they are. Neighbours of one role are merged.

Reasoning comes back from a client in `encrypted_content`. Its text is signed with the workspace's
scope, so that only what this installation wrote for this workspace is read as the model's own. It
is not hidden: the client saw it in the response.
"""

import hmac
from base64 import b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from engine.protocol import (
    MAX_BREAKPOINTS,
    Part,
    Prompt,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from engine.protocol import Message as PromptMessage
from gateway.base.errors import InvalidRequest
from gateway.dialects.openai.lower import HELD_SHORTER, NATIVE_TTL
from gateway.dialects.responses.request import (
    AdditionalTools,
    CacheBreakpoint,
    ClientCall,
    ClientCallOutput,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Hosted,
    InputFile,
    InputImage,
    InputPart,
    Item,
    Message,
    Reasoning,
    Refusal,
    ResponsesRequest,
)
from gateway.dialects.responses.request import Part as GivenPart
from gateway.dialects.responses.tools import INPUT, Toolbox
from gateway.prompt.breakpoints import mark_latest
from gateway.prompt.ignored import Notepad
from gateway.prompt.layout import Layout, Slot, check_json
from gateway.prompt.media import Kind, Media, Unreadable, stand_in

_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")


def text_of(
    path: str, part: InputImage | InputFile, unreadable: Unreadable, notepad: Notepad
) -> str:
    """Raise InvalidRequest where the setting refuses what no model here reads."""
    if isinstance(part, InputImage):
        media_type, data = _split(part.image_url or "")
        name = "" if data else part.image_url or part.file_id or ""
        return stand_in(path, Media("image", media_type, data, name), unreadable, notepad)
    media_type, data = _split(part.file_data or "")
    name = part.filename or part.file_url or part.file_id or ""
    text = _decoded(data) if media_type.startswith(_TEXT_TYPES) else None
    if text is not None:
        return f"{name}\n{text}" if name else text
    kind: Kind = "document" if part.file_data else "file"
    return stand_in(path, Media(kind, media_type, data, name), unreadable, notepad)


def _split(url: str) -> tuple[str, str]:
    """Media type and base64 of a data URL, both empty for any other."""
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        return "", ""
    return head.removeprefix("data:").removesuffix(";base64"), data


def _decoded(data: str) -> str | None:
    try:
        return b64decode(data, validate=True).decode()
    except (Base64Error, ValueError):
        return None


_PREFIX = "hf1."
_DIGEST_BYTES = 16


def seal(thought: str, scope: str) -> str:
    text = thought.encode()
    return _PREFIX + urlsafe_b64encode(_digest(text, scope) + text).decode()


def unseal(sealed: str, scope: str) -> str | None:
    """The thought, or None where somebody else wrote it."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        whole = b64decode(sealed[len(_PREFIX) :].encode(), altchars=b"-_", validate=True)
    except ValueError:
        return None
    digest, text = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(text, scope)):
        return None
    return text.decode()


def _digest(text: bytes, scope: str) -> bytes:
    return blake2b(
        text, digest_size=_DIGEST_BYTES, key=scope.encode()[:64], person=b"thought"
    ).digest()


class Reading(NamedTuple):
    """What a request is read with: the workspace's scope, a setting, and where to note what has no
    effect."""

    scope: str
    unreadable: Unreadable
    notepad: Notepad


def lay_out(
    request: ResponsesRequest, toolbox: Toolbox, reading: Reading, num_implicit: int
) -> Layout:
    """Of the client's breakpoints the latest count, as many as `num_implicit` leave of four.

    Raise InvalidRequest for content that no engine could be sent.
    """
    builder = _Builder(toolbox, reading)
    builder.slots += [Slot(path=path) for path in toolbox.paths]
    if request.instructions:
        builder.slots.append(Slot(path="instructions"))
        builder.system.append(TextPart(request.instructions))
    if isinstance(request.input, str):
        builder.add_parts("user", [builder.text("input", request.input)])
    else:
        _check_calls(request.input)
        for index, item in enumerate(request.input):
            builder.add_item(f"input[{index}]", item)
    room = MAX_BREAKPOINTS - num_implicit
    slots = mark_latest(builder.slots, builder.marked, NATIVE_TTL, room=room)
    prompt = Prompt(builder.messages, toolbox.functions, builder.system)
    return Layout(prompt, slots)


@dataclass(slots=True)
class _Builder:
    """`marked` are the slots with a breakpoint of the client's."""

    toolbox: Toolbox
    reading: Reading
    slots: list[Slot] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)
    system: list[TextPart] = field(default_factory=list)
    messages: list[PromptMessage] = field(default_factory=list)

    def add_item(self, path: str, item: Item) -> None:
        match item:
            case Message():
                self._add_message(path, item)
            case Reasoning():
                self._add_reasoning(path, item)
            case FunctionCall(call_id=call_id, name=name, namespace=namespace):
                made = self.toolbox.name_of(name, namespace, is_custom=False)
                self._add_call(path, call_id, made, _arguments(f"{path}.arguments", item.arguments))
            case CustomToolCall(call_id=call_id, name=name, namespace=namespace):
                made = self.toolbox.name_of(name, namespace, is_custom=True)
                self._add_call(path, call_id, made, {INPUT: item.input})
            case ClientCall(call_id=call_id, kind=kind, input=asked):
                check_json(asked, path)
                self._add_call(path, call_id, kind, asked)
            case FunctionCallOutput(call_id=call_id, output=output):
                self._add_output(path, call_id, output)
            case CustomToolCallOutput(call_id=call_id, output=output):
                self._add_output(path, call_id, output)
            case ClientCallOutput(call_id=call_id, text=text):
                self._add_output(path, call_id, text)
            case AdditionalTools() | Hosted():
                pass

    def add_parts(self, role: Role, parts: Sequence[Part]) -> None:
        if not parts:
            return
        if self.messages and self.messages[-1].role == role:
            self.messages[-1].parts.extend(parts)
        else:
            self.messages.append(PromptMessage(role, list(parts)))

    def text(self, path: str, text: str, marker: CacheBreakpoint | None = None) -> TextPart:
        if marker is not None:
            if not text:
                raise InvalidRequest(f"{path}: a breakpoint cannot be set for empty text", path)
            self._mark(path, marker)
        self.slots.append(Slot(path=path))
        return TextPart(text)

    def _add_message(self, path: str, message: Message) -> None:
        if isinstance(message.content, str):
            parts = [self.text(f"{path}.content", message.content)]
        else:
            parts = [
                self._part(f"{path}.content[{number}]", part)
                for number, part in enumerate(message.content)
            ]
        if message.role in ("system", "developer"):
            if self.messages:
                self.add_parts("system", parts)
            else:
                self.system.extend(parts)
        else:
            self.add_parts("assistant" if message.role == "assistant" else "user", parts)

    def _part(self, path: str, part: GivenPart) -> TextPart:
        if isinstance(part, InputImage | InputFile):
            return self.text(path, self._shown(path, part), part.prompt_cache_breakpoint)
        if isinstance(part, Refusal):
            return self.text(path, part.refusal)
        return self.text(path, part.text, getattr(part, "prompt_cache_breakpoint", None))

    def _add_reasoning(self, path: str, item: Reasoning) -> None:
        """The thought that we wrote, or one that is there in words.

        What somebody else encrypted is left out.
        """
        if item.encrypted_content is not None:
            thought = unseal(item.encrypted_content, self.reading.scope)
            if thought is None:
                self.reading.notepad.ignore(path, "reasoning that another server encrypted")
                return
        else:
            thought = "\n\n".join(part.text for part in item.content or item.summary or [])
        if thought:
            self.slots.append(Slot(path=path, can_carry=False))
            self.add_parts("assistant", [ThinkingPart(thought)])

    def _add_call(self, path: str, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        self.slots.append(Slot(path=path))
        self.add_parts("assistant", [ToolUsePart(call_id, name, arguments)])

    def _add_output(self, path: str, call_id: str, output: str | list[InputPart]) -> None:
        """The parts make one segment, which ends where the last one does."""
        if isinstance(output, list):
            texts: list[str] = []
            for number, part in enumerate(output):
                where = f"{path}.output[{number}]"
                if isinstance(part, InputImage | InputFile):
                    texts.append(self._shown(where, part))
                else:
                    texts.append(part.text)
                if part.prompt_cache_breakpoint is not None:
                    if number < len(output) - 1:
                        raise InvalidRequest(
                            f"{where}: only the last part of an output may be marked", where
                        )
                    self._mark(where, part.prompt_cache_breakpoint)
            output = "\n".join(texts)
        self.slots.append(Slot(path=path))
        self.add_parts("user", [ToolResultPart(call_id, output)])

    def _shown(self, path: str, part: InputImage | InputFile) -> str:
        return text_of(path, part, self.reading.unreadable, self.reading.notepad)

    def _mark(self, path: str, marker: CacheBreakpoint) -> None:
        """Mark the next slot. No entry here is held for 12 hours."""
        if marker.ttl == "12h":
            where = f"{path}.prompt_cache_breakpoint.ttl"
            self.reading.notepad.ignore(where, HELD_SHORTER)
        self.marked.append(len(self.slots))


def _arguments(path: str, text: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path}: must be a JSON object, written as a string", path)
    check_json(arguments, path)
    return arguments


def _check_calls(items: Sequence[Item]) -> None:
    """Check that each output answers a call before it, and that each call has its output."""
    pending: dict[str, int] = {}
    for item in items:
        match item:
            case FunctionCall() | CustomToolCall() | ClientCall():
                pending[item.call_id] = pending.get(item.call_id, 0) + 1
            case FunctionCallOutput() | CustomToolCallOutput() | ClientCallOutput():
                if not pending.get(item.call_id):
                    raise InvalidRequest(
                        f"No tool call found for function call output with call_id"
                        f" {item.call_id[:64]}.",
                        "input",
                    )
                pending[item.call_id] -= 1
            case _:
                pass
    missing = [call_id for call_id, count in pending.items() if count]
    if missing:
        raise InvalidRequest(f"No tool output found for function call {missing[0][:64]}.", "input")
