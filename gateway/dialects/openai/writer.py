"""From the engine's frames to chunks. Answers without a stream are joined from the same chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from engine.protocol import (
    Done,
    Finished,
    Frame,
    InputUsage,
    Started,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolUseStart,
)
from engine.protocol import FinishReason as EngineReason
from gateway.base.errors import EngineFailed
from gateway.dialects.extension import Found, Holdfast, extension_of
from gateway.dialects.openai.response import (
    Answer,
    Call,
    CallDelta,
    ChatCompletion,
    Choice,
    ChunkChoice,
    Completion,
    CompletionChunk,
    Delta,
    FinishReason,
    Function,
    FunctionDelta,
    Logprobs,
    TextChoice,
    TokenLogprob,
    Usage,
    logprobs_of,
    usage_of,
)

_REASONS: dict[EngineReason, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "context": "length",
}
ChunkT = TypeVar("ChunkT", CompletionChunk, Completion)


@dataclass(slots=True, kw_only=True)
class Writer(Generic[ChunkT]):
    """One response. With `include_usage` the last chunk has the usage and the others a null.

    `paths` name the request's segments in the extension object, which goes out with whatever chunk
    comes first; `found` is asked when the engine's first frame is there.
    """

    response_id: str
    model: str
    created: int
    found: Found
    paths: Sequence[str]
    num_choices: int
    include_usage: bool
    _input: InputUsage = field(default_factory=lambda: InputUsage(input_tokens=0))
    _thinking_tokens: int = 0
    _num_finished: int = 0
    _extension: Holdfast | UnsetType = UNSET
    _num_calls: dict[int, int] = field(default_factory=dict)

    def write(self, frame: Frame) -> Iterator[ChunkT]:
        match frame:
            case Started():
                self._input = frame.usage
                self._extension = msgspec.structs.replace(
                    extension_of(frame, self.found, self.paths),
                    written_tokens=frame.usage.written_tokens,
                )
                yield from self._begin()
            case Finished():
                if frame.reason not in _REASONS:
                    raise EngineFailed
                self._num_finished += 1
                self._thinking_tokens += frame.thinking_tokens
                yield self._finish(frame.choice, _REASONS[frame.reason], frame.stop_sequence)
            case Done():
                if self._num_finished != self.num_choices:
                    raise EngineFailed
                if self.include_usage:
                    usage = usage_of(self._input, frame.output_tokens, self._thinking_tokens)
                    yield self._usage(usage)
            case _:
                yield from self._say(frame)

    def _begin(self) -> Iterator[ChunkT]:
        raise NotImplementedError

    def _say(self, frame: Frame) -> Iterator[ChunkT]:
        raise NotImplementedError

    def _finish(self, index: int, reason: FinishReason, stop: str | None) -> ChunkT:
        raise NotImplementedError

    def _usage(self, usage: Usage) -> ChunkT:
        raise NotImplementedError

    def _take_extension(self) -> Holdfast | UnsetType:
        taken, self._extension = self._extension, UNSET
        return taken


class ChatWriter(Writer[CompletionChunk]):
    __slots__ = ()

    def _begin(self) -> Iterator[CompletionChunk]:
        for index in range(self.num_choices):
            yield self._delta(index, Delta(role="assistant", content=""))

    def _say(self, frame: Frame) -> Iterator[CompletionChunk]:
        match frame:
            case TextDelta(text=text, logprobs=drawn):
                told = Logprobs(logprobs_of(drawn)) if drawn else UNSET
                yield self._delta(frame.choice, Delta(content=text), told)
            case ThinkingDelta(text=text):
                yield self._delta(frame.choice, Delta(reasoning=text, reasoning_content=text))
            case ToolUseStart(id=call_id, name=name, choice=choice):
                index = self._num_calls[choice] = self._num_calls.get(choice, -1) + 1
                call = CallDelta(index, FunctionDelta(name, ""), call_id, "function")
                yield self._delta(choice, Delta(tool_calls=[call]))
            case ToolInputDelta(partial_json=partial, choice=choice):
                if choice not in self._num_calls:
                    raise EngineFailed
                call = CallDelta(self._num_calls[choice], FunctionDelta(arguments=partial))
                yield self._delta(choice, Delta(tool_calls=[call]))

    def _finish(self, index: int, reason: FinishReason, stop: str | None) -> CompletionChunk:
        return self._chunk(
            [
                ChunkChoice(
                    index=index,
                    delta=Delta(),
                    finish_reason=reason,
                    stop_reason=UNSET if stop is None else stop,
                )
            ]
        )

    def _usage(self, usage: Usage) -> CompletionChunk:
        return self._chunk([], usage)

    def _delta(
        self, index: int, delta: Delta, logprobs: Logprobs | UnsetType = UNSET
    ) -> CompletionChunk:
        return self._chunk([ChunkChoice(index=index, delta=delta, logprobs=logprobs)])

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> CompletionChunk:
        return CompletionChunk(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage if self.include_usage else UNSET,
            holdfast=self._take_extension(),
        )


class TextWriter(Writer[Completion]):
    """The writer of a raw prompt's answer. All its output is text."""

    __slots__ = ()

    def _begin(self) -> Iterator[Completion]:
        return iter(())

    def _say(self, frame: Frame) -> Iterator[Completion]:
        if isinstance(frame, TextDelta | ThinkingDelta):
            yield self._chunk([TextChoice(index=frame.choice, text=frame.text)])

    def _finish(self, index: int, reason: FinishReason, stop: str | None) -> Completion:
        return self._chunk(
            [
                TextChoice(
                    index=index,
                    text="",
                    finish_reason=reason,
                    stop_reason=UNSET if stop is None else stop,
                )
            ]
        )

    def _usage(self, usage: Usage) -> Completion:
        return self._chunk([], usage)

    def _chunk(self, choices: list[TextChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage if self.include_usage else UNSET,
            holdfast=self._take_extension(),
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
