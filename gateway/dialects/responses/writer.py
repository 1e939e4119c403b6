"""From the engine's frames to a response's events.

Items are written one after the other. The last event has the whole response, which is the answer of
a request without a stream.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from msgspec import UNSET
from pydantic_core import from_json

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
from gateway.base.errors import (
    DemandRefused,
    EngineFailed,
    GatewayError,
    InvalidRequest,
    PromptTooLong,
)
from gateway.dialects.extension import Found, extension_of
from gateway.dialects.openai.errors import detail_of
from gateway.dialects.openai.response import TokenLogprob, logprobs_of
from gateway.dialects.responses import events
from gateway.dialects.responses.events import Event
from gateway.dialects.responses.request import Status
from gateway.dialects.responses.response import (
    CustomCallItem,
    Diagnostics,
    Failure,
    FunctionCallItem,
    IncompleteDetails,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseStatus,
    SummaryText,
    usage_of,
)
from gateway.dialects.responses.tools import INPUT, Origin


@dataclass(slots=True, kw_only=True)
class OpenItem:
    """One item. `count` gives the next event's number.

    `begin` and `end` yield all events but those of the text between them, which `write` yields.
    """

    id: str
    index: int
    count: Callable[[], int]
    _pieces: list[str] = field(default_factory=list)

    def begin(self) -> Iterator[Event]:
        item = self.item("in_progress")
        yield events.ItemAdded(sequence_number=self.count(), output_index=self.index, item=item)
        yield from self._opening()

    def write(self, text: str, drawn: Sequence[DrawnToken] = ()) -> Iterator[Event]:
        """`drawn` are the tokens behind the text, where the request wants them."""
        self._pieces.append(text)
        yield from self._delta(text, logprobs_of(drawn))

    def end(self, status: Status) -> Iterator[Event]:
        yield from self._closing()
        item = self.item(status)
        yield events.ItemDone(sequence_number=self.count(), output_index=self.index, item=item)

    def item(self, status: Status) -> OutputItem:
        """The item as it is by now."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def _opening(self) -> Iterator[Event]:
        return iter(())

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        return iter(())

    def _closing(self) -> Iterator[Event]:
        return iter(())


