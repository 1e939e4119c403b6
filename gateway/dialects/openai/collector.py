"""Joins a response's chunks to one answer, for requests without a stream."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.base.errors import EngineFailed
from gateway.dialects.openai.logprobs import TokenLogprob
from gateway.dialects.openai.response import (
    Answer,
    Call,
    ChatCompletion,
    Choice,
    ChunkChoice,
    Completion,
    CompletionChunk,
    FinishReason,
    Function,
    Logprobs,
    TextChoice,
    Usage,
)

ChunkT = TypeVar("ChunkT", CompletionChunk, Completion)


@dataclass(slots=True)
class _ChosenText:
    parts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | UnsetType = UNSET

    def take(self, choice: ChunkChoice) -> None:
        delta = choice.delta
        self.parts.append(delta.content or "")
        self.thoughts.append(delta.reasoning or "")
        if choice.logprobs is not UNSET:
            self.logprobs += choice.logprobs.content
        for call in delta.tool_calls or ():
            if call.id is not None:
                self.calls.append((call.id, call.function.name or "", []))
            self.calls[-1][2].append(call.function.arguments or "")
        self.end(choice.finish_reason, choice.stop_reason)

    def end(self, reason: FinishReason | None, stop: str | UnsetType) -> None:
        if reason is not None:
            self.finish_reason, self.stop_reason = reason, stop

    def answer(self) -> Answer:
        text, thought = "".join(self.parts), "".join(self.thoughts)
        return Answer(
            content=text if text or not self.calls else None,
            reasoning=thought or UNSET,
            reasoning_content=thought or UNSET,
            tool_calls=[
                Call(call_id, Function(name, "".join(arguments)))
                for call_id, name, arguments in self.calls
            ]
            or UNSET,
        )


class _Collector(Generic[ChunkT]):
    """Takes the chunks of one response as they come, so that none is kept."""

    def __init__(self) -> None:
        self._first: ChunkT | None = None
        self._usage: Usage | UnsetType | None = None
        self._chosen: dict[int, _ChosenText] = {}

    def take(self, chunk: ChunkT) -> None:
        self._first = self._first or chunk
        self._usage = chunk.usage or self._usage

    def _text(self, index: int) -> _ChosenText:
        return self._chosen.setdefault(index, _ChosenText())

    def _ended(self) -> tuple[ChunkT, Usage, list[tuple[int, _ChosenText]]]:
        if self._first is None or not isinstance(self._usage, Usage):
            raise EngineFailed
        return self._first, self._usage, sorted(self._chosen.items())


class ChatCollector(_Collector[CompletionChunk]):
    def take(self, chunk: CompletionChunk) -> None:
        super().take(chunk)
        for choice in chunk.choices:
            self._text(choice.index).take(choice)

    def whole(self) -> ChatCompletion:
        """Raise EngineFailed if the chunks are not a whole response."""
        first, usage, chosen = self._ended()
        return ChatCompletion(
            id=first.id,
            created=first.created,
            model=first.model,
            choices=[
                Choice(
                    index=index,
                    message=text.answer(),
                    logprobs=Logprobs(text.logprobs) if text.logprobs else None,
                    finish_reason=_reason(text),
                    stop_reason=text.stop_reason,
                )
                for index, text in chosen
            ],
            usage=usage,
            holdfast=first.holdfast,
        )


class TextCollector(_Collector[Completion]):
    def take(self, chunk: Completion) -> None:
        super().take(chunk)
        for choice in chunk.choices:
            text = self._text(choice.index)
            text.parts.append(choice.text)
            text.end(choice.finish_reason, choice.stop_reason)

    def whole(self) -> Completion:
        """Raise EngineFailed if the chunks are not a whole response."""
        first, usage, chosen = self._ended()
        choices = [
            TextChoice(
                index=index,
                text="".join(text.parts),
                finish_reason=_reason(text),
                stop_reason=text.stop_reason,
            )
            for index, text in chosen
        ]
        return msgspec.structs.replace(first, choices=choices, usage=usage)


def _reason(text: _ChosenText) -> FinishReason:
    if text.finish_reason is None:
        raise EngineFailed
    return text.finish_reason
