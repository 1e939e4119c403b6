"""Client of the gateway's admin API, the dashboard's only source. Knows HTTP, no pictures.

Counts are tokens, money is nano-dollars, times are UTC.
"""

from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import httpx
import msgspec

TIMEOUT = httpx.Timeout(5.0, connect=2.0)
EngineStatus = Literal["starting", "ready", "down"]
Reply = TypeVar("Reply")


class ClientError(Exception):
    """The admin API gave no usable answer; the message is fit to be shown."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a stretch of time; turns without a price are in no sum of money."""

    requests: int = 0
    errors: int = 0
    input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    output_tokens: int = 0
    unpriced: int = 0
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


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    start_ms: int
    totals: Totals
    saved_nano: int

    @property
    def start(self) -> datetime:
        return datetime.fromtimestamp(self.start_ms / 1000, UTC)

    @property
    def hit_rate(self) -> float | None:
        """Read ÷ prompt; None without traffic."""
        prompt = self.totals.prompt_tokens
        return self.totals.cache_read_tokens / prompt if prompt else None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Shares; None where there is nothing to divide by."""

    token_hit_rate: float | None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    bucket_seconds: int
    totals: Totals
    rates: Rates
    saved_nano: int
    series: list[Bucket]

    @property
    def net_saved_nano(self) -> int | None:
        """None, and not 0, where no turn has a price."""
        return None if self.totals.requests == self.totals.unpriced else self.saved_nano


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    free: int
    active: int
    leased: int
    best_effort: int
    cached: int


class Description(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    model: str


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    uptime_seconds: float
    running: int
    waiting: int
    blocks: Blocks
    num_leases: int = 0


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine; `stats` only while it answers."""

    name: str
    url: str
    status: EngineStatus
    description: Description | None = None
    stats: Stats | None = None

    @property
    def blocks(self) -> Blocks | None:
        return self.stats.blocks if self.stats else None


class AdminClient:
    """Blocking on purpose: a Streamlit script runs in a thread of its own."""

    def __init__(self, gateway_url: str, admin_key: str) -> None:
        self._http = httpx.Client(
            base_url=gateway_url,
            headers={"authorization": f"Bearer {admin_key}"},
            timeout=TIMEOUT,
        )

    def overview(self, seconds: int) -> Overview:
        return self._get("/admin/v1/overview", Overview, {"seconds": seconds})

    def engines(self) -> list[Engine]:
        return self._get("/admin/v1/engines", list[Engine])

    def _get(self, path: str, shape: type[Reply], params: dict[str, Any] | None = None) -> Reply:
        try:
            reply = self._http.get(path, params=params)
        except httpx.HTTPError as error:
            raise ClientError(f"The gateway does not answer ({type(error).__name__}).") from None
        if reply.status_code in (401, 403):
            raise ClientError("The gateway refuses the admin key (DASHBOARD_ADMIN_KEY).")
        if reply.status_code != 200:
            raise ClientError(f"The gateway answers {reply.status_code} to {path}.")
        try:
            return msgspec.json.decode(reply.content, type=shape)
        except msgspec.MsgspecError:
            raise ClientError(f"The gateway's answer to {path} has another shape.") from None
