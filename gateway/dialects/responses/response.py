"""What the Responses API answers: the response, its items, its events, and their writer.

`holdfast` is our extension; UNSET fields are not sent. Items are written one after the other. The
last event has the whole response, which is the answer of a request without a stream. Each event has
a `sequence_number`, counted from 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from engine.protocol import (
    Done,
    DrawnToken,
    Finished,
    FinishReason,
    Frame,
    InputUsage,
    Started,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolUseStart,
)
from gateway.base.errors import EngineFailed, GatewayError
from gateway.dialects.collector import Writer, partial_json
from gateway.dialects.errors import openai_detail
from gateway.dialects.extension import Holdfast
from gateway.dialects.openai.response import TokenLogprob, logprobs_of
from gateway.dialects.openai.response import usage_of as chat_usage_of
from gateway.dialects.responses.request import ReasoningText, Status, SummaryText

DiagnosticReason = Literal["model_changed", "tools_changed", "input_changed"]
_REASONS: dict[str, DiagnosticReason] = {
    "model_changed": "model_changed",
    "tools_changed": "tools_changed",
    "system_changed": "input_changed",
    "messages_changed": "input_changed",
}


class CacheMiss(msgspec.Struct, frozen=True, tag="cache_miss"):
    cache_missed_tokens: int
    reason: DiagnosticReason


class CacheHit(msgspec.Struct, frozen=True, tag="cache_hit"):
    pass


class ComparisonNotFound(msgspec.Struct, frozen=True, tag="comparison_response_not_found"):
    pass


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable"):
    pass


Diagnostics = CacheMiss | CacheHit | ComparisonNotFound | Unavailable


def diagnostics_of(kind: str | None, missed_tokens: int | None, *, has_read: bool) -> Diagnostics:
    """`kind` is the divergence's, None where the prompt only grew.

    Such a prompt may still not be read: its entry can be gone.
    """
    if kind is None:
        return CacheHit() if has_read else Unavailable()
    if kind not in _REASONS or missed_tokens is None:
        return Unavailable()
    return CacheMiss(missed_tokens, _REASONS[kind])


ResponseStatus = Literal["completed", "failed", "in_progress", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    id: str
    status: Status
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class WriteDetails(msgspec.Struct, frozen=True):
    ttl_30m_tokens: int
    ttl_12h_tokens: int = 0


class InputDetails(msgspec.Struct, frozen=True):
    """`cache_write_tokens_details` is there where every write is held for 30 minutes at least."""

    cached_tokens: int
    cache_write_tokens: int
    cache_write_tokens_details: WriteDetails | UnsetType = UNSET


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


def usage_of(usage: InputUsage, output_tokens: int, thinking_tokens: int) -> Usage:
    """The engine's counts, as Chat Completions has them, in this API's fields."""
    counts = chat_usage_of(usage, output_tokens, thinking_tokens)
    written = counts.prompt_tokens_details.cache_write_tokens
    return Usage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=InputDetails(
            counts.prompt_tokens_details.cached_tokens,
            written,
            UNSET if usage.cache_write_5m_tokens else WriteDetails(written),
        ),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputDetails(thinking_tokens),
        total_tokens=counts.total_tokens,
    )


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str
    request_id: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class AppliedCacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """No breakpoint is held for 12 hours, so the TTL is always the shorter one."""

    mode: Literal["implicit", "explicit"]
    ttl: Literal["30m"] = "30m"
    comparison_response_id: str | UnsetType = UNSET


class InputTokens(msgspec.Struct, frozen=True):
    """What a request's prompt has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of type Raw are the request's, as they came."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: Literal[False] = False
    error: Failure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: Raw | None = None
    max_output_tokens: Raw | None = None
    max_tool_calls: Raw | None = None
    metadata: Raw
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: Raw
    previous_response_id: None = None
    prompt_cache_diagnostics: Diagnostics | UnsetType = UNSET
    prompt_cache_key: Raw | None = None
    prompt_cache_options: AppliedCacheOptions | UnsetType = UNSET
    reasoning: Raw
    safety_identifier: Raw | None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: Raw
    text: Raw
    tool_choice: Raw
    tools: Raw
    top_logprobs: Raw
    top_p: Raw
    truncation: Literal["disabled"] = "disabled"
    usage: Usage | None = None
    user: Raw | None = None
    holdfast: Holdfast | UnsetType = UNSET


