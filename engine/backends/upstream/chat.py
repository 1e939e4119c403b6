"""Conversations as OpenAI's chat completions take them, and their deltas as ours. Pure.

The server renders and parses here: its template and its formats are its own.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from engine.backends.upstream.server import CallDelta, ChatDelta
from engine.backends.upstream.wire import UpstreamError, UpstreamUnsupported
from engine.cache.ids import TokenId
from engine.protocol import (
    Delta,
    FinishReason,
    GenerateRequest,
    Prompt,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ToolInputDelta,
    ToolResultPart,
    ToolUsePart,
    ToolUseStart,
)
from engine.schedule.output import OutputParser, Spelled
from engine.text.formats.calls import new_tool_use_id
from engine.text.formats.stops import StopFinder, StopStrings
from engine.text.rendered import KnownDays, RenderedPrompt
from engine.text.renderer import ChatRenderer

SEPARATOR = "\n\n"
MAX_CALLS = 128
_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "stop",
}


def chat_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Raises UpstreamUnsupported for a raw text. Earlier thoughts are left out."""
    if prompt.text is not None:
        raise UpstreamUnsupported("a server of chat completions takes no raw prompt")
    messages: list[dict[str, Any]] = []
    if prompt.system:
        system = SEPARATOR.join(part.text for part in prompt.system)
        messages.append({"role": "system", "content": system})
    for message in prompt.messages:
        texts = [part.text for part in message.parts if isinstance(part, TextPart)]
        messages += [
            {"role": "tool", "tool_call_id": part.tool_use_id, "content": part.text}
            for part in message.parts
            if isinstance(part, ToolResultPart)
        ]
        calls = [
            {
                "id": part.id,
                "type": "function",
                "function": {"name": part.name, "arguments": json.dumps(part.input)},
            }
            for part in message.parts
            if isinstance(part, ToolUsePart)
        ]
        if texts or calls:
            told: dict[str, Any] = {"role": message.role, "content": SEPARATOR.join(texts) or None}
            messages.append(told | ({"tool_calls": calls} if calls else {}))
    return messages


def chat_tools(request: GenerateRequest) -> dict[str, Any]:
    if not request.prompt.tools or request.tool_choice.mode == "none":
        return {}
    functions = [
        {"name": t.name, "description": t.description or "", "parameters": t.input_schema}
        for t in request.prompt.tools
    ]
    return {"tools": [{"type": "function", "function": function} for function in functions]}


class ChatParser:
    """An `engine.schedule.output.OutputParser` whose input are deltas, not tokens.

    `count` counts a text's tokens with the model's tokenizer, for where the server does not tell.
    Raises UpstreamError for a call that can't be told.
    """

    mask = None
    allowed = None

    def __init__(
        self, request: GenerateRequest, count: Callable[[str], int], new_id: Callable[[], str]
    ) -> None:
        self.finish: FinishReason | None = None
        self.stop_sequence: str | None = None
        self.thinking_tokens = 0
        self._stops = StopFinder(StopStrings(request.sampling.stop_sequences))
        self._is_single = not request.tool_choice.parallel
        self._count = count
        self._new_id = new_id
        self._open: int | None = None
        self._written: list[str] = []

    def has_ended(self) -> bool:
        return self.finish is not None

    def feed(self, token_id: TokenId) -> Sequence[Delta]:
        raise NotImplementedError("a server of chat completions sends no tokens")

    def take(self, delta: ChatDelta, finish_reason: str | None) -> list[Delta]:
        """The deltas of an event; sets `finish` where it ends the choice."""
        deltas = list[Delta]()
        thought = delta.reasoning_content or delta.reasoning
        if thought:
            self._written.append(thought)
            deltas.append(ThinkingDelta(thought))
        if delta.content:
            self._written.append(delta.content)
            text = self._stops.feed(delta.content)
            deltas += [TextDelta(text)] if text else []
            if self._stops.found is not None:
                self.finish, self.stop_sequence = "stop_sequence", self._stops.found
                return deltas
        for call in delta.tool_calls or ():
            deltas += self._call(call)
            if self.finish is not None:
                return deltas
        if finish_reason is not None:
            self.finish = _FINISH.get(finish_reason, "stop")
            if self._open is not None and self.finish == "stop":
                self.finish = "tool_use"
        return deltas

    def close(self) -> Sequence[Delta]:
        held = self._stops.flush() if self._stops.found is None else ""
        return [TextDelta(held)] if held else []

    def count_written(self) -> int:
        """About how many tokens all that came are: their text is tokenized again."""
        return self._count("".join(self._written))

    def _call(self, call: CallDelta) -> list[Delta]:
        deltas: list[Delta] = []
        if call.index != self._open:
            if not call.function.name or call.index != (self._open or 0) + (self._open is not None):
                raise UpstreamError("a call without a name, or out of order")
            if call.index >= MAX_CALLS:
                raise UpstreamError("too many calls")
            if self._is_single and self._open is not None:
                self.finish = "tool_use"
                return []
            self._open = call.index
            deltas.append(ToolUseStart(id=call.id or self._new_id(), name=call.function.name))
        if call.function.arguments:
            self._written.append(call.function.arguments)
            deltas.append(ToolInputDelta(call.function.arguments))
        return deltas


class ChatServerRenderer:
    """An `engine.backends.base.Renderer` for a server that renders and parses by itself.

    Our own template says how many tokens a prompt has, and where its segments end.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    @property
    def writes_date(self) -> bool:
        return self._renderer.writes_date

    def render(
        self, prompt: Prompt, *, thinking: bool, scope: str, days: KnownDays | None = None
    ) -> RenderedPrompt:
        return self._renderer.render(prompt, thinking=thinking, scope=scope, days=days)

    def parser(self, request: GenerateRequest) -> OutputParser:
        return ChatParser(request, self._count, new_tool_use_id)

    def parsers(self, request: GenerateRequest) -> list[OutputParser]:
        return [self.parser(request) for _ in range(request.sampling.num_choices)]

    def spelled(self, token_id: TokenId) -> Spelled:
        return self._renderer.spelled(token_id)

    def _count(self, text: str) -> int:
        return len(self._renderer.tokenizer.encode(text, add_special_tokens=False).ids)
