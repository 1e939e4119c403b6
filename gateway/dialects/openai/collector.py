"""Joins a response's chunks to one answer, for requests without a stream."""

from collections.abc import Iterable
from dataclasses import dataclass, field

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


def collect_chat(chunks: Iterable[CompletionChunk]) -> ChatCompletion:
    """Raise EngineFailed if the chunks are not a whole response."""
    first, chosen, usage = None, dict[int, _ChosenText](), None
    for chunk in chunks:
        first = first or chunk
        usage = chunk.usage or usage
        for choice in chunk.choices:
            chosen.setdefault(choice.index, _ChosenText()).take(choice)
    if first is None or not isinstance(usage, Usage):
        raise EngineFailed
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
            for index, text in sorted(chosen.items())
        ],
        usage=usage,
        holdfast=first.holdfast,
    )


def collect_completion(chunks: Iterable[Completion]) -> Completion:
    """Raise EngineFailed if the chunks are not a whole response."""
    first, chosen, usage = None, dict[int, _ChosenText](), None
    for chunk in chunks:
        first = first or chunk
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = chosen.setdefault(choice.index, _ChosenText())
            text.parts.append(choice.text)
            text.end(choice.finish_reason, choice.stop_reason)
    if first is None or not isinstance(usage, Usage):
        raise EngineFailed
    choices = [
        TextChoice(
            index=index,
            text="".join(text.parts),
            finish_reason=_reason(text),
            stop_reason=text.stop_reason,
        )
        for index, text in sorted(chosen.items())
    ]
    return msgspec.structs.replace(first, choices=choices, usage=usage)


def _reason(text: _ChosenText) -> FinishReason:
    if text.finish_reason is None:
        raise EngineFailed
    return text.finish_reason