MAX_ECHO_BYTES = 256 * 1024
"""The longest field of a request that its response repeats, in bytes of JSON.

A stream repeats it three times. The vendor's tools, for one, may have any length here, since they
are not shown to the model.
"""
_NULL = {
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "user",
}
_DEFAULTS = {
    "metadata": Raw(b"{}"),
    "parallel_tool_calls": Raw(b"true"),
    "reasoning": Raw(b'{"effort":null,"summary":null}'),
    "temperature": Raw(b"1.0"),
    "text": Raw(b'{"format":{"type":"text"}}'),
    "tool_choice": Raw(b'"auto"'),
    "tools": Raw(b"[]"),
    "top_logprobs": Raw(b"0"),
    "top_p": Raw(b"1.0"),
}


def unechoed(fields: Mapping[str, Raw]) -> list[str]:
    """The fields of a request that are too long to be repeated."""
    repeated = sorted(_NULL | _DEFAULTS.keys())
    return [name for name in repeated if len(fields.get(name, b"")) > MAX_ECHO_BYTES]


def echo_of(fields: Mapping[str, Raw]) -> dict[str, Raw | None]:
    """The request's fields that every state of its response repeats, but for very long ones."""
    long = unechoed(fields)
    fields = {name: value for name, value in fields.items() if name not in long}
    echo: dict[str, Raw | None] = {name: fields.get(name) for name in _NULL}
    echo |= {name: fields.get(name, default) for name, default in _DEFAULTS.items()}
    return echo


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    sequence_number: int


class Created(_Event, frozen=True, kw_only=True, tag="response.created"):
    response: Response


class InProgress(_Event, frozen=True, kw_only=True, tag="response.in_progress"):
    response: Response


class Completed(_Event, frozen=True, kw_only=True, tag="response.completed"):
    response: Response


class Incomplete(_Event, frozen=True, kw_only=True, tag="response.incomplete"):
    response: Response


class Failed(_Event, frozen=True, kw_only=True, tag="response.failed"):
    response: Response


class Error(_Event, frozen=True, kw_only=True, tag="error"):
    """A failure before the response was created."""

    code: str | None
    message: str
    param: str | None = None
    request_id: str


