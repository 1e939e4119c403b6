"""From a request that a worker prepared to what the cache and the scheduler work with."""

from array import array
from typing import TypeVar
from zlib import crc32

from engine.backends.prepare.prepared import Prepared
from engine.backends.prepare.preparer import prepare
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.protocol import Description, GenerateRequest
from engine.schedule.runner import SampleParams
from engine.text.rendered import RenderedPrompt

T = TypeVar("T")


def query_of(
    request: GenerateRequest,
    prepared: Prepared,
    cache: PrefixCache,
    description: Description,
    *,
    arrived_at: float,
) -> CacheQuery:
    """The prompt as the cache sees it."""
    tokens, least = array("I", prepared.token_ids).tolist(), request.min_cache_tokens
    return CacheQuery(
        scope=request.scope,
        tokens=tokens,
        digests=cache.digests(request.scope, tokens),
        segments=prepared.segments,
        breakpoints=request.breakpoints,
        names=prepared.names,
        min_tokens=max(description.min_cache_tokens if least is None else least, 1),
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
