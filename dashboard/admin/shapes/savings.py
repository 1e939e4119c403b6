"""What caching saved, and prefix by prefix whether it paid. Money is in nano-dollars."""

import msgspec


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """counterfactual + write premium − read discount = actual."""

    counterfactual_nano: int
    write_premium_nano: int
    read_discount_nano: int
    actual_nano: int
    saved_nano: int
    unexplained: int


class HostedCost(msgspec.Struct, frozen=True, kw_only=True):
    """The same tokens at a published price: no cost of anybody here."""

    model: str
    nano: int
    nano_without_cache: int
    source: str | None = None
    as_of: str | None = None


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    own: Waterfall
    hosted: list[HostedCost]
    prefill_tokens_avoided: int
    prefill_seconds_avoided: float | None
    gpu_hours_avoided: float | None
    unmeasured_tokens: int


class PrefixLook(msgspec.Struct, frozen=True, kw_only=True):
    """What a person can tell a prefix by: its last request, and the blocks up to its end."""

    last_turn: str
    last_ms: int
    model: str
    tokens: int
    user_agent: str | None = None
    name: str | None = None
    num_tools: int | None = None
    num_system: int | None = None
    num_messages: int | None = None


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """One prefix over its whole life; its gaps tell which TTL would have been cheaper."""

    workspace: str
    prefix: str
    model: str
    ttl: str | None
    requests: int
    requests_with_read: int
    cache_read_tokens: int
    cache_write_5m_tokens: int
    cache_write_1h_tokens: int
    saved_nano: int | None
    is_paid_back: bool | None
    gaps_5m: int
    gaps_1h: int
    better_ttl: str | None
    better_ttl_saves_nano: int | None = None
    reads_to_pay_back: int | None = None
    look: PrefixLook | None = None