class ItemAdded(_Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(_Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _Place(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class PartAdded(_Place, frozen=True, kw_only=True, tag="response.content_part.added"):
    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(_Place, frozen=True, kw_only=True, tag="response.content_part.done"):
    content_index: int = 0
    part: OutputText | ReasoningText


class TextPiece(_Place, frozen=True, kw_only=True, tag="response.output_text.delta"):
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(_Place, frozen=True, kw_only=True, tag="response.output_text.done"):
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(_Place, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    content_index: int = 0
    delta: str


class ReasoningDone(_Place, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    content_index: int = 0
    text: str


class SummaryAdded(_Place, frozen=True, kw_only=True, tag="response.reasoning_summary_part.added"):
    summary_index: int = 0
    part: SummaryText


class SummaryDelta(_Place, frozen=True, kw_only=True, tag="response.reasoning_summary_text.delta"):
    summary_index: int = 0
    delta: str


class SummaryDone(_Place, frozen=True, kw_only=True, tag="response.reasoning_summary_text.done"):
    summary_index: int = 0
    text: str


class SummaryPartDone(
    _Place, frozen=True, kw_only=True, tag="response.reasoning_summary_part.done"
):
    summary_index: int = 0
    part: SummaryText


class ArgumentsDelta(
    _Place, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(_Place, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class InputDelta(_Place, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(_Place, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


Event = (
    Created | InProgress | Completed | Incomplete | Failed | Error | ItemAdded | ItemDone
    | PartAdded | PartDone | TextPiece | TextDone | ReasoningDelta | ReasoningDone
    | SummaryAdded | SummaryDelta | SummaryDone | SummaryPartDone
    | ArgumentsDelta | ArgumentsDone | InputDelta | InputDone
)  # fmt: skip

INPUT = "input"
"""The one field of a custom tool's function."""


class Origin(NamedTuple):
    """The tool that a function of the prompt stands for."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(slots=True, kw_only=True)
class _OpenItem:
    """One item that is being written. `count` gives the next event's number."""

    id: str
    index: int
    count: Callable[[], int]
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def at(self, kind: Callable[..., Event], **more: Any) -> Event:
        """An event of this item."""
        number = self.count()
        return kind(sequence_number=number, item_id=self.id, output_index=self.index, **more)

    def item(self, status: Status) -> OutputItem:
        """The item as it is by now."""
        raise NotImplementedError

    def opening(self) -> Iterator[Event]:
        return iter(())

    def delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        return iter(())

    def closing(self) -> Iterator[Event]:
        return iter(())


@dataclass(slots=True, kw_only=True)
class _OpenMessage(_OpenItem):
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def item(self, status: Status) -> OutputItem:
        content = [] if status == "in_progress" else [self._part()]
        return MessageItem(id=self.id, status=status, content=content)

    def _part(self) -> OutputText:
        return OutputText(self.text, logprobs=list(self.logprobs))

    def opening(self) -> Iterator[Event]:
        yield self.at(PartAdded, part=OutputText(""))

    def delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        self.logprobs += logprobs
        yield self.at(TextPiece, delta=text, logprobs=logprobs)

    def closing(self) -> Iterator[Event]:
        part = self._part()
        yield self.at(TextDone, text=part.text, logprobs=part.logprobs)
        yield self.at(PartDone, part=part)


@dataclass(slots=True, kw_only=True)
class _OpenReasoning(_OpenItem):
    """Thinking, in words. `seal` makes of it what the client sends back. For a client that asked
    for its summary all of it is the summary."""

    seal: Callable[[str], str] | None
    is_summary: bool

    def item(self, status: Status) -> OutputItem:
        is_open, text = status == "in_progress", self.text
        sealed = UNSET if is_open or self.seal is None else self.seal(text)
        made = ReasoningItem(id=self.id, status=status, encrypted_content=sealed)
        if self.is_summary:
            return made if is_open else replace(made, summary=[SummaryText(text)])
        return replace(made, content=[] if is_open else [ReasoningText(text)])

    def opening(self) -> Iterator[Event]:
        if self.is_summary:
            yield self.at(SummaryAdded, part=SummaryText(""))
        else:
            yield self.at(PartAdded, part=ReasoningText(""))

    def delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        yield self.at(SummaryDelta if self.is_summary else ReasoningDelta, delta=text)

    def closing(self) -> Iterator[Event]:
        text = self.text
        if self.is_summary:
            yield self.at(SummaryDone, text=text)
            yield self.at(SummaryPartDone, part=SummaryText(text))
        else:
            yield self.at(ReasoningDone, text=text)
            yield self.at(PartDone, part=ReasoningText(text))


@dataclass(slots=True, kw_only=True)
class _OpenCall(_OpenItem):
    """A call. For a custom tool the model writes an object with one string, and the client gets
    the string when it is whole."""

    call_id: str
    origin: Origin

    def item(self, status: Status) -> OutputItem:
        namespace = self.origin.namespace or UNSET
        shared: dict[str, Any] = {"id": self.id, "status": status, "call_id": self.call_id}
        shared |= {"name": self.origin.name, "namespace": namespace}
        if not self.origin.is_custom:
            return FunctionCallItem(**shared, arguments=self.text)
        return CustomCallItem(**shared, input="" if status == "in_progress" else self._input())

    def delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        if not self.origin.is_custom:
            yield self.at(ArgumentsDelta, delta=text)

    def closing(self) -> Iterator[Event]:
        if self.origin.is_custom:
            yield self.at(InputDelta, delta=self._input())
            yield self.at(InputDone, input=self._input())
        else:
            yield self.at(ArgumentsDone, name=self.origin.name, arguments=self.text)

    def _input(self) -> str:
        """The string in the object, or what there is of it; else all that the model wrote."""
        text = self.text
        value = partial_json(text) if text else {}
        found = value.get(INPUT, "") if isinstance(value, dict) else None
        return found if isinstance(found, str) else text


_CUT: tuple[FinishReason, ...] = ("length", "context")


@dataclass(slots=True, kw_only=True)
class ResponseWriter(Writer[Event, Response]):
    """`response` is its state before anything is written.

    `diagnose` is asked once, when the engine's first frame is there. `origins` are the tools behind
    the prompt's functions. With `summarizes` thinking goes out as its own summary. `seal` makes
    what the client sends back of it, None where it asked for nothing.
    """

    response: Response
    diagnose: Callable[[InputUsage], Diagnostics | None]
    origins: dict[str, Origin]
    summarizes: bool
    seal: Callable[[str], str] | None
    is_prewarm: bool
    _next: Callable[[], int] = field(default_factory=lambda: count().__next__)
    _output: list[OutputItem] = field(default_factory=list)
    _open: _OpenItem | None = None
    _has_begun: bool = False

    def write(self, frame: Frame) -> Iterator[Event]:
        self.note(frame)
        match frame:
            case Started():
                self.response = replace(
                    self.response,
                    prompt_cache_diagnostics=self.diagnose(self.usage) or UNSET,
                    holdfast=self.extension,
                )
                self._has_begun = True
                yield Created(sequence_number=self._next(), response=self.response)
                yield InProgress(sequence_number=self._next(), response=self.response)
            case TextDelta(text=text, logprobs=drawn):
                if not isinstance(self._open, _OpenMessage):
                    yield from self._begin(_OpenMessage, "msg")
                yield from self._add(text, drawn)
            case ThinkingDelta(text=text):
                if not isinstance(self._open, _OpenReasoning):
                    told = {"seal": self.seal, "is_summary": self.summarizes}
                    yield from self._begin(_OpenReasoning, "rs", **told)
                yield from self._add(text)
            case ToolUseStart(id=call_id, name=name):
                origin = self.origins.get(name) or Origin(name, None, is_custom=False)
                prefix = "ctc" if origin.is_custom else "fc"
                yield from self._begin(_OpenCall, prefix, call_id=call_id, origin=origin)
            case ToolInputDelta(partial_json=partial):
                if not isinstance(self._open, _OpenCall):
                    raise EngineFailed
                yield from self._add(partial)
            case Finished():
                yield from self._end("incomplete" if self._is_cut else "completed")
            case Done():
                yield self._done()

    def take(self, frame: Frame) -> None:
        for _ in self.write(frame):
            pass

    def whole(self) -> Response:
        if not self.is_done:
            raise EngineFailed
        return self.response

    def fail(self, failure: GatewayError, request_id: str) -> Event:
        """The last event of a response that failed."""
        detail, number = openai_detail(failure), self._next()
        if not self._has_begun:
            return Error(
                sequence_number=number,
                code=detail.code or detail.type,
                message=detail.message,
                param=detail.param,
                request_id=request_id,
            )
        code = detail.code if detail.code == "rate_limit_exceeded" else "server_error"
        self._conclude("failed", error=Failure(code, detail.message, request_id))
        return Failed(sequence_number=number, response=self.response)

    @property
    def _is_cut(self) -> bool:
        return not self.is_prewarm and self.finished[0].reason in _CUT

    def _begin(self, kind: type[_OpenItem], prefix: str, **more: Any) -> Iterator[Event]:
        yield from self._end("completed")
        index, stem = len(self._output), self.id.removeprefix("resp_")
        opened = kind(id=f"{prefix}_{stem}{index:02x}", index=index, count=self._next, **more)
        self._open = opened
        item = opened.item("in_progress")
        yield ItemAdded(sequence_number=self._next(), output_index=index, item=item)
        yield from opened.opening()

    def _add(self, text: str, drawn: Sequence[DrawnToken] = ()) -> Iterator[Event]:
        if self._open is not None:
            self._open.pieces.append(text)
            yield from self._open.delta(text, logprobs_of(drawn))

    def _end(self, status: Status) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._open.closing()
        item, index = self._open.item(status), self._open.index
        yield ItemDone(sequence_number=self._next(), output_index=index, item=item)
        self._output.append(item)
        self._open = None

    def _done(self) -> Event:
        usage = usage_of(self.usage, self.output_tokens, self.thinking_tokens)
        if self._is_cut:
            self._conclude("incomplete", incomplete_details=IncompleteDetails(), usage=usage)
            return Incomplete(sequence_number=self._next(), response=self.response)
        self._conclude("completed", usage=usage)
        return Completed(sequence_number=self._next(), response=self.response)

    def _conclude(self, status: ResponseStatus, **changes: Any) -> None:
        self.response = replace(self.response, status=status, output=list(self._output), **changes)
