"""What the Messages API answers: its bodies, its stream's events, and their writer.

An optional field that would be null is left out: strict third-party schemas refuse the null. Null
is written where the hosted API always writes it (`stop_reason`, `stop_sequence`, `stop_details`).
"""

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from engine import protocol
from gateway.base.errors import EngineFailed
from gateway.base.grants import RateStatuses
from gateway.dialects.anthropic.request import AnthropicTtl
from gateway.dialects.collector import Event, Holdfast, Writer, extension_of, partial_json
from gateway.dialects.errors import AnthropicError
from gateway.prompt.fingerprint import Diagnosis, Divergence
from gateway.structs.misses import DivergenceKind

CacheMissType = Literal[
    "model_changed",
    "tools_changed",
    "system_changed",
    "messages_changed",
    "previous_message_not_found",
    "unavailable",
]
"""The hosted API's words: clients know no others."""
_MISS_TYPES: dict[DivergenceKind, CacheMissType] = {
    "model_changed": "model_changed",
    "tools_changed": "tools_changed",
    "system_changed": "system_changed",
    "messages_changed": "messages_changed",
    "unavailable": "unavailable",
}


class CacheMissReason(msgspec.Struct, frozen=True):
    """Where the prompts first differ, with the tokens that were missed because of it, or why nobody
    knows."""

    type: CacheMissType
    cache_missed_input_tokens: int | UnsetType = UNSET


class Diagnostics(msgspec.Struct, frozen=True):
    """`cache_miss_reason` None: the comparison had not ended when the response began."""

    cache_miss_reason: CacheMissReason | None


def diagnostics_of(diagnosis: Diagnosis | None) -> Diagnostics | None:
    """The wire's None stands for "no divergence", "not asked for" and "first turn"."""
    if diagnosis is None:
        return None
    match diagnosis:
        case Diagnosis("unfinished"):
            return Diagnostics(None)
        case Diagnosis("not_found"):
            return Diagnostics(CacheMissReason("previous_message_not_found"))
        case Diagnosis("compared", Divergence(kind=kind, missed_tokens=int(missed_tokens))):
            return Diagnostics(CacheMissReason(_MISS_TYPES[kind], missed_tokens))
        case Diagnosis("compared", Divergence()):
            return Diagnostics(CacheMissReason("unavailable"))
    return None


