"""Which markers would have paid, and what breaks prefixes. Money is in nano-dollars."""

from typing import Any

import msgspec


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """`multiples` is in input tokens: writes are 1.25 and 2, a read is 0.1."""

    tokens: int
    multiples: float
    nano: int | None
    prefill_seconds: float | None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    requests_with_read: int
    input_tokens: int
    cache_read_tokens: int
    cache_write_5m_tokens: int
    cache_write_1h_tokens: int
    multiples: float
    nano: int | None
    saves: Amount | None


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    ttl: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    path: str
    text: str
    change: str
    tokens: int
    multiples: float
    nano: int | None
    num_turns: int
    turns: list[str]
    earlier: list[str]


class Prewarm(msgspec.Struct, frozen=True, kw_only=True):
    pays: bool
    text: str


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    auto_cache: str
    auto_cache_ttl: str | None


class StreamAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice for the requests of one key with one model."""

    workspace: str
    key: str
    model: str
    num_turns: int
    verdict: str
    text: str
    shared_end: str | None
    shared_tokens: int
    markers: list[Marker]
    saves: Amount
    next_best: str | None
    lost: Amount
    outcomes: list[Outcome]
    findings: list[Finding]
    prewarm: Prewarm
    policy: Policy | None
    turns: list[str]


class RequestAdvice(msgspec.Struct, frozen=True, kw_only=True):
    dialect: str
    tokens: int
    findings: list[Finding]
    marked: dict[str, Any] | None


class AdviceReport(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    num_turns: int
    is_cut: bool
    streams: list[StreamAdvice]
    requests: list[RequestAdvice]


class SummaryLine(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence, and the page that shows the same with these filters."""

    kind: str
    text: str
    page: str
    workspace: str | None
    model: str | None
    multiples: float
    nano: int | None
    num_turns: int
    turns: list[str]


class AdviceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The advice of the seven days before `until_ms`."""

    text: str
    since_ms: int
    until_ms: int
    num_turns: int
    lines: list[SummaryLine]
    num_more: int
