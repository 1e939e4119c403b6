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
from gateway.dialects.openai.logprobs import logprobs_of
from gateway.dialects.openai.response import (
    CallDelta,
    ChunkChoice,
    Completion,
    CompletionChunk,
    Delta,
    FinishReason,
    FunctionDelta,
    Logprobs,
    TextChoice,
    Usage,
    usage_of,
    written_tokens,
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
                    written_tokens=written_tokens(frame.usage),
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
