"""What Chat Completions and Completions answer: bodies, chunks, and their writers.

`holdfast` is our extension. UNSET fields are not sent.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, UnsetType

from engine import protocol
from gateway.base.errors import EngineFailed
from gateway.base.grants import RateStatuses
from gateway.dialects.anthropic.request import CacheTtl
from gateway.dialects.collector import Block, Event, Holdfast, Writer
from gateway.dialects.custom_tools import text_of


class TopLogprob(msgspec.Struct, frozen=True):
    """A token and its log probability. `token` is the text of `bytes`. Where a character spans
    tokens, only `bytes` are exact."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


def logprobs_of(drawn: Sequence[protocol.DrawnToken]) -> list[TokenLogprob]:
    return [
        TokenLogprob(*_told(token.drawn), [TopLogprob(*_told(likely)) for likely in token.top])
        for token in drawn
    ]


def _told(prob: protocol.TokenProb) -> tuple[str, float, list[int]]:
    return prob.token.decode(errors="replace"), prob.logprob, list(prob.token)


FinishReason = Literal["stop", "length", "tool_calls"]


class WriteDetails(msgspec.Struct, frozen=True):
    """The written tokens by TTL. Each write counts at the longest of this API's TTLs (`CacheTtl`)
    for which it is surely held."""

    ttl_30m_tokens: int
    ttl_12h_tokens: int


_SHORTEST = next(iter(protocol.TTLS))
"""The class of writes that are held for less than this API's TTLs."""


class PromptDetails(msgspec.Struct, frozen=True):
    """What the cache did for the prompt. `cache_write_tokens_details` is there where every write is
    held for 30 minutes or longer."""

    cached_tokens: int
    cache_write_tokens: int
    cache_write_tokens_details: WriteDetails | UnsetType = UNSET


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(usage: protocol.InputUsage, output_tokens: int, thinking_tokens: int) -> Usage:
    """The engine's counts in OpenAI's fields, which never overlap.

    `cached_tokens` came out of memory, from entries or without one (`automatic_tokens`).
    `cache_write_tokens` were computed and written to entries.
    """
    num_written = max(0, usage.written_tokens - usage.automatic_tokens)
    # Tokens that are held longest stand first in the prompt, and so do tokens out of memory. So the
    # tokens out of memory are taken off the longest TTL first.
    writes = usage.writes_as((_SHORTEST, *get_args(CacheTtl)))
    details = dict[str, int]()
    automatic = usage.automatic_tokens
    for ttl in reversed(get_args(CacheTtl)):
        details[f"ttl_{ttl}_tokens"] = max(0, writes[ttl] - automatic)
        automatic = max(0, automatic - writes[ttl])
    return Usage(
        usage.prompt_tokens,
        output_tokens,
        usage.prompt_tokens + output_tokens,
        PromptDetails(
            cached_tokens=usage.cache_read_tokens + usage.automatic_tokens,
            cache_write_tokens=num_written,
            cache_write_tokens_details=UNSET if writes[_SHORTEST] else WriteDetails(**details),
        ),
        CompletionDetails(thinking_tokens),
    )


class Logprobs(msgspec.Struct, frozen=True):
    """The log probabilities of the content's tokens, in their order."""

    content: list[TokenLogprob]
    refusal: None = None


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class FunctionCall(msgspec.Struct, frozen=True, tag="function"):
    id: str
    function: Function


class CustomInput(msgspec.Struct, frozen=True):
    name: str
    input: str


class CustomCall(msgspec.Struct, frozen=True, tag="custom"):
    id: str
    custom: CustomInput


Call = FunctionCall | CustomCall


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Answer
    logprobs: Logprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    holdfast: Holdfast | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    holdfast: Holdfast | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model, an adapter or an alias.

    - `max_model_len`: in tokens, for clients of vLLM, as are the next two
    - `root`: an adapter's own name, or the model that an alias stands for
    - `parent`: the model that an adapter is on
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "holdfast"
    max_model_len: int | None = None
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


def limit_headers(rates: RateStatuses) -> Iterator[tuple[str, str]]:
    """The headers on the key's limits. `reset` is the time until the whole limit is there again,
    such as `6m0s`."""
    for kind, rate in (("requests", rates.requests), ("tokens", rates.tokens)):
        if rate is not None:
            yield f"x-ratelimit-limit-{kind}", str(rate.limit)
            yield f"x-ratelimit-remaining-{kind}", str(rate.remaining)
            yield f"x-ratelimit-reset-{kind}", duration(rate.reset_seconds)


