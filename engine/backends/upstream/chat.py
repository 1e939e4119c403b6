"""Conversations in the form that servers of chat completions take, and a parser of their answers.

Such a server renders prompts and parses answers by itself.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine.backends.external import Order
from engine.backends.upstream.server import UpstreamError
from engine.cache.ids import TokenId
from engine.protocol import (
    IMAGE_REFERENCE,
    Delta,
    FinishReason,
    GenerateRequest,
    Image,
    Prompt,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ToolInputDelta,
    ToolResultPart,
    ToolUsePart,
    ToolUseStart,
)
from engine.text.formats.arguments import new_tool_use_id
from engine.text.formats.matching import StopFinder, StopStrings


class CalledFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: CalledFunction = CalledFunction()


class ChatDelta(msgspec.Struct, frozen=True):
    """The fields of OpenAI's delta that are read. Servers use either name for thinking."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


SEPARATOR = "\n\n"
MAX_CALLS = 128
_FINISH: dict[str, FinishReason] = {
    "length": "length",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
}
"""Our reasons by theirs. Any other reason counts as `stop`."""


def chat_messages(prompt: Prompt, images: Sequence[Image] = ()) -> list[dict[str, Any]]:
    """The prompt's messages as JSON values, without earlier thinking. It must not be a raw text.

    Each image takes the place of its reference. vLLM caches an image by its `uuid`, which differs
    between scopes.
    """
    by_id = {image.id: image for image in images}

    def content(text: str) -> str | list[dict[str, Any]]:
        parts = list[dict[str, Any]]()
        # Pieces with odd numbers are the ids of references.
        for place, piece in enumerate(IMAGE_REFERENCE.split(text) if by_id else [text]):
            image = by_id.get(piece) if place % 2 else None
            if image is not None:
                data = b64encode(image.data).decode()
                url = {"url": f"data:{image.media_type};base64,{data}"}
                parts.append({"type": "image_url", "image_url": url, "uuid": image.id})
            elif piece:
                part_text = f"[image {piece}]" if place % 2 else piece
                parts.append({"type": "text", "text": part_text})
        return parts if any("uuid" in part for part in parts) else text

    messages: list[dict[str, Any]] = []
    if prompt.system:
        system = SEPARATOR.join(part.text for part in prompt.system)
        messages.append({"role": "system", "content": system})
    for message in prompt.messages:
        texts = [part.text for part in message.parts if isinstance(part, TextPart)]
        messages += [
            {"role": "tool", "tool_call_id": part.tool_use_id, "content": content(part.text)}
            for part in message.parts
            if isinstance(part, ToolResultPart)
        ]
        calls = [
            {
                "id": part.id,
                "type": "function",
                "function": {"name": part.name, "arguments": _arguments(part)},
            }
            for part in message.parts
            if isinstance(part, ToolUsePart)
        ]
        if texts or calls:
            turn_content = content(SEPARATOR.join(texts)) or None
            turn: dict[str, Any] = {"role": message.role, "content": turn_content}
            messages.append(turn | ({"tool_calls": calls} if calls else {}))
    return messages


def _arguments(part: ToolUsePart) -> str:
    return part.input if isinstance(part.input, str) else json.dumps(part.input)


def conversation(order: Order) -> dict[str, Any]:
    """The messages and tools of a request to a server of chat completions, as JSON values."""
    prompt = order.request.prompt
    images = () if order.image_prompt is None else order.image_prompt.images
    body: dict[str, Any] = {"messages": chat_messages(prompt, images)}
    if prompt.tools:
        functions = [
            {"name": t.name, "description": t.description or "", "parameters": t.input_schema}
            for t in prompt.tools
        ]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
    return body


class ChatParser:
    """An `engine.schedule.output.OutputParser` that takes deltas instead of tokens.

    The model's `tokenizer` counts tokens if the server does not tell them.
    """

    constraint = None
    allowed = None
    end_token_ids: frozenset[TokenId] = frozenset()

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self.finish: FinishReason | None = None
        self.stop_sequence: str | None = None
        self.thinking_tokens = 0
        self._stops = StopFinder(StopStrings(request.sampling.stop_sequences))
        self._is_single = not request.tool_choice.parallel
        self._tokenizer = tokenizer
        self._open: int | None = None
        self._written: list[str] = []

    def has_ended(self) -> bool:
        return self.finish is not None

    def feed(self, token_id: TokenId) -> Sequence[Delta]:
        raise NotImplementedError("a server of chat completions sends no tokens")

    def take(self, delta: ChatDelta, finish_reason: str | None) -> list[Delta]:
        """The deltas of an event. Sets `finish` if the event ends the choice.

        Raises UpstreamError for a call without a name, a call out of order, and too many calls.
        """
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
                self.finish = "stop_sequence"
                self.stop_sequence = self._stops.found
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
        rest = self._stops.flush() if self._stops.found is None else ""
        return [TextDelta(rest)] if rest else []

    def count_written(self) -> int:
        """About how many tokens the answer has. Its text is tokenized again for that."""
        return len(self._tokenizer.encode("".join(self._written), add_special_tokens=False).ids)

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
            deltas.append(ToolUseStart(id=call.id or new_tool_use_id(), name=call.function.name))
        if call.function.arguments:
            self._written.append(call.function.arguments)
            deltas.append(ToolInputDelta(call.function.arguments))
        return deltas
