"""What Google's API answers: bodies, the chunks of a stream, and their writer.

`holdfast` is our extension; UNSET fields are not sent. A function call goes out whole, when its
input is complete. The ends of all candidates go out in the last chunk, together with the usage,
since clients take the last chunk for both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine import protocol
from gateway.base.errors import EngineFailed
from gateway.dialects.collector import Block, Holdfast, Writer, partial_json

FinishReason = Literal["STOP", "MAX_TOKENS", "MALFORMED_FUNCTION_CALL"]


class Answered(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of every answer."""


class FunctionCall(Answered, frozen=True, rename="camel", kw_only=True):
    id: str
    name: str
    args: dict[str, Any]


class Part(Answered, frozen=True, rename="camel", kw_only=True):
    text: str | UnsetType = UNSET
    thought: bool | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class Content(Answered, frozen=True, rename="camel", kw_only=True):
    parts: list[Part]
    role: Literal["model"] = "model"


class LogprobsCandidate(Answered, frozen=True, rename="camel", kw_only=True):
    token: str
    token_id: int
    log_probability: float


class TopCandidates(Answered, frozen=True, rename="camel", kw_only=True):
    candidates: list[LogprobsCandidate]


class LogprobsResult(Answered, frozen=True, rename="camel", kw_only=True):
    """Log probabilities of the text's tokens, in order; `top_candidates` where there are any."""

    chosen_candidates: list[LogprobsCandidate]
    top_candidates: list[TopCandidates] | UnsetType = UNSET


class Candidate(Answered, frozen=True, rename="camel", kw_only=True):
    content: Content
    finish_reason: FinishReason | UnsetType = UNSET
    index: int = 0
    logprobs_result: LogprobsResult | UnsetType = UNSET


class ModalityCount(Answered, frozen=True, rename="camel", kw_only=True):
    modality: Literal["TEXT"] = "TEXT"
    token_count: int


class UsageMetadata(Answered, frozen=True, rename="camel", kw_only=True):
    """`promptTokenCount` has the whole prompt, what was read of it included.

    `cachedContentTokenCount` are the tokens that are billed as read, from a cached content or from
    any other lease. Output and thoughts do not overlap.
    """

    prompt_token_count: int
    cached_content_token_count: int | UnsetType = UNSET
    candidates_token_count: int
    thoughts_token_count: int | UnsetType = UNSET
    total_token_count: int
    prompt_tokens_details: list[ModalityCount]
    cache_tokens_details: list[ModalityCount] | UnsetType = UNSET


class GenerateContentResponse(Answered, frozen=True, rename="camel", kw_only=True):
    """A whole answer, or one chunk of a stream. Both have the same shape."""

    candidates: list[Candidate]
    usage_metadata: UsageMetadata | UnsetType = UNSET
    model_version: str
    response_id: str
    holdfast: Holdfast | UnsetType = UNSET


class TokenCount(Answered, frozen=True, rename="camel", kw_only=True):
    total_tokens: int
    prompt_tokens_details: list[ModalityCount]


def logprobs_of(drawn: Sequence[protocol.DrawnToken]) -> LogprobsResult | UnsetType:
    """The log probabilities of these tokens; UNSET where there are none."""
    if not drawn:
        return UNSET
    top = [TopCandidates(candidates=[_told(likely) for likely in token.top]) for token in drawn]
    return LogprobsResult(
        chosen_candidates=[_told(token.drawn) for token in drawn],
        top_candidates=top if drawn[0].top else UNSET,
    )


def _told(prob: protocol.TokenProb) -> LogprobsCandidate:
    token = prob.token.decode(errors="replace")
    return LogprobsCandidate(token=token, token_id=prob.token_id, log_probability=prob.logprob)


def usage_of(usage: protocol.InputUsage, output_tokens: int, thinking_tokens: int) -> UsageMetadata:
    read_tokens = usage.cache_read_tokens
    return UsageMetadata(
        prompt_token_count=usage.prompt_tokens,
        cached_content_token_count=read_tokens or UNSET,
        candidates_token_count=output_tokens - thinking_tokens,
        thoughts_token_count=thinking_tokens or UNSET,
        total_token_count=usage.prompt_tokens + output_tokens,
        prompt_tokens_details=[ModalityCount(token_count=usage.prompt_tokens)],
        cache_tokens_details=[ModalityCount(token_count=read_tokens)] if read_tokens else UNSET,
    )


METHODS = ["generateContent", "countTokens", "createCachedContent"]


class Model(Answered, frozen=True, rename="camel", kw_only=True):
    """`name` is `models/` and the id. A limit is left out where no engine tells it."""

    name: str
    base_model_id: str
    version: str = "1"
    display_name: str
    input_token_limit: int | UnsetType = UNSET
    output_token_limit: int | UnsetType = UNSET
    supported_generation_methods: list[str] = msgspec.field(default_factory=lambda: list(METHODS))


class ModelList(Answered, frozen=True, rename="camel", kw_only=True):
    models: list[Model]
    next_page_token: str | UnsetType = UNSET


class CacheUsage(Answered, frozen=True, rename="camel", kw_only=True):
    total_token_count: int


class CachedContent(Answered, frozen=True, rename="camel", kw_only=True):
    """`holdfast` is there where the call had an engine hold it: what that engine did."""

    name: str
    model: str
    display_name: str | UnsetType = UNSET
    create_time: datetime
    update_time: datetime
    expire_time: datetime
    usage_metadata: CacheUsage
    holdfast: Holdfast | UnsetType = UNSET