def duration(seconds: float) -> str:
    """A duration in OpenAI's form: `12ms`, `7s`, `6m0s`. It is rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


_REASONS: dict[protocol.FinishReason, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "context": "length",
}
WholeT = TypeVar("WholeT", ChatCompletion, Completion)


@dataclass(slots=True, kw_only=True)
class _OpenAIWriter(Writer[Event, WholeT]):
    """What both writers share."""

    # When the answer began, in seconds since 1970.
    created: int
    # Whether the last chunk has the usage; the others then have a null.
    include_usage: bool
    # A chunk's `object`.
    chunk: str = ""

    def told(self, choices: list[Any], *, is_last: bool = False) -> Event:
        """One chunk."""
        head = {"id": self.id, "object": self.chunk, "created": self.created, "model": self.model}
        chunk = {**head, "choices": choices}
        if self.include_usage:
            chunk["usage"] = self.counted() if is_last else None
        extension = self.take_extension()
        if extension is not UNSET:
            chunk["holdfast"] = extension
        return chunk

    def counted(self) -> Usage:
        return usage_of(self.usage, self.output_tokens, self.thinking_tokens)

    def body(self, kind: type[WholeT], choices: list[Any]) -> WholeT:
        return kind(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.counted(),
            holdfast=self.take_extension(),
        )


def _end_of(end: protocol.Finished) -> dict[str, Any]:
    """The fields of a choice's end. `stop_reason` is vLLM's: the stop string that ended the
    choice."""
    choice: dict[str, Any] = {"finish_reason": _REASONS[end.reason]}
    return choice if end.stop_sequence is None else {**choice, "stop_reason": end.stop_sequence}


@dataclass(slots=True, kw_only=True)
class ChatWriter(_OpenAIWriter[ChatCompletion]):
    """Writes a chat's answer.

    Thinking goes out under two names: `reasoning` for clients of vLLM and OpenRouter, and
    `reasoning_content` for those of DeepSeek. A call of a tool of `custom_tools` goes out when it
    is whole.
    """

    chunk: str = "chat.completion.chunk"
    custom_tools: Collection[str] = ()
    _num_calls: dict[int, int] = field(default_factory=dict)
    # The last call of each choice, by choice, where it is the call of a custom tool.
    _open_custom: dict[int, Block] = field(default_factory=dict)

    def write(self, frame: protocol.Frame) -> Iterator[Event]:
        self.note(frame)
        match frame:
            case protocol.Started():
                for index in range(self.num_choices):
                    yield self._delta(index, role="assistant", content="")
            case protocol.TextDelta(text=text, logprobs=drawn):
                yield self._delta(frame.choice, drawn, content=text)
            case protocol.ThinkingDelta(text=text):
                yield self._delta(frame.choice, reasoning=text, reasoning_content=text)
            case protocol.ToolUseStart(id=call_id, name=name, choice=choice):
                yield from self._end_custom(choice)
                self._num_calls[choice] = self._num_calls.get(choice, -1) + 1
                if name in self.custom_tools:
                    self._open_custom[choice] = Block("call", call_id, name)
                else:
                    function = {"name": name, "arguments": ""}
                    yield self._call(choice, function=function, id=call_id, type="function")
            case protocol.ToolInputDelta(partial_json=partial, choice=choice):
                if choice not in self._num_calls:
                    raise EngineFailed
                if choice in self._open_custom:
                    self._open_custom[choice].pieces.append(partial)
                else:
                    yield self._call(choice, function={"arguments": partial})
            case protocol.Finished(choice=choice):
                yield from self._end_custom(choice)
                yield self.told([{"index": choice, "delta": {}, **_end_of(frame)}])
            case protocol.Done() if self.include_usage:
                yield self.told([], is_last=True)

    def whole(self) -> ChatCompletion:
        choices: list[Choice] = []
        for end, blocks in self.answers():
            text = "".join(block.text for block in blocks if block.kind == "text")
            thought = "".join(block.text for block in blocks if block.kind == "thinking")
            calls = [self._whole_call(block) for block in blocks if block.kind == "call"]
            answer = Answer(
                content=text if text or not calls else None,
                reasoning=thought or UNSET,
                reasoning_content=thought or UNSET,
                tool_calls=calls or UNSET,
            )
            drawn = [token for block in blocks for token in block.drawn]
            logprobs = Logprobs(logprobs_of(drawn)) if drawn else None
            choices.append(
                Choice(index=end.choice, message=answer, logprobs=logprobs, **_end_of(end))
            )
        return self.body(ChatCompletion, choices)

    def _whole_call(self, block: Block) -> Call:
        if block.name in self.custom_tools:
            return CustomCall(block.id, CustomInput(block.name, text_of(block.text)))
        return FunctionCall(block.id, Function(block.name, block.text))

    def _end_custom(self, choice: int) -> Iterator[Event]:
        block = self._open_custom.pop(choice, None)
        if block is not None:
            custom = {"name": block.name, "input": text_of(block.text)}
            yield self._call(choice, id=block.id, type="custom", custom=custom)

    def _call(self, choice: int, **call: Any) -> Event:
        """A piece of the choice's last call."""
        return self._delta(choice, tool_calls=[{"index": self._num_calls[choice], **call}])

    def _delta(self, index: int, drawn: Sequence[protocol.DrawnToken] = (), **delta: Any) -> Event:
        choice: Event = {"index": index, "delta": delta}
        if drawn:
            choice["logprobs"] = Logprobs(logprobs_of(drawn))
        return self.told([{**choice, "finish_reason": None}])


@dataclass(slots=True, kw_only=True)
class TextWriter(_OpenAIWriter[Completion]):
    """Writes a raw prompt's answer. All its output is text."""

    chunk: str = "text_completion"

    def write(self, frame: protocol.Frame) -> Iterator[Event]:
        self.note(frame)
        match frame:
            case protocol.TextDelta() | protocol.ThinkingDelta():
                yield self.told([TextChoice(index=frame.choice, text=frame.text)])
            case protocol.Finished():
                yield self.told([TextChoice(index=frame.choice, text="", **_end_of(frame))])
            case protocol.Done() if self.include_usage:
                yield self.told([], is_last=True)

    def whole(self) -> Completion:
        choices = [
            TextChoice(
                index=end.choice,
                text="".join(block.text for block in blocks if block.kind != "call"),
                **_end_of(end),
            )
            for end, blocks in self.answers()
        ]
        return self.body(Completion, choices)
