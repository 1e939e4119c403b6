"""Response bodies and stream chunks. `holdfast` is our extension; UNSET fields are not sent."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.protocol import DrawnToken, InputUsage, TokenProb
from gateway.dialects.extension import Holdfast

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
    """Those of the text's tokens, in its order; `top_candidates` where there are any."""

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


def logprobs_of(drawn: Sequence[DrawnToken]) -> LogprobsResult | UnsetType:
    """Nothing where no token has any."""
    if not drawn:
        return UNSET
    top = [TopCandidates(candidates=[_told(likely) for likely in one.top]) for one in drawn]
    return LogprobsResult(
        chosen_candidates=[_told(one.drawn) for one in drawn],
        top_candidates=top if drawn[0].top else UNSET,
    )


def joined_logprobs(parts: Sequence[LogprobsResult]) -> LogprobsResult | UnsetType:
    if not parts:
        return UNSET
    top = [one for part in parts for one in part.top_candidates or ()]
    return LogprobsResult(
        chosen_candidates=[one for part in parts for one in part.chosen_candidates],
        top_candidates=top or UNSET,
    )


def _told(prob: TokenProb) -> LogprobsCandidate:
    token = prob.token.decode(errors="replace")
    return LogprobsCandidate(token=token, token_id=prob.token_id, log_probability=prob.logprob)


def usage_of(usage: InputUsage, output_tokens: int, thinking_tokens: int) -> UsageMetadata:
    read = usage.cache_read_tokens
    return UsageMetadata(
        prompt_token_count=usage.prompt_tokens,
        cached_content_token_count=read or UNSET,
        candidates_token_count=output_tokens - thinking_tokens,
        thoughts_token_count=thinking_tokens or UNSET,
        total_token_count=usage.prompt_tokens + output_tokens,
        prompt_tokens_details=[ModalityCount(token_count=usage.prompt_tokens)],
        cache_tokens_details=[ModalityCount(token_count=read)] if read else UNSET,
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


def model_of(model_id: str, display_name: str, longest: int | None) -> Model:
    limit = UNSET if longest is None else longest
    return Model(
        name=f"models/{model_id}",
        base_model_id=model_id,
        display_name=display_name,
        input_token_limit=limit,
        output_token_limit=limit,
    )
