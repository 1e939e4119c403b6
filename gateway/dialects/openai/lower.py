"""From a Chat Completions request's content to the engine's prompt: an ordered list of segments.

Tools come first, then the system and developer messages at the beginning, then everything else in
order: each content part, tool call and tool result is one segment; a string is one part. Later
system messages stay where they are. Tool results are part of the user's turn, and neighbours of one
role are merged.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from engine.protocol import (
    MAX_BREAKPOINTS,
    TTLS,
    Prompt,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
    Ttl,
)
from engine.protocol import Message as PromptMessage
from engine.protocol import Part as PromptPart
from engine.protocol import Tool as PromptTool
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache
from gateway.dialects.bodies import decode_tools, kinds_of_tools
from gateway.dialects.openai.request import (
    Address,
    AssistantMessage,
    AudioPart,
    AudioUrlPart,
    CacheBreakpoint,
    CacheControl,
    ChatRequest,
    DeveloperMessage,
    FilePart,
    ForeignTool,
    Function,
    ImagePart,
    MediaPart,
    Message,
    Nonce,
    Part,
    Refusal,
    SystemMessage,
    Text,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
    VideoPart,
)
from gateway.prompt.breakpoints import mark_latest
from gateway.prompt.ignored import Notepad
from gateway.prompt.layout import Layout, Slot, check_json
from gateway.prompt.media import Kind, Media, Unreadable, stand_in


class _Declared(msgspec.Struct):
    type: str
    cache_control: CacheControl | None = None


_declared = msgspec.json.Decoder(_Declared)
_tool = msgspec.json.Decoder(Tool)


def decode_foreign_tools(raw: bytes) -> list[Tool] | None:
    """The tools of a request, of which some are no functions; None where all are.

    Raise msgspec.ValidationError with the path in the whole body.
    """
    tools = kinds_of_tools(raw, "function")
    return None if tools is None else decode_tools(tools, _tool.decode, _foreign)


def _foreign(tool: Raw) -> Tool:
    declared = _declared.decode(tool)
    return ForeignTool("function", Function(name=declared.type), declared.cache_control)


def media_of(part: MediaPart) -> Media:
    """What a placeholder tells of a part."""
    match part:
        case ImagePart(image_url=address):
            return _of_address("image", address)
        case VideoPart(video_url=address):
            return _of_address("video", address)
        case AudioUrlPart(audio_url=address):
            return _of_address("audio", address)
        case AudioPart(input_audio=sound):
            return Media("audio", sound.format)
        case FilePart(file=file):
            if file.file_data is not None:
                found = _of_address("file", file.file_data)
                return Media("file", found.media_type, name=file.filename or "")
            return Media("file", name=file.filename or file.file_id or "")


def _of_address(kind: Kind, address: Address | str) -> Media:
    """A `data:` URL (RFC 2397) has the media type in front."""
    url = address if isinstance(address, str) else address.url
    if not url.startswith("data:"):
        return Media(kind, name=url)
    head, _, data = url.removeprefix("data:").partition(",")
    return Media(kind, head[:256].partition(";")[0], data)


NATIVE_TTL: Ttl = "30m"
HELD_SHORTER = f"a breakpoint is held for {TTLS[NATIVE_TTL].words} after its last use"
_NO_SERVER = "this server runs no such tool, and the model knows none"


def lay_out(
    request: ChatRequest,
    automatic: Ttl | None,
    notepad: Notepad | None = None,
    unreadable: Unreadable = "placeholder",
    policy: AutoCache | None = None,
) -> tuple[Layout, AutoCache | None]:
    """The layout, and the policy if it holds: not beside a `cache_control`.

    Of OpenAI's own breakpoints the latest count, as many as the other markers and the policy's last
    one leave of four. Raise InvalidRequest for content that no engine could be sent.
    """
    builder = _Builder(Notepad() if notepad is None else notepad, unreadable)
    for index, tool in enumerate(request.tools):
        builder.add_tool(index, tool)
    for index, message in enumerate(request.messages):
        builder.add_message(index, message)
    if any(slot.num_markers for slot in builder.slots):
        policy = None
    num_implicit = int(bool(automatic or (policy and policy.mode == "conversation")))
    room = MAX_BREAKPOINTS - num_implicit
    slots = mark_latest(builder.slots, builder.native, NATIVE_TTL, room=room)
    return Layout(builder.prompt(), slots), policy


class _Builder:
    def __init__(self, notepad: Notepad, unreadable: Unreadable) -> None:
        self._notepad = notepad
        self._unreadable = unreadable
        self.slots: list[Slot] = []
        self.native: list[int] = []
        self._tools: list[PromptTool] = []
        self._system: list[TextPart] = []
        self._messages: list[PromptMessage] = []

    def prompt(self) -> Prompt:
        return Prompt(self._messages, self._tools, self._system)

    def add_tool(self, index: int, tool: Tool) -> None:
        path, function = f"tools[{index}]", tool.function
        if isinstance(tool, ForeignTool):
            self._notepad.ignore(path, f"{function.name[:64]}: {_NO_SERVER}")
            self._mark(path, tool.cache_control)
            self.slots[-1] = replace(self.slots[-1], can_carry=False, is_absent=True)
            return
        if not function.name:
            raise InvalidRequest(f"{path}.function.name: must not be empty")
        schema = function.parameters
        if schema is None:
            schema = {"type": "object", "properties": {}}
        self._mark(path, tool.cache_control, function.cache_control)
        self._tools.append(
            PromptTool(function.name, schema, function.description, strict=function.strict or False)
        )

    def add_message(self, index: int, message: Message) -> None:
        path = f"messages[{index}]"
        match message:
            case SystemMessage() | DeveloperMessage():
                texts = self._texts(path, message.content, message.cache_control)
                if self._messages:
                    self._add("system", texts)
                else:
                    self._system.extend(texts)
            case UserMessage():
                self._add("user", self._texts(path, message.content, message.cache_control))
            case ToolMessage():
                self._add("user", [self._tool_result(path, message)])
            case AssistantMessage():
                self._add("assistant", self._assistant(path, message))

    def _add(self, role: Role, parts: Sequence[PromptPart]) -> None:
        if self._messages and self._messages[-1].role == role:
            self._messages[-1].parts.extend(parts)
        else:
            self._messages.append(PromptMessage(role, list(parts)))

    def _texts(
        self, path: str, content: str | Sequence[Part], marker: CacheControl | None
    ) -> list[TextPart]:
        """A marker of a message counts as one on its last part."""
        if isinstance(content, str):
            self._mark_text(f"{path}.content", content, marker)
            return [TextPart(content)]
        if not content:
            raise InvalidRequest(f"{path}.content: must not be empty")
        texts: list[TextPart] = []
        for number, part in enumerate(content):
            outer = marker if number == len(content) - 1 else None
            where = f"{path}.content[{number}]"
            text = self._text(where, part)
            self._mark_text(
                where, text, outer, part.cache_control, native=part.prompt_cache_breakpoint
            )
            if isinstance(part, Nonce):
                self.slots[-1] = replace(self.slots[-1], can_carry=False, is_absent=True)
            else:
                texts.append(TextPart(text))
        return texts

    def _text(self, path: str, part: Part) -> str:
        if isinstance(part, Text):
            return part.text
        return stand_in(path, media_of(part), self._unreadable, self._notepad)

    def _assistant(self, path: str, message: AssistantMessage) -> list[PromptPart]:
        parts: list[PromptPart] = []
        if message.audio is not None:
            self._notepad.ignore(f"{path}.audio", "not shown to this model: audio")
        thought = message.reasoning_content or message.reasoning
        if thought:
            self.slots.append(Slot(path=f"{path}.reasoning", can_carry=False))
            parts.append(ThinkingPart(thought))
        calls = message.tool_calls or []
        outer = None if calls else message.cache_control
        content = message.content
        if isinstance(content, list):
            parts.extend(self._texts(path, [_as_text(part) for part in content], outer))
        elif content or not (calls or thought):
            if content is None:
                raise InvalidRequest(f"{path}.content: required unless there are tool_calls")
            parts.extend(self._texts(path, content, outer))
        for number, call in enumerate(calls):
            where = f"{path}.tool_calls[{number}]"
            outer = message.cache_control if number == len(calls) - 1 else None
            self._mark(where, call.cache_control, outer)
            parts.append(ToolUsePart(call.id, call.function.name, _arguments(where, call)))
        return parts

    def _tool_result(self, path: str, message: ToolMessage) -> ToolResultPart:
        """The parts make one segment, so only the last one may be marked."""
        content = message.content
        if isinstance(content, str):
            self._mark(f"{path}.content", message.cache_control)
            return ToolResultPart(message.tool_call_id, content)
        for number, part in enumerate(content[:-1]):
            if part.cache_control or part.prompt_cache_breakpoint:
                raise InvalidRequest(
                    f"{path}.content[{number}]: only the last part of a tool message may be marked"
                )
        last = content[-1] if content else Text(text="")
        self._mark(
            f"{path}.content",
            message.cache_control,
            last.cache_control,
            native=last.prompt_cache_breakpoint,
        )
        texts = [self._text(f"{path}.content[{n}]", part) for n, part in enumerate(content)]
        return ToolResultPart(message.tool_call_id, "\n".join(texts))

    def _mark_text(
        self,
        path: str,
        text: str,
        *markers: CacheControl | None,
        native: CacheBreakpoint | None = None,
    ) -> None:
        if not text and (native or any(markers)):
            raise InvalidRequest(f"{path}: cache_control cannot be set for empty text")
        self._mark(path, *markers, native=native)

    def _mark(
        self, path: str, *markers: CacheControl | None, native: CacheBreakpoint | None = None
    ) -> None:
        """Add the next segment's slot. Several markers of one place must agree."""
        found = [marker.ttl for marker in markers if marker]
        if len(set(found)) > 1:
            raise InvalidRequest(f"{path}.cache_control.ttl: two markers on one place must agree")
        if native and not found:
            self.native.append(len(self.slots))
            if native.ttl == "12h":
                where = f"{path}.prompt_cache_breakpoint.ttl"
                self._notepad.ignore(where, HELD_SHORTER)
        marker = found[0] if found else None
        self.slots.append(Slot(path=path, marker=marker, num_markers=min(len(found), 1)))


def _as_text(part: Text | Refusal) -> Text:
    return Text(text=part.refusal) if isinstance(part, Refusal) else part


def _arguments(path: str, call: ToolCall) -> dict[str, Any]:
    where = f"{path}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise InvalidRequest(f"{where}: must be a JSON object, written as a string") from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}: must be a JSON object, written as a string")
    check_json(arguments, where)
    return arguments