class CachedContentList(Answered, frozen=True, rename="camel", kw_only=True):
    cached_contents: list[CachedContent] | UnsetType = UNSET
    next_page_token: str | UnsetType = UNSET


class Nothing(Answered, frozen=True, rename="camel", kw_only=True):
    """The answer to a deletion."""


_REASONS: dict[protocol.FinishReason, FinishReason] = {
    "stop": "STOP",
    "length": "MAX_TOKENS",
    "stop_sequence": "STOP",
    "tool_use": "STOP",
    "context": "MAX_TOKENS",
}


@dataclass(slots=True, kw_only=True)
class GeminiWriter(Writer[GenerateContentResponse, GenerateContentResponse]):
    """The extension object goes out with the first chunk. With `is_enum` the text is a string in
    JSON, of which the client gets the word alone, with the end."""

    is_enum: bool = False
    _calls: dict[int, Block] = field(default_factory=dict)
    _quoted: dict[int, list[str]] = field(default_factory=dict)
    _ended: dict[int, Candidate] = field(default_factory=dict)

    def write(self, frame: protocol.Frame) -> Iterator[GenerateContentResponse]:
        self.note(frame)
        match frame:
            case protocol.TextDelta(text=text, choice=choice) if self.is_enum:
                self._quoted.setdefault(choice, []).append(text)
            case protocol.TextDelta(text=text, choice=choice, logprobs=drawn):
                yield from self._complete(choice)
                yield self._say(choice, Part(text=text), logprobs_of(drawn))
            case protocol.ThinkingDelta(text=text, choice=choice):
                if not self.hides_thinking:
                    yield from self._complete(choice)
                    yield self._say(choice, Part(text=text, thought=True))
            case protocol.ToolUseStart(id=call_id, name=name, choice=choice):
                yield from self._complete(choice)
                self._calls[choice] = Block("call", call_id, name)
            case protocol.ToolInputDelta(partial_json=partial, choice=choice):
                if choice not in self._calls:
                    raise EngineFailed
                self._calls[choice].pieces.append(partial)
            case protocol.Finished(choice=choice):
                last = self._calls.pop(choice, None)
                if last is None:
                    last = Block("text", pieces=[_word_in("".join(self._quoted.get(choice, [])))])
                self._ended[choice] = _candidate(frame, [last])
            case protocol.Done():
                yield self._end([self._ended[index] for index in sorted(self._ended)])

    def whole(self) -> GenerateContentResponse:
        candidates: list[Candidate] = []
        for end, blocks in self.answers():
            if self.is_enum:
                texts = [block.text for block in blocks if block.kind == "text"]
                thoughts = [block.text for block in blocks if block.kind == "thinking"]
                word = Block("text", pieces=[_word_in("".join(texts))])
                blocks = [Block("thinking", pieces=thoughts), word]
            candidates.append(_candidate(end, blocks))
        return self._end(candidates)

    def _complete(self, choice: int) -> Iterator[GenerateContentResponse]:
        """Yield the choice's open call, which another block ends."""
        call = self._calls.pop(choice, None)
        if call is not None:
            yield self._say(choice, _part(call))

    def _say(
        self, choice: int, part: Part, logprobs: LogprobsResult | UnsetType = UNSET
    ) -> GenerateContentResponse:
        content = Content(parts=[part])
        return self._chunk([Candidate(content=content, index=choice, logprobs_result=logprobs)])

    def _end(self, candidates: list[Candidate]) -> GenerateContentResponse:
        usage = usage_of(self.usage, self.output_tokens, self.thinking_tokens)
        return self._chunk(candidates, usage)

    def _chunk(
        self, candidates: list[Candidate], usage: UsageMetadata | UnsetType = UNSET
    ) -> GenerateContentResponse:
        return GenerateContentResponse(
            candidates=candidates,
            usage_metadata=usage,
            model_version=self.model,
            response_id=self.id,
            holdfast=self.take_extension(),
        )


def _candidate(end: protocol.Finished, blocks: Sequence[Block]) -> Candidate:
    """A candidate with its end. Empty texts are left out beside other parts.

    The last call may be cut off, or malformed; then it is left out too.
    """
    reason = _REASONS[end.reason]
    parts = list[Part]()
    for number, block in enumerate(blocks):
        if block.kind == "call" and number == len(blocks) - 1 and args_of(block) is None:
            if reason != "MAX_TOKENS":
                reason = "MALFORMED_FUNCTION_CALL"
        elif block.kind == "call" or block.text:
            parts.append(_part(block))
    return Candidate(
        content=Content(parts=parts or [Part(text="")]),
        finish_reason=reason,
        index=end.choice,
        logprobs_result=logprobs_of([token for block in blocks for token in block.drawn]),
    )


def _part(block: Block) -> Part:
    """The part of a block. Raise EngineFailed for a call whose input is not a JSON object."""
    if block.kind != "call":
        return Part(text=block.text, thought=True if block.kind == "thinking" else UNSET)
    args = args_of(block)
    if args is None:
        raise EngineFailed
    return Part(function_call=FunctionCall(id=block.id, name=block.name, args=args))


def args_of(block: Block) -> dict[str, Any] | None:
    """The input of a call; None where it is not a JSON object, for example because it was cut
    off."""
    try:
        args = msgspec.json.decode(block.text or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return args if isinstance(args, dict) else None


def _word_in(quoted: str) -> str:
    """The string in JSON that may be cut off. A text that is no such string is returned as it
    is."""
    word = partial_json(quoted) if quoted else ""
    return word if isinstance(word, str) else quoted
