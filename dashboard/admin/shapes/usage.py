"""Sums over a range: tokens by class, money, and the period before."""

from datetime import UTC, datetime

import msgspec

MIN_COMPARED = 20
MIN_COMPARED_SHARE = 0.1


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a stretch of time; turns without a price are in no sum of money."""

    requests: int = 0
    requests_with_read: int = 0
    errors: int = 0
    unpriced: int = 0
    input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    automatic_tokens: int = 0
    automatic_input_tokens: int = 0
    output_tokens: int = 0
    cost_nano: int = 0
    cost_without_cache_nano: int = 0

    @property
    def prompt_tokens(self) -> int:
        return (
            self.input_tokens
            + self.cache_read_tokens
            + self.cache_write_5m_tokens
            + self.cache_write_1h_tokens
        )

    @property
    def computed_input_tokens(self) -> int:
        """The uncached tokens without those that were reused from memory all the same."""
        return self.input_tokens - self.automatic_input_tokens

    @property
    def written_tokens(self) -> int:
        return self.cache_write_5m_tokens + self.cache_write_1h_tokens

    @property
    def is_priced(self) -> bool:
        """Whether any turn has a price: without one, money is unknown and not 0."""
        return self.requests > self.unpriced


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Shares; None where there is nothing to divide by."""

    token_hit_rate: float | None = None
    cacheable_hit_rate: float | None = None
    request_hit_rate: float | None = None


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """One interval. `is_partial`: the range cuts it, so its sums look low."""

    start_ms: int
    totals: Totals
    saved_nano: int
    is_partial: bool = False

    @property
    def start(self) -> datetime:
        return datetime.fromtimestamp(self.start_ms / 1000, UTC)

    @property
    def hit_rate(self) -> float | None:
        """Read ÷ prompt; None without traffic."""
        prompt = self.totals.prompt_tokens
        return self.totals.cache_read_tokens / prompt if prompt else None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A range, the period of the same length before it, and its intervals."""

    since_ms: int
    until_ms: int
    bucket_seconds: int
    totals: Totals
    rates: HitRates
    saved_nano: int
    before: Totals
    rates_before: HitRates
    saved_nano_before: int
    series: list[Bucket]
    miss_reasons: dict[str, int]
    outcomes: dict[str, int]

    @property
    def is_comparable(self) -> bool:
        """Whether the period before can be compared with: every comparison goes by this rule.

        It needs 20 requests, and a tenth of this period's. A difference from fewer would tell when
        the traffic began and not how the cache does.
        """
        least = max(MIN_COMPARED, MIN_COMPARED_SHARE * self.totals.requests)
        return self.before.requests >= least


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The turns that share these; what was not asked for is None."""

    workspace: str | None
    key: str | None
    engine: str | None
    model: str | None
    totals: Totals
    rates: HitRates
    saved_nano: int
