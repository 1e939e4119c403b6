"""What the Responses API answers: the response, its items, its events, and their writer.

`holdfast` is our extension. UNSET fields are not sent. Items are written one after the other. The
last event has the whole response, which is also the answer to a request without a stream. Each
event has a `sequence_number`, counted from 0.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from engine import protocol
from gateway.base.errors import EngineFailed, GatewayError, InvalidRequest
from gateway.dialects.anthropic.request import CacheTtl
from gateway.dialects.collector import Event, Holdfast, Writer
from gateway.dialects.custom_tools import text_of
from gateway.dialects.errors import openai_detail
from gateway.dialects.openai.response import (
    CompletionDetails,
    PromptDetails,
    TokenLogprob,
    logprobs_of,
)
from gateway.dialects.openai.response import usage_of as chat_usage_of
from gateway.dialects.responses.client_tools import TOOL_SEARCH, action_of
from gateway.dialects.responses.request import Conversation, ReasoningText, Status, SummaryText
from gateway.dialects.responses.typed import id_of
from gateway.prompt.fingerprint import Diagnosis
from gateway.structs.misses import DivergenceKind

DiagnosticReason = Literal["model_changed", "tools_changed", "input_changed"]
_REASONS: dict[DivergenceKind, DiagnosticReason | None] = {
    "model_changed": "model_changed",
    "tools_changed": "tools_changed",
    "system_changed": "input_changed",
    "messages_changed": "input_changed",
    "unavailable": None,
}


class Diagnostics(msgspec.Struct, frozen=True):
    """How the prompt compares with an earlier one. A `cache_miss` has the missed tokens and the
    reason."""

    type: Literal["cache_miss", "cache_hit", "comparison_response_not_found", "unavailable"]
    cache_missed_tokens: int | UnsetType = UNSET
    reason: DiagnosticReason | UnsetType = UNSET


def diagnostics_of(diagnosis: Diagnosis | None, *, has_read: bool) -> Diagnostics | None:
    """The diagnostics of a response; None where the client asked for no comparison.

    A prompt without a divergence only grew. Its entry can be gone, so it may still not be read.
    """
    if diagnosis is None:
        return None
    if diagnosis.result == "not_found":
        return Diagnostics("comparison_response_not_found")
    if diagnosis.result == "unfinished":
        return Diagnostics("unavailable")
    divergence = diagnosis.divergence
    if divergence is None:
        return Diagnostics("cache_hit" if has_read else "unavailable")
    reason = _REASONS[divergence.kind]
    if reason is None or divergence.missed_tokens is None:
        return Diagnostics("unavailable")
    return Diagnostics("cache_miss", divergence.missed_tokens, reason)


ResponseStatus = Literal["completed", "failed", "in_progress", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    status: Status


class MessageItem(_Item, frozen=True, kw_only=True, tag="message"):
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(_Item, frozen=True, kw_only=True, tag="reasoning"):
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


class _ClientCallItem(_Item, frozen=True, kw_only=True):
    call_id: str


class _CallItem(_ClientCallItem, frozen=True, kw_only=True):
    name: str
    namespace: str | UnsetType = UNSET


class FunctionCallItem(_CallItem, frozen=True, kw_only=True, tag="function_call"):
    arguments: str = ""


class CustomCallItem(_CallItem, frozen=True, kw_only=True, tag="custom_tool_call"):
    input: str = ""


class ShellCallItem(_ClientCallItem, frozen=True, kw_only=True, tag="shell_call"):
    action: dict[str, Any]


class LocalShellCallItem(ShellCallItem, frozen=True, kw_only=True, tag="local_shell_call"):
    pass


class PatchCallItem(_ClientCallItem, frozen=True, kw_only=True, tag="apply_patch_call"):
    operation: dict[str, Any]


class ToolSearchCallItem(_ClientCallItem, frozen=True, kw_only=True, tag="tool_search_call"):
    arguments: dict[str, Any]
    execution: Literal["client"] = "client"


ClientCallItem = ShellCallItem | LocalShellCallItem | PatchCallItem | ToolSearchCallItem
OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | ClientCallItem


class Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


def usage_of(usage: protocol.InputUsage, output_tokens: int, thinking_tokens: int) -> Usage:
    """The engine's counts, as Chat Completions has them, in this API's fields."""
    counts = chat_usage_of(usage, output_tokens, thinking_tokens)
    return Usage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=counts.prompt_tokens_details,
        output_tokens=counts.completion_tokens,
        output_tokens_details=CompletionDetails(thinking_tokens),
        total_tokens=counts.total_tokens,
    )


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str
    request_id: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class AppliedCacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["implicit", "explicit"]
    ttl: CacheTtl
    comparison_response_id: str | UnsetType = UNSET

    def by(self, ttls: Collection[str]) -> "AppliedCacheOptions":
        """The options as an engine with these TTL classes applies them."""
        return self if self.ttl in ttls else replace(self, ttl="30m")


class InputTokens(msgspec.Struct, frozen=True):
    """How many tokens a request's prompt has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One response. Fields of type Raw are the request's, as they came."""

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
    previous_response_id: Raw | None = None
    conversation: Conversation | UnsetType = UNSET
    prompt_cache_diagnostics: Diagnostics | UnsetType = UNSET
    prompt_cache_key: Raw | None = None
    prompt_cache_options: AppliedCacheOptions | UnsetType = UNSET
    reasoning: Raw
    safety_identifier: Raw | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
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


class ConversationShown(msgspec.Struct, frozen=True):
    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class Deleted(msgspec.Struct, frozen=True):
    id: str
    object: str
    deleted: Literal[True] = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


_PAGE = 20


def page_of(items: Sequence[Raw], query: Mapping[str, str]) -> ItemList:
    """One page of a list, the newest first unless the query's `order` is `asc`.

    The form of the query must be checked before. Raise InvalidRequest for an `after` of no item.
    """
    by_id = {id_of(item): item for item in items}
    ids = list(by_id) if query.get("order") == "asc" else list(by_id)[::-1]
    after = query.get("after")
    if after is not None:
        if after not in by_id:
            raise InvalidRequest("after: no such item", "after")
        ids = ids[ids.index(after) + 1 :]
    page = ids[: int(query.get("limit", _PAGE))]
    return ItemList(
        data=[by_id[item_id] for item_id in page],
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
        has_more=len(ids) > len(page),
    )


MAX_ECHO_BYTES = 256 * 1024
"""The longest field of a request that its response repeats, in bytes of JSON.

