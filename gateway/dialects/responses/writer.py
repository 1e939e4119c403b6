"""From the engine's frames to a response's events.

The last event has the whole response, which is the answer of a request without a stream.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from msgspec import UNSET

from engine.protocol import (
    Done,
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
from gateway.dialects.extension import Found, extension_of
from gateway.dialects.openai.errors import detail_of
from gateway.dialects.openai.response import written_tokens
from gateway.dialects.responses import events
from gateway.dialects.responses.diagnostics import Diagnostics
from gateway.dialects.responses.events import Event
from gateway.dialects.responses.items import (
    OpenCall,
    OpenCustomCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    OpenSummary,
)
from gateway.dialects.responses.response import (
    Failure,
    IncompleteDetails,
    OutputItem,
    Response,
    ResponseStatus,
    usage_of,
)
from gateway.dialects.responses.tools import Origin

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
                extension, written_tokens=written_tokens(started.usage)
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
