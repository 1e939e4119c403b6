"""From the engine's frames to chunks of Google's stream; a whole answer is joined from the same.

A function call goes out whole, when its input is complete. The ends of all candidates go out in
the last chunk, together with the usage, since clients take the last chunk for both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import from_json

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
from gateway.dialects.gemini.response import (
    Candidate,
    Content,
    FinishReason,
    FunctionCall,
    GenerateContentResponse,
    LogprobsResult,
    Part,
    UsageMetadata,
    joined_logprobs,
    logprobs_of,
    usage_of,
)

_REASONS: dict[EngineReason, FinishReason] = {
    "stop": "STOP",
    "length": "MAX_TOKENS",
    "stop_sequence": "STOP",
    "tool_use": "STOP",
    "context": "MAX_TOKENS",
}

_Joined = tuple[Part, list[str]]
"""A part, and the texts that it is joined of; none of what has no text."""


@dataclass(slots=True)
class _Call:
    """A call whose input is still coming."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    def part(self) -> Part | None:
        """None where the input is no JSON object: it was cut off, or is malformed."""
        try:
            args: Any = msgspec.json.decode("".join(self.pieces) or "{}")
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        if not isinstance(args, dict):
            return None
        return Part(function_call=FunctionCall(id=self.id, name=self.name, args=args))


@dataclass(slots=True, kw_only=True)
class GeminiWriter:
    """One response. `found` is asked when the engine's first frame is there.

    `paths` name the request's segments in the extension object, which goes out with the first
    chunk. Without `shows_thoughts` thinking is counted and not sent. With `is_enum` the text is a
    string in JSON, of which the client gets the word alone, with the end.
    """

    response_id: str
    model: str
    found: Found
    paths: Sequence[str]
    num_candidates: int
    shows_thoughts: bool
    is_enum: bool = False
    _input: InputUsage = field(default_factory=lambda: InputUsage(input_tokens=0))
    _thinking_tokens: int = 0
    _extension: Holdfast | UnsetType = UNSET
    _calls: dict[int, _Call] = field(default_factory=dict)
    _quoted: dict[int, list[str]] = field(default_factory=dict)
    _ended: dict[int, Candidate] = field(default_factory=dict)

    def write(self, frame: Frame) -> Iterator[GenerateContentResponse]:
        match frame:
            case Started():
                self._input = frame.usage
                written = frame.usage.written_tokens
                found = extension_of(frame, self.found, self.paths)
                self._extension = msgspec.structs.replace(found, written_tokens=written)
            case TextDelta(text=text, choice=choice) if self.is_enum:
                self._quoted.setdefault(choice, []).append(text)
            case TextDelta(text=text, choice=choice, logprobs=drawn):
                yield from self._complete(choice)
                yield self._say(choice, Part(text=text), logprobs_of(drawn))
            case ThinkingDelta(text=text, choice=choice):
                if self.shows_thoughts:
                    yield self._say(choice, Part(text=text, thought=True))
            case ToolUseStart(id=call_id, name=name, choice=choice):
                yield from self._complete(choice)
                self._calls[choice] = _Call(call_id, name)
            case ToolInputDelta(partial_json=partial, choice=choice):
                if choice not in self._calls:
                    raise EngineFailed
                self._calls[choice].pieces.append(partial)
            case Finished():
                self._finish(frame)
            case Done():
                if len(self._ended) != self.num_candidates:
                    raise EngineFailed
                ended = [self._ended[index] for index in sorted(self._ended)]
                usage = usage_of(self._input, frame.output_tokens, self._thinking_tokens)
                yield self._chunk(ended, usage)

    def _complete(self, choice: int) -> Iterator[GenerateContentResponse]:
        """The call that another block ends."""
        call = self._calls.pop(choice, None)
        if call is None:
            return
        part = call.part()
        if part is None:
            raise EngineFailed
        yield self._say(choice, part)

    def _finish(self, frame: Finished) -> None:
        if frame.reason not in _REASONS:
            raise EngineFailed
        self._thinking_tokens += frame.thinking_tokens
        reason = _REASONS[frame.reason]
        call = self._calls.pop(frame.choice, None)
        said = Part(text=_word_in("".join(self._quoted.get(frame.choice, []))))
        part = call.part() if call is not None else said
        if part is None:
            part = Part(text="")
            if reason != "MAX_TOKENS":
                reason = "MALFORMED_FUNCTION_CALL"
        self._ended[frame.choice] = Candidate(
            content=Content(parts=[part]),
            finish_reason=reason,
            index=frame.choice,
        )

    def _say(
        self, choice: int, part: Part, logprobs: LogprobsResult | UnsetType = UNSET
    ) -> GenerateContentResponse:
        content = Content(parts=[part])
        return self._chunk([Candidate(content=content, index=choice, logprobs_result=logprobs)])

    def _chunk(
        self, candidates: list[Candidate], usage: UsageMetadata | UnsetType = UNSET
    ) -> GenerateContentResponse:
        taken, self._extension = self._extension, UNSET
        return GenerateContentResponse(
            candidates=candidates,
            usage_metadata=usage,
            model_version=self.model,
            response_id=self.response_id,
            holdfast=taken,
        )


def _word_in(quoted: str) -> str:
    """The string of JSON, or what there is of it; else the text as it is."""
    try:
        word = from_json(quoted, allow_partial="trailing-strings") if quoted else ""
    except ValueError:
        return quoted
    return word if isinstance(word, str) else quoted


class GeminiCollector:
    """Takes the chunks of one response as they come, and joins them to one answer."""

    def __init__(self) -> None:
        self._first: GenerateContentResponse | None = None
        self._last: GenerateContentResponse | None = None
        self._parts: dict[int, list[_Joined]] = {}
        self._logprobs: dict[int, list[LogprobsResult]] = {}

    def take(self, chunk: GenerateContentResponse) -> None:
        self._first, self._last = self._first or chunk, chunk
        for candidate in chunk.candidates:
            made = self._parts.setdefault(candidate.index, [])
            for part in candidate.content.parts:
                _add(made, part)
            if candidate.logprobs_result is not UNSET:
                self._logprobs.setdefault(candidate.index, []).append(candidate.logprobs_result)

    def whole(self) -> GenerateContentResponse:
        """Raise EngineFailed if the chunks are not a whole response."""
        first, last = self._first, self._last
        if first is None or last is None or last.usage_metadata is UNSET:
            raise EngineFailed
        candidates = [
            msgspec.structs.replace(
                ended,
                content=Content(parts=_whole_parts(self._parts[ended.index])),
                logprobs_result=joined_logprobs(self._logprobs.get(ended.index, [])),
            )
            for ended in last.candidates
        ]
        return msgspec.structs.replace(last, candidates=candidates, holdfast=first.holdfast)


def _add(made: list[_Joined], part: Part) -> None:
    """Neighbouring texts of one kind become one; empty ones are left out beside others."""
    if part.text is UNSET or part.text is None:
        made.append((part, []))
    elif made and made[-1][1] and made[-1][0].thought == part.thought:
        made[-1][1].append(part.text)
    elif part.text:
        made.append((part, [part.text]))


def _whole_parts(made: list[_Joined]) -> list[Part]:
    whole = [
        msgspec.structs.replace(part, text="".join(texts)) if texts else part
        for part, texts in made
    ]
    return whole or [Part(text="")]