EVENTS = (
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
)
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class CacheCreation(msgspec.Struct, frozen=True):
    """The written tokens, by TTL. Each write counts under the longest of this API's TTLs
    (`AnthropicTtl`) that it is held for at least, because an engine may hold a marker for another
    time. The fields add up to all writes."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` comes after the last breakpoint; total = input + creation + read."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputDetails | UnsetType = UNSET
    service_tier: Literal["standard"] = "standard"
    inference_geo: Literal["not_available"] = "not_available"


class DirectCaller(msgspec.Struct, frozen=True):
    type: Literal["direct"] = "direct"


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller = DirectCaller()


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    model: str
    id: str
    role: Literal["assistant"] = "assistant"
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    usage: Usage
    diagnostics: Diagnostics | UnsetType = UNSET
    holdfast: Holdfast


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = None
    max_tokens: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


_STOP_REASONS: dict[protocol.FinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "stop_sequence": "stop_sequence",
    "tool_use": "tool_use",
    "context": "model_context_window_exceeded",
}
# A stream begins before its output is counted. The final count comes with `message_delta`.
_PROVISIONAL_OUTPUT = 1
# The other counters come again at the end of a stream, as they are then.
_ONCE = ("cache_creation", "service_tier", "inference_geo")


@dataclass(slots=True, kw_only=True)
class MessageWriter(Writer[Event, Message]):
    """Writes a message. Where nobody asked for thinking its blocks are left out
    (`hides_thinking`)."""

    # Thinking blocks go out without their text.
    omits_thinking: bool = False
    _begun: Message | None = None
    _index: int = -1
    _open: str = ""
    _thought: Any = field(default_factory=lambda: blake2b(digest_size=32))

    def begin(self, started: protocol.Started) -> None:
        self._begun = Message(
            model=self.model,
            id=self.id,
            content=[],
            usage=usage_of(started.usage, _PROVISIONAL_OUTPUT),
            diagnostics=diagnostics_of(self.findings.diagnosis) or UNSET,
            holdfast=extension_of(started, self.findings, self.paths),
        )

    def write(self, frame: protocol.Frame) -> Iterator[Event]:
        self.note(frame)
        match frame:
            case protocol.TextDelta(text=text):
                yield from self._begin("text", text="")
                yield self._piece("text_delta", text=text)
            case protocol.Started():
                yield {"type": "message_start", "message": self._begun}
            case protocol.ThinkingDelta() if self.hides_thinking:
                pass
            case protocol.ThinkingDelta(text=text):
                yield from self._begin("thinking", thinking="", signature="")
                self._thought.update(text.encode())
                if not self.omits_thinking:
                    yield self._piece("thinking_delta", thinking=text)
            case protocol.ToolUseStart(id=call_id, name=name):
                caller = DirectCaller()
                yield from self._begin("tool_use", id=call_id, name=name, caller=caller, input={})
                yield self._piece("input_json_delta", partial_json="")
            case protocol.ToolInputDelta(partial_json=partial):
                yield self._piece("input_json_delta", partial_json=partial)
            case protocol.Finished():
                yield from self._end()
            case protocol.Done():
                usage = usage_of(self.usage, self.output_tokens, self.thinking_tokens)
                end = self.finished[0]
                delta = {
                    "stop_reason": _STOP_REASONS[end.reason],
                    "stop_sequence": end.stop_sequence,
                    "stop_details": None,
                }
                counts = msgspec.to_builtins(usage)
                for name in _ONCE:
                    del counts[name]
                yield {"type": "message_delta", "delta": delta, "usage": counts}
                yield {"type": "message_stop"}

    def whole(self) -> Message:
        [(end, blocks)] = self.answers()
        if self._begun is None:
            raise EngineFailed
        content: list[ContentBlock] = []
        for block in blocks:
            match block.kind:
                case "text":
                    content.append(TextBlock(block.text))
                case "thinking":
                    self._thought.update(block.text.encode())
                    text = "" if self.omits_thinking else block.text
                    content.append(ThinkingBlock(text, self._signature()))
                case "call":
                    value = partial_json(block.text)
                    arguments = value if isinstance(value, dict) else {}
                    content.append(ToolUseBlock(block.id, block.name, arguments))
        return replace(
            self._begun,
            content=content,
            usage=usage_of(self.usage, self.output_tokens, self.thinking_tokens),
            stop_reason=_STOP_REASONS[end.reason],
            stop_sequence=end.stop_sequence,
        )

    def _begin(self, kind: str, **block: Any) -> Iterator[Event]:
        """Open a block. An open block of text or of thinking is continued."""
        if kind == self._open and kind != "tool_use":
            return
        yield from self._end()
        self._open = kind
        self._index += 1
        block = {"type": kind, **block}
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _end(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._piece("signature_delta", signature=self._signature())
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""

    def _piece(self, kind: str, **text: str) -> Event:
        delta = {"type": kind, **text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _signature(self) -> str:
        return b64encode(self._thought.digest()).decode()


def usage_of(usage: protocol.InputUsage, output_tokens: int, thinking_tokens: int = 0) -> Usage:
    """The engine's counts in the wire's fields, not adjusted."""
    writes = usage.writes_as(get_args(AnthropicTtl))
    return Usage(
        input_tokens=usage.input_tokens,
        cache_creation_input_tokens=usage.written_tokens,
        cache_read_input_tokens=usage.cache_read_tokens,
        cache_creation=CacheCreation(
            **{f"ephemeral_{ttl}_input_tokens": tokens for ttl, tokens in writes.items()}
        ),
        output_tokens=output_tokens,
        output_tokens_details=OutputDetails(thinking_tokens) if thinking_tokens else UNSET,
    )


def limit_headers(rates: RateStatuses, now: datetime) -> Iterator[tuple[str, str]]:
    """`reset` is the time, RFC 3339, at which all of a limit is there again. One limit holds for
    all tokens, so input and output have the same numbers."""
    kinds = [
        ("requests", rates.requests),
        *((kind, rates.tokens) for kind in ("tokens", "input-tokens", "output-tokens")),
    ]
    for kind, rate in kinds:
        if rate is not None:
            reset = now + timedelta(seconds=rate.reset_seconds)
            # Rounded up, so that a client that waits until then is not early.
            reset += timedelta(seconds=1 if reset.microsecond else 0)
            yield f"anthropic-ratelimit-{kind}-limit", str(rate.limit)
            yield f"anthropic-ratelimit-{kind}-remaining", str(rate.remaining)
            yield f"anthropic-ratelimit-{kind}-reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")


# Batches.


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of messages.

    - `request_counts`: they add up to the rows
    - `results_url`: it is there once the batch has ended
    """

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: str
    request_counts: RequestCounts
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    cancel_initiated_at: datetime | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class Succeeded(msgspec.Struct, frozen=True, tag="succeeded"):
    message: Message


class Errored(msgspec.Struct, frozen=True, tag="errored"):
    error: AnthropicError


class Canceled(msgspec.Struct, frozen=True, tag="canceled"): ...


class Expired(msgspec.Struct, frozen=True, tag="expired"): ...


BatchResult = Succeeded | Errored | Canceled | Expired


class ResultLine(msgspec.Struct, frozen=True):
    """One line of the results; `result` is a BatchResult."""

    custom_id: str
    result: Raw