A stream repeats it three times. The bound is for fields such as the vendor's tools: they may have
any length here, since they are not shown to the model.
"""
_ECHOED = [
    field.name
    for field in msgspec.structs.fields(Response)
    if Raw in (field.type, *get_args(field.type))
]
"""The request's fields that its response repeats."""
_NOT_GIVEN = {
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
"""What a response repeats for fields that the request lacks. Other missing fields are null."""


def unechoed(fields: Mapping[str, Raw]) -> list[str]:
    """The fields of a request that are too long to be repeated."""
    return [name for name in _ECHOED if len(fields.get(name, b"")) > MAX_ECHO_BYTES]


def echo_of(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    """The fields of a request that every state of its response repeats: all but very long ones."""
    long = unechoed(fields)
    return _NOT_GIVEN | {
        name: value for name, value in fields.items() if name in _ECHOED and name not in long
    }


class Origin(NamedTuple):
    """The tool that a function of the prompt stands for; `kind` is its type."""

    name: str
    namespace: str | None
    kind: str


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of item."""

    item: type[OutputItem]
    # The prefix of its id.
    prefix: str
    # The name of the events of its text.
    text_events: str = ""
    # The name of the events of its parts.
    part_events: str = ""
    # The field that counts its parts.
    index: str = ""
    # The type of a part with its text.
    part: type[OutputText] | type[ReasoningText] | type[SummaryText] = OutputText
    # The client's tool that is called; empty for other items.
    tool: str = ""
    # The field of the call's input, for a client's tool.
    action: str = "action"


_MESSAGE = _Kind(MessageItem, "msg", "output_text", "content_part", "content_index")
_THOUGHT = _Kind(
    ReasoningItem, "rs", "reasoning_text", "content_part", "content_index", ReasoningText
)
_SUMMARY = _Kind(
    *(ReasoningItem, "rs", "reasoning_summary_text", "reasoning_summary_part", "summary_index"),
    SummaryText,
)
_CALL = _Kind(FunctionCallItem, "fc", "function_call_arguments")
_CUSTOM_CALL = _Kind(CustomCallItem, "ctc", "custom_tool_call_input")
_CLIENT_CALLS = {
    "shell": _Kind(ShellCallItem, "sh", tool="shell"),
    "local_shell": _Kind(LocalShellCallItem, "lsh", tool="local_shell"),
    "apply_patch": _Kind(PatchCallItem, "apc", tool="apply_patch", action="operation"),
    TOOL_SEARCH: _Kind(ToolSearchCallItem, "tsc", tool=TOOL_SEARCH, action="arguments"),
}
_CALLS = (_CALL, _CUSTOM_CALL, *_CLIENT_CALLS.values())


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    kind: _Kind
    # The item as it was when it began.
    item: Any
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What the model wrote. For a custom tool it is the text inside the call's JSON."""
        text = "".join(self.pieces)
        return text_of(text) if self.kind is _CUSTOM_CALL else text


@dataclass(slots=True, kw_only=True)
class ResponseWriter(Writer[Event, Response]):
    """Writes a response and its events."""

    # The response as it is now.
    response: Response
    # The tools behind the prompt's functions, by the functions' names.
    origins: dict[str, Origin]
    # Whether thinking goes out as its own summary.
    summarizes: bool
    # Seals the thinking for the client to send back; None where the client did not ask for that.
    seal: Callable[[str], str] | None
    is_prewarm: bool
    _numbers: Iterator[int] = field(default_factory=count)
    _output: list[OutputItem] = field(default_factory=list)
    _open: _Open | None = None
    _has_begun: bool = False

    def write(self, frame: protocol.Frame) -> Iterator[Event]:
        self.note(frame)
        match frame:
            case protocol.Started():
                has_read = self.usage.cache_read_tokens > 0
                diagnostics = diagnostics_of(self.findings.diagnosis, has_read=has_read)
                options = self.response.prompt_cache_options
                if isinstance(options, AppliedCacheOptions):
                    options = options.by(self.findings.ttls)
                self.response = replace(
                    self.response,
                    prompt_cache_options=options,
                    prompt_cache_diagnostics=diagnostics or UNSET,
                    holdfast=self.extension,
                )
                self._has_begun = True
                yield self._event("created", response=self.response)
                yield self._event("in_progress", response=self.response)
            case protocol.TextDelta(text=text, logprobs=drawn):
                yield from self._begin(_MESSAGE)
                yield from self._add(text, logprobs=logprobs_of(drawn))
            case protocol.ThinkingDelta(text=text):
                if self.summarizes:
                    yield from self._begin(_SUMMARY)
                else:
                    yield from self._begin(_THOUGHT, content=[])
                yield from self._add(text)
            case protocol.ToolUseStart(id=call_id, name=name):
                origin = self.origins.get(name, Origin(name, None, "function"))
                yield from self._end("completed")
                kind = _CLIENT_CALLS.get(origin.kind)
                if kind is not None:
                    fields: dict[str, Any] = {kind.action: action_of(origin.kind, "")}
                else:
                    kind = _CUSTOM_CALL if origin.kind == "custom" else _CALL
                    fields = {"name": origin.name, "namespace": origin.namespace or UNSET}
                yield from self._begin(kind, call_id=call_id, **fields)
            case protocol.ToolInputDelta(partial_json=partial):
                if self._open is None or self._open.kind not in _CALLS:
                    raise EngineFailed
                yield from self._add(partial)
            case protocol.Finished():
                yield from self._end("incomplete" if self._is_cut else "completed")
            case protocol.Done():
                usage = usage_of(self.usage, self.output_tokens, self.thinking_tokens)
                if self._is_cut:
                    details = IncompleteDetails()
                    yield self._conclude("incomplete", incomplete_details=details, usage=usage)
                else:
                    yield self._conclude("completed", usage=usage)

    def take(self, frame: protocol.Frame) -> None:
        for _ in self.write(frame):
            pass

    def whole(self) -> Response:
        if not self.is_done:
            raise EngineFailed
        return self.response

    def fail(self, failure: GatewayError, request_id: str) -> Event:
        """The last event of a response that failed."""
        detail = openai_detail(failure)
        if self._has_begun:
            code = detail.code if detail.code == "rate_limit_exceeded" else "server_error"
            return self._conclude("failed", error=Failure(code, detail.message, request_id))
        return {
            "type": "error",
            "sequence_number": next(self._numbers),
            "code": detail.code or detail.type,
            "message": detail.message,
            "param": detail.param,
            "request_id": request_id,
        }

    @property
    def _is_cut(self) -> bool:
        return not self.is_prewarm and self.finished[0].reason in ("length", "context")

    def _begin(self, kind: _Kind, **more: Any) -> Iterator[Event]:
        """Open an item, unless one of this kind is."""
        if self._open is not None and self._open.kind is kind:
            return
        yield from self._end("completed")
        index = len(self._output)
        stem = self.id.removeprefix("resp_")
        item = kind.item(id=f"{kind.prefix}_{stem}{index:02x}", status="in_progress", **more)
        self._open = _Open(kind, item, index)
        yield self._event("output_item.added", output_index=index, item=item)
        if kind.index:
            yield self._within(f"{kind.part_events}.added", part=kind.part(""))

    def _add(self, text: str, **more: list[TokenLogprob]) -> Iterator[Event]:
        """Add to the open item. Calls of functions go out in pieces, and all others when they are
        whole."""
        if self._open is not None:
            self._open.pieces.append(text)
            self._open.logprobs += more.get("logprobs", [])
            if self._open.kind not in _CALLS[1:]:
                yield self._within(f"{self._open.kind.text_events}.delta", delta=text, **more)

    def _end(self, status: Status) -> Iterator[Event]:
        opened = self._open
        if opened is None:
            return
        kind = opened.kind
        text = opened.text
        done_event = f"{opened.kind.text_events}.done"
        payload: dict[str, Any] = {}
        if kind is _CALL:
            payload = {"arguments": text}
            yield self._within(done_event, name=opened.item.name, **payload)
        elif kind is _CUSTOM_CALL:
            payload = {"input": text}
            yield self._within(f"{kind.text_events}.delta", delta=text)
            yield self._within(done_event, **payload)
        elif kind.tool:
            payload = {kind.action: action_of(kind.tool, text)}
            if kind.tool == "apply_patch" and status == "incomplete":
                status = "in_progress"  # the API has no other word for it
        else:
            more: Any = {"logprobs": opened.logprobs} if kind is _MESSAGE else {}
            part = kind.part(text, **more)
            yield self._within(done_event, text=text, **more)
            yield self._within(f"{kind.part_events}.done", part=part)
            payload = {"summary" if kind is _SUMMARY else "content": [part]}
            if kind is not _MESSAGE and self.seal is not None:
                payload["encrypted_content"] = self.seal(text)
        item = replace(opened.item, status=status, **payload)
        yield self._event("output_item.done", output_index=opened.index, item=item)
        self._output.append(item)
        self._open = None

    def _within(self, event: str, **more: Any) -> Event:
        """An event of the open item."""
        assert self._open is not None
        part_index = {self._open.kind.index: 0} if self._open.kind.index else {}
        place = {"item_id": self._open.item.id, "output_index": self._open.index, **part_index}
        return self._event(event, **place, **more)

    def _event(self, event: str, **more: Any) -> Event:
        return {"type": f"response.{event}", "sequence_number": next(self._numbers), **more}

    def _conclude(self, status: ResponseStatus, **changes: Any) -> Event:
        self.response = replace(self.response, status=status, output=list(self._output), **changes)
        return self._event(status, response=self.response)
