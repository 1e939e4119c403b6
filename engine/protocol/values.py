"""The version of the protocol, its bounds, and the values that its fields may have."""

from typing import Literal, NamedTuple

PROTOCOL_VERSION = 1
SCOPE_HEADER = "x-scope"
"""Has the scope of a generation or a count: workers are shared fairly before a body is read."""
MAX_NAMES = 512
MAX_BREAKPOINTS = 4
MAX_CELLS = 2048
MAX_LOGPROBS = 20
MAX_RECORD_BYTES = 4096

Ttl = Literal["5m", "30m", "1h"]


class TtlClass(NamedTuple):
    """`write_multiple` is what a token written for so long costs, in input tokens, unless a price
    says otherwise; `words` are the TTL for people."""

    seconds: int
    write_multiple: float
    words: str


TTLS: dict[Ttl, TtlClass] = {
    "5m": TtlClass(300, 1.25, "5 minutes"),
    "30m": TtlClass(1800, 1.25, "30 minutes"),
    "1h": TtlClass(3600, 2.0, "1 hour"),
}
"""The classes of lifetimes, the shortest first."""


def outlives(one: Ttl, other: Ttl) -> bool:
    return TTLS[one].seconds > TTLS[other].seconds


Role = Literal["user", "assistant", "system"]
Tier = Literal["device", "host", "disk"]
ServiceClass = Literal["interactive", "batch"]
EntryState = Literal["leased", "best_effort", "none"]
FinishReason = Literal[
    "stop", "length", "stop_sequence", "tool_use", "cancelled", "context", "failed"
]
Capability = Literal[
    "copy_on_write",
    "multiple_choices",
    "tools",
    "forced_tools",
    "structured_output",
    "strict_tools",
    "penalties",
    "logprobs",
    "thinking",
    "manual_clock",
    "block_map",
    "service_class",
    "own_template",
]
MissReason = Literal[
    "cold",
    "no_breakpoint",
    "no_boundary",
    "below_minimum",
    "ttl_expired",
    "best_effort_evicted",
    "sacrificed",
    "dropped",
    "lookback_exceeded",
    "in_progress_race",
    "not_told",
    "damaged",
]
BestEffortReason = Literal["over_budget", "sacrificed", "yielded", "on_host", "on_disk", "no_hold"]
GuaranteeName = Literal["exact_read", "exact_write", "hold", "isolation", "events", "forced_tools"]
ErrorCode = Literal[
    "invalid_request",
    "unauthorized",
    "prompt_too_long",
    "too_costly",
    "duplicate_request",
    "unsupported",
    "not_found",
    "overloaded",
    "not_ready",
    "cancelled",
    "internal",
]
STATUS_OF: dict[ErrorCode, int] = {
    "invalid_request": 400,
    "unauthorized": 401,
    "prompt_too_long": 400,
    "too_costly": 400,
    "duplicate_request": 409,
    "unsupported": 400,
    "not_found": 404,
    "overloaded": 529,
    "not_ready": 503,
    "cancelled": 499,
    "internal": 500,
}
