"""From a request on the wire to what the cache and the scheduler work with."""

from array import array
from typing import TypeVar, get_args
from zlib import crc32

import msgspec

from engine.backends.prepare.prepared import Prepared, PreparedSegment
from engine.cache.digests import pack
from engine.cache.lookup import Segment
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.errors import InvalidRequest, PromptTooLong, Unsupported
from engine.protocol import (
    MAX_BREAKPOINTS,
    MAX_LOGPROBS,
    MAX_NAMES,
    MAX_RECORD_BYTES,
    Capability,
    Description,
    GenerateRequest,
    HeldName,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from engine.schedule.runner import SampleParams
from engine.text.rendered import RenderedPrompt, SegmentSpan

T = TypeVar("T")

MAX_CHOICES = 16
SPARE_BLOCKS = 2
"""What a prompt must leave of the pool: its next token's block, and one for copy-on-write."""


def check_request(request: GenerateRequest, description: Description) -> None:
    """Raise InvalidRequest or Unsupported, naming the field; the prompt's length comes later."""
    check_prompt(request.prompt)
    num_segments = request.prompt.num_segments
    for index, point in enumerate(request.breakpoints):
        if not 0 <= point.segment < num_segments:
            raise InvalidRequest(f"breakpoints[{index}].segment: no such segment")
    for index, name in enumerate(request.names):
        if not 0 <= name.segment < num_segments:
            raise InvalidRequest(f"names[{index}].segment: no such segment")
    sampling = request.sampling
    checks = (
        (request.request_id != "", "request_id: must not be empty"),
        (request.scope != "", "scope: must not be empty"),
        (num_segments > 0, "prompt: must not be empty"),
        (len(request.breakpoints) <= MAX_BREAKPOINTS, "breakpoints: at most 4"),
        (len(request.names) <= MAX_NAMES, f"names: at most {MAX_NAMES}"),
        (
            len(request.record.encode()) <= MAX_RECORD_BYTES,
            f"record: at most {MAX_RECORD_BYTES} bytes",
        ),
        (0 <= request.age_seconds < 86_400, "age_seconds: must be 0 to 86,400"),
        (
            sampling.max_tokens is None or sampling.max_tokens >= 0,
            "sampling.max_tokens: must not be negative",
        ),
        (0 <= (sampling.temperature or 0) <= 2, "sampling.temperature: must be 0 to 2"),
        (
            sampling.top_p is None or 0 < sampling.top_p <= 1,
            "sampling.top_p: must be above 0 and at most 1",
        ),
        ((sampling.top_k or 0) >= 0, "sampling.top_k: must not be negative"),
        (
            1 <= request.sampling.num_choices <= MAX_CHOICES,
            f"sampling.num_choices: must be 1 to {MAX_CHOICES}",
        ),
        (
            0 <= (sampling.logprobs or 0) <= MAX_LOGPROBS,
            f"sampling.logprobs: must be 0 to {MAX_LOGPROBS}",
        ),
        (
            request.sampling.num_choices == 1 or sampling.max_tokens != 0,
            "sampling.num_choices: must be 1 where max_tokens is 0",
        ),
        (request.min_cache_tokens is None or request.min_cache_tokens >= 0, "min_cache_tokens"),
        (
            all(point.seconds is None or point.seconds > 0 for point in request.breakpoints),
            "breakpoints.seconds: must be above 0",
        ),
        (0 <= (request.lease_share or 0) <= 1, "lease_share: must be 0 to 1"),
    )
    for is_good, message in checks:
        if not is_good:
            raise InvalidRequest(message)
    for capability in _needed(request):
        if capability not in description.capabilities:
            raise Unsupported(f"this engine does not declare the capability {capability!r}")
    if "own_template" not in description.capabilities:
        _check_for_server(request)
    _check_tool_choice(request)


def _check_for_server(request: GenerateRequest) -> None:
    """Raise Unsupported for what a server that renders its prompts itself can't be told."""
    prompt = request.prompt
    checks = (
        (prompt.text is not None, "prompt.text: a raw prompt"),
        (
            bool(prompt.messages) and prompt.messages[-1].role == "assistant",
            "messages: a last message of the assistant, to be continued,",
        ),
        (request.sampling.ignore_eos, "ignore_eos"),
    )
    for is_asked, what in checks:
        if is_asked:
            raise Unsupported(
                f"{what} is not supported: the model's server renders its own prompts"
            )


def _check_tool_choice(request: GenerateRequest) -> None:
    choice, names = request.tool_choice, {tool.name for tool in request.prompt.callable_tools}
    if choice.mode in ("any", "tool") and not names:
        raise InvalidRequest("tool_choice: there are no tools to choose from")
    if choice.names and choice.mode != "any":
        raise InvalidRequest("tool_choice.names: only for mode `any`")
    if not names.issuperset(choice.names):
        raise InvalidRequest("tool_choice.names: no such tool")
    if choice.mode == "tool" and choice.name not in names:
        raise InvalidRequest("tool_choice.name: no such tool")


def check_prompt(prompt: Prompt) -> None:
    """Raise InvalidRequest for a prompt that is a conversation and a raw text at once."""
    if prompt.text is not None and (prompt.messages or prompt.callable_tools or prompt.system):
        raise InvalidRequest("prompt.text: excludes messages, tools and system")


def _needed(request: GenerateRequest) -> list[Capability]:
    needed: dict[Capability, bool] = {
        "multiple_choices": request.sampling.num_choices > 1,
        "tools": bool(request.prompt.callable_tools),
        "forced_tools": request.tool_choice.mode in ("any", "tool"),
        "structured_output": request.output_schema is not None,
        "thinking": request.thinking,
        "penalties": request.sampling.has_penalties,
        "logprobs": request.sampling.logprobs is not None,
    }
    assert set(needed) <= set(get_args(Capability))
    return [capability for capability, is_needed in needed.items() if is_needed]


def prepare(
    request: GenerateRequest,
    rendered: RenderedPrompt,
    description: Description,
    kept: GenerateRequest,
) -> Prepared:
    """The parts of a rendered request that the engine needs; `kept` is the part that is read later.

    Raises InvalidRequest for no tokens, and PromptTooLong.
    """
    tokens = rendered.token_ids
    if not tokens:
        raise InvalidRequest("prompt: has no tokens")
    room = (description.num_blocks - SPARE_BLOCKS) * description.block_size
    longest = min(description.max_context_tokens - 1, room)
    if len(tokens) > longest:
        raise PromptTooLong(len(tokens), longest)
    segments = new_segments(request.prompt, rendered.segments, description.granularity)
    return Prepared(
        request=msgspec.json.encode(kept),
        token_ids=pack(tokens),
        segments=[PreparedSegment(one.kind, one.end, one.turn) for one in segments],
        names=_held_names(request, rendered),
    )


def query_of(
    request: GenerateRequest,
    prepared: Prepared,
    cache: PrefixCache,
    description: Description,
    *,
    arrived_at: float,
) -> CacheQuery:
    """The prompt as the cache sees it."""
    tokens = array("I", prepared.token_ids).tolist()
    return CacheQuery(
        scope=request.scope,
        tokens=tokens,
        digests=cache.digests(request.scope, tokens),
        segments=[Segment(one.kind, one.end, one.turn) for one in prepared.segments],
        breakpoints=request.breakpoints,
        names=prepared.names,
        min_tokens=_min_tokens(request, description),
        arrived_at=arrived_at,
        lease_share=request.lease_share,
    )


def new_query(
    request: GenerateRequest,
    rendered: RenderedPrompt,
    cache: PrefixCache,
    description: Description,
    *,
    arrived_at: float,
) -> CacheQuery:
    """The query of a rendered request: `prepare` and `query_of` in one. Raises as `prepare`."""
    prepared = prepare(request, rendered, description, request)
    return query_of(request, prepared, cache, description, arrived_at=arrived_at)


def _min_tokens(request: GenerateRequest, description: Description) -> int:
    asked = request.min_cache_tokens
    return max(description.min_cache_tokens if asked is None else asked, 1)


def new_segments(prompt: Prompt, spans: list[SegmentSpan], granularity: int) -> list[Segment]:
    """The segments for the look-back, with ends floored to the granularity."""
    segments: list[Segment] = []

    def end() -> int | None:
        tokens = spans[len(segments)].end
        return None if tokens is None else tokens - tokens % granularity

    if prompt.text is not None:
        return [Segment("text", end())]
    for _ in prompt.tools:
        segments.append(Segment("tool", end()))
    for _ in prompt.system:
        segments.append(Segment("text", end()))
    for turn, message in enumerate(prompt.messages):
        for part in message.parts:
            segments.append(_segment(part, end(), turn))
    return segments


def _segment(part: Part, end: int | None, turn: int) -> Segment:
    match part:
        case TextPart():
            return Segment("text", end, turn)
        case ThinkingPart():
            return Segment("thinking", end, turn)
        case ToolUsePart():
            return Segment("tool_use", end, turn)
        case ToolResultPart():
            return Segment("tool_result", end, turn)


def _held_names(request: GenerateRequest, rendered: RenderedPrompt) -> list[HeldName]:
    """Names with their token offsets; an unknown boundary counts as the one before it."""
    names, reached = [], 0
    for name in request.names:
        offset = rendered.segments[name.segment].offset(name.characters)
        reached = max(reached, offset or 0)
        names.append(HeldName(name.digest, reached))
    return names


def new_samples(request: GenerateRequest, description: Description) -> list[SampleParams]:
    """One a choice. Their seeds differ; without a seed they follow from the request's id."""
    sampling = request.sampling
    seed = crc32(request.request_id.encode()) if sampling.seed is None else sampling.seed
    return [
        SampleParams(
            temperature=_given(sampling.temperature, description.default_temperature),
            top_p=_given(sampling.top_p, description.default_top_p),
            top_k=_given(sampling.top_k, description.default_top_k),
            seed=seed + choice,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            bias=sampling.logit_bias,
        )
        for choice in range(sampling.num_choices)
    ]


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