@dataclass(slots=True, kw_only=True)
class OpenMessage(OpenItem):
    _logprobs: list[TokenLogprob] = field(default_factory=list)

    def item(self, status: Status) -> OutputItem:
        content = [] if status == "in_progress" else [self._part()]
        return MessageItem(id=self.id, status=status, content=content)

    def _part(self) -> OutputText:
        return OutputText(self.text, logprobs=list(self._logprobs))

    def _opening(self) -> Iterator[Event]:
        yield events.PartAdded(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=OutputText(""),
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        self._logprobs += logprobs
        yield events.TextDelta(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            delta=text,
            logprobs=logprobs,
        )

    def _closing(self) -> Iterator[Event]:
        part = self._part()
        yield events.TextDone(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            text=part.text,
            logprobs=part.logprobs,
        )
        yield events.PartDone(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, part=part
        )


@dataclass(slots=True, kw_only=True)
class OpenReasoning(OpenItem):
    """Thinking, in words. `seal` makes of it what the client sends back."""

    seal: Callable[[str], str] | None

    def item(self, status: Status) -> OutputItem:
        if status == "in_progress":
            return ReasoningItem(id=self.id, status=status, content=[])
        return ReasoningItem(
            id=self.id,
            status=status,
            content=[ReasoningText(self.text)],
            encrypted_content=self._sealed(),
        )

    def _sealed(self) -> str:
        return UNSET if self.seal is None else self.seal(self.text)  # type: ignore[return-value]

    def _opening(self) -> Iterator[Event]:
        yield events.PartAdded(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=ReasoningText(""),
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        yield events.ReasoningDelta(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, delta=text
        )

    def _closing(self) -> Iterator[Event]:
        text = self.text
        yield events.ReasoningDone(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, text=text
        )
        yield events.PartDone(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=ReasoningText(text),
        )


class OpenSummary(OpenReasoning):
    """Thinking for a client that asked for its summary. All of it is the summary."""

    __slots__ = ()

    def item(self, status: Status) -> OutputItem:
        if status == "in_progress":
            return ReasoningItem(id=self.id, status=status)
        return ReasoningItem(
            id=self.id,
            status=status,
            summary=[SummaryText(self.text)],
            encrypted_content=self._sealed(),
        )

    def _opening(self) -> Iterator[Event]:
        yield events.SummaryAdded(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=SummaryText(""),
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        yield events.SummaryDelta(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, delta=text
        )

    def _closing(self) -> Iterator[Event]:
        text = self.text
        yield events.SummaryDone(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, text=text
        )
        yield events.SummaryPartDone(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            part=SummaryText(text),
        )


@dataclass(slots=True, kw_only=True)
class OpenCall(OpenItem):
    call_id: str
    origin: Origin

    def item(self, status: Status) -> OutputItem:
        return FunctionCallItem(
            id=self.id,
            status=status,
            call_id=self.call_id,
            name=self.origin.name,
            namespace=self.origin.namespace or UNSET,
            arguments=self.text,
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        yield events.ArgumentsDelta(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, delta=text
        )

    def _closing(self) -> Iterator[Event]:
        yield events.ArgumentsDone(
            sequence_number=self.count(),
            item_id=self.id,
            output_index=self.index,
            name=self.origin.name,
            arguments=self.text,
        )


class OpenCustomCall(OpenCall):
    """The model writes an object with one string; the client gets the string when it is whole."""

    __slots__ = ()

    def item(self, status: Status) -> OutputItem:
        return CustomCallItem(
            id=self.id,
            status=status,
            call_id=self.call_id,
            name=self.origin.name,
            namespace=self.origin.namespace or UNSET,
            input="" if status == "in_progress" else _input_in(self.text),
        )

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        return iter(())

    def _closing(self) -> Iterator[Event]:
        text = _input_in(self.text)
        yield events.InputDelta(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, delta=text
        )
        yield events.InputDone(
            sequence_number=self.count(), item_id=self.id, output_index=self.index, input=text
        )


def _input_in(text: str) -> str:
    """The string in the model's object, or what there is of it; else all that the model wrote."""
    try:
        value = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        return text
    found = value.get(INPUT, "") if isinstance(value, dict) else None
    return found if isinstance(found, str) else text


_STATUS: dict[FinishReason, ResponseStatus] = {
    "stop": "completed",
    "length": "incomplete",
    "stop_sequence": "completed",
    "tool_use": "completed",
    "context": "incomplete",
}


@dataclass(slots=True, kw_only=True)
class ResponseWriter:
    """One response. `response` is its state before anything is written.

    `paths` name the request's segments in the extension object. `found` and `diagnose` are asked
    once, when the engine's first frame is there. `origins` are the tools
    behind the prompt's functions. With `summarizes` thinking goes out as its own summary. `seal`
    makes what the client sends back of it, None where it asked for nothing.
    """

    response: Response
    found: Found
    paths: Sequence[str]
    diagnose: Callable[[InputUsage], Diagnostics | None]
    origins: dict[str, Origin]
    summarizes: bool
    seal: Callable[[str], str] | None
    is_prewarm: bool
    _next: Callable[[], int] = field(default_factory=lambda: count().__next__)
    _usage: InputUsage = field(default_factory=lambda: InputUsage(input_tokens=0))
    _output: list[OutputItem] = field(default_factory=list)
    _open: OpenItem | None = None
    _finished: Finished | None = None
    _has_begun: bool = False

    def write(self, frame: Frame) -> Iterator[Event]:
        match frame:
            case Started():
                yield from self._start(frame)
            case TextDelta(text=text, logprobs=drawn):
                yield from self._open_for(OpenMessage, "msg")
                if self._open is not None:
                    yield from self._open.write(text, drawn)
            case ThinkingDelta(text=text):
                shown = OpenSummary if self.summarizes else OpenReasoning
                yield from self._open_for(shown, "rs", seal=self.seal)
                if self._open is not None:
                    yield from self._open.write(text)
            case ToolUseStart(id=call_id, name=name):
                origin = self.origins.get(name) or Origin(name, None, is_custom=False)
                kind, prefix = (OpenCustomCall, "ctc") if origin.is_custom else (OpenCall, "fc")
                yield from self._begin(kind, prefix, call_id=call_id, origin=origin)
            case ToolInputDelta(partial_json=partial):
                if not isinstance(self._open, OpenCall):
                    raise EngineFailed
                yield from self._open.write(partial)
            case Finished():
                if frame.reason not in _STATUS:
                    raise EngineFailed
                self._finished = frame
                yield from self._end("incomplete" if self._is_cut else "completed")
            case Done():
                yield self._done(frame)

    def fail(self, failure: GatewayError, request_id: str) -> Event:
        """The last event of a response that failed."""
        detail = detail_of(failure)
        if not self._has_begun:
            return events.Error(
                sequence_number=self._next(),
                code=detail.code or detail.type,
                message=detail.message,
                param=detail.param,
                request_id=request_id,
            )
        code = detail.code if detail.code == "rate_limit_exceeded" else "server_error"
        failed = self._state("failed", error=Failure(code, detail.message, request_id))
        return events.Failed(sequence_number=self._next(), response=failed)

    @property
    def _is_cut(self) -> bool:
        finished = self._finished
        return (
            finished is not None
            and not self.is_prewarm
            and (_STATUS[finished.reason] == "incomplete")
        )

    def _start(self, started: Started) -> Iterator[Event]:
        self._usage = started.usage
        extension = extension_of(started, self.found, self.paths)
        self.response = msgspec.structs.replace(
            self.response,
            prompt_cache_diagnostics=self.diagnose(started.usage) or UNSET,
            holdfast=msgspec.structs.replace(
                extension, written_tokens=started.usage.written_tokens
            ),
        )
        self._has_begun = True
        yield events.Created(sequence_number=self._next(), response=self.response)
        yield events.InProgress(sequence_number=self._next(), response=self.response)

    def _open_for(self, kind: type[OpenItem], prefix: str, **more: Any) -> Iterator[Event]:
        """Begin an item of this kind if none is open."""
        if type(self._open) is not kind:
            yield from self._begin(kind, prefix, **more)

    def _begin(self, kind: type[OpenItem], prefix: str, **more: Any) -> Iterator[Event]:
        yield from self._end("completed")
        index = len(self._output)
        stem = self.response.id.removeprefix("resp_")
        self._open = kind(id=f"{prefix}_{stem}{index:02x}", index=index, count=self._next, **more)
        yield from self._open.begin()

    def _end(self, status: Any) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self._output.append(self._open.item(status))
            self._open = None

    def _done(self, done: Done) -> Event:
        finished = self._finished
        if finished is None:
            raise EngineFailed
        usage = usage_of(self._usage, done.output_tokens, finished.thinking_tokens)
        if self._is_cut:
            cut = self._state("incomplete", incomplete_details=IncompleteDetails(), usage=usage)
            return events.Incomplete(sequence_number=self._next(), response=cut)
        whole = self._state("completed", usage=usage)
        return events.Completed(sequence_number=self._next(), response=whole)

    def _state(self, status: ResponseStatus, **changes: Any) -> Response:
        return msgspec.structs.replace(
            self.response, status=status, output=list(self._output), **changes
        )


_TOOL = re.compile(r"^tools\[(\d+)\]\.input_schema\b")
_SCHEMA = re.compile(r"^output_schema\b")


def in_own_names(failure: GatewayError, paths: Sequence[str]) -> GatewayError:
    """The failure to raise. `paths` are those of the prompt's segments, tools first."""
    match failure:
        case PromptTooLong():
            failure.param = "input"
        case DemandRefused():
            message = _TOOL.sub(lambda found: _named(found, paths), str(failure))
            message = _SCHEMA.sub("text.format.schema", message)
            return InvalidRequest(message, message.split(" ", 1)[0].rstrip(":"))
        case _:
            pass
    return failure


def _named(found: re.Match[str], paths: Sequence[str]) -> str:
    index = int(found[1])
    return f"{paths[index]}.parameters" if index < len(paths) else found[0]
