"""Times to first token, of prompts that were read and of those that were not."""

import msgspec


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, each known to within 19 % of itself; None without a turn."""

    requests: int
    p50: float | None
    p95: float | None
    p99: float | None


class LatencyCell(msgspec.Struct, frozen=True, kw_only=True):
    """Turns of one prompt length, in (`above_tokens`, `up_to_tokens`], that read or did not."""

    above_tokens: int
    up_to_tokens: int | None
    is_hit: bool
    seconds: Percentiles


class LatencyPoint(msgspec.Struct, frozen=True, kw_only=True):
    start_ms: int
    hits: Percentiles
    misses: Percentiles


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """`bucket_seconds` is the width of the series' intervals."""

    hits: Percentiles
    misses: Percentiles
    cells: list[LatencyCell]
    bucket_seconds: int
    series: list[LatencyPoint]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    opened_ms: int
    engine: str | None
    prompt_tokens: int
    cache_read_tokens: int
    first_token_seconds: float


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    start_ms: int
    turns: int
    p50: float
    p95: float


class LatencySamples(msgspec.Struct, frozen=True, kw_only=True):
    since_ms: int
    until_ms: int
    samples: list[Sample]
    overhead: list[Overhead]
