"""From a prepared request to the cache's query and the sampler's parameters."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from engine.approximate.asking import is_in_other_tokens
from engine.backends.prepare.prepared import Prepared
from engine.cache.digests import ChainKind
from engine.cache.ids import TokenId
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.errors import InvalidRequest
from engine.protocol import NEUTRAL, GenerateRequest
from engine.protocol.reports import Description
from engine.schedule.runner import SampleParams


def query_of(
    request: GenerateRequest,
    prepared: Prepared,
    cache: PrefixCache,
    description: Description,
    acting: Callable[[str, Sequence[TokenId]], ChainKind | None],
    *,
    arrived_at: float,
) -> CacheQuery:
    """The prompt as the cache sees it.

    Raise NotFound for an adapter that is not here. Raise InvalidRequest for an adapter and a salt
    in one request, because a chain has one kind.
    """
    tokens = array("I", prepared.token_ids).tolist()
    least = request.min_cache_tokens
    keys = array("I", prepared.keys).tolist() if prepared.keys else tokens
    if is_in_other_tokens(request):
        keys = []
    if request.salt and request.adapter:
        raise InvalidRequest("salt: not with an adapter")
    adapter = acting(request.adapter, tokens)
    salt = ChainKind(request.salt, 0) if request.salt else None
    return CacheQuery(
        scope=request.scope,
        tokens=tokens,
        digests=cache.digests(request.scope, keys, adapter or salt),
        adapter=adapter,
        segments=prepared.segments,
        breakpoints=request.breakpoints,
        names=prepared.names,
        min_cache_tokens=max(description.min_cache_tokens if least is None else least, 1),
        arrived_at=arrived_at,
        lease_share=request.lease_share,
        lookback_to=request.lookback_to,
    )


def new_samples(request: GenerateRequest, description: Description) -> list[SampleParams]:
    """The parameters of each choice. Their seeds differ. Without a seed they follow from the
    request's id."""
    sampling = request.sampling
    default = description.default_sampling
    drawn_by: dict[str, Any] = {}
    for name, neutral in NEUTRAL.items():
        candidates = (getattr(sampling, name), getattr(default, name), neutral)
        drawn_by[name] = next(value for value in candidates if value is not None)
    seed = crc32(request.request_id.encode()) if sampling.seed is None else sampling.seed
    return [
        SampleParams(
            **drawn_by, seed=seed + choice, min_tokens=sampling.min_tokens, bias=sampling.logit_bias
        )
        for choice in range(sampling.num_choices)
    ]
