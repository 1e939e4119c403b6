"""Single turns, and where one's prompt first differs from another's."""

from datetime import UTC, datetime

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its response. `saved_nano` is None where the model has no price."""

    id: str
    opened_ms: int
    workspace: str
    key_id: str
    model: str
    engine: str | None
    dialect: str | None
    stream: bool
    outcome: str
    stop_reason: str | None
    miss_reason: str | None
    input_tokens: int
    cache_read_tokens: int
    cache_write_5m_tokens: int
    cache_write_1h_tokens: int
    automatic_tokens: int
    computed_tokens: int
    output_tokens: int
    first_token_seconds: float | None
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    duration_seconds: float | None
    available_tokens: int | None
    captured_tokens: int | None
    prefix: str | None
    prefix_ttl: str | None
    cost_nano: int | None
    saved_nano: int | None
    http_request_id: str | None = None
    user_agent: str | None = None
    name: str | None = None
    status: int | None = None
    error: str | None = None

    @property
    def opened(self) -> datetime:
        return datetime.fromtimestamp(self.opened_ms / 1000, UTC)

    @property
    def prompt_tokens(self) -> int:
        return (
            self.input_tokens
            + self.cache_read_tokens
            + self.cache_write_5m_tokens
            + self.cache_write_1h_tokens
        )


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An error answer of the gateway; `workspace` is None where the request had no valid key."""

    at_ms: int
    request_id: str
    workspace: str | None
    status: int
    type: str
    message: str
    path: str
    user_agent: str | None = None

    @property
    def at(self) -> datetime:
        return datetime.fromtimestamp(self.at_ms / 1000, UTC)


class TurnPage(msgspec.Struct, frozen=True, kw_only=True):
    """`next` continues where this page ends; None on the last one."""

    turns: list[Turn]
    next: str | None


class TurnDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is None where the prompt only grew, `earlier` where there is nothing before it."""

    turn: str
    earlier: str | None = None
    kind: str | None = None
    missed_tokens: int | None = None
    section: str | None = None
    block: int | None = None
    characters: int | None = None
    missed_nano: int | None = None
    shared_tokens: int | None = None
    earlier_tokens: int | None = None
