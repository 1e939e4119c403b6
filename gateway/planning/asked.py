"""What a plan is asked for.

Sizes of memory are in GiB (2**30 bytes), of each engine.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

FAMILIES = Path(__file__).parent / "families.toml"
"""The shapes of common models."""

MAX_TURNS = 100_000
DEFAULT_MIN_TOKENS = 1024
"""Of engines whose setting says nothing else."""
MAX_TRACE_CHARACTERS = 8 * 2**20
MAX_ENGINES = 64
MAX_MADE_TURNS = 60_000
KvDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
DTYPES: tuple[KvDtype, ...] = ("bfloat16", "float16", "float32", "fp8", "int8")
# PostgreSQL takes no NUL.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[^\x00]+$")]
_Ms = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]
_Gib = Annotated[float, msgspec.Meta(ge=0, le=1_048_576)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class MadeTraffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conversations made up by a rule: tenants with a system prompt each, and gaps between turns.

    All conversations of a tenant begin with its `system_tokens`. Every turn adds `question_tokens`
    and the `answer_tokens` of the turn before. Gaps are exponential with a mean of `gap_seconds`.
    Conversations start at random within `hours`.
    """

    tenants: _Count = 8
    conversations: _Count = 20
    turns: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 8
    system_tokens: _Tokens = 3000
    question_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 300
    answer_tokens: _Tokens = 250
    gap_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 60.0
    hours: Annotated[float, msgspec.Meta(ge=0.01, le=744)] = 4.0
    ttl: Literal["5m", "1h", "none"] = "5m"
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 1

    @property
    def num_turns(self) -> int:
        return self.tenants * self.conversations * self.turns


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware and the traffic of a plan.

    The shape is that of `config` (a Hugging Face config.json) or of the family `model`.
    `weights_gib` is the part of `device_gib` that is not for keys and values; by default that of
    16-bit weights, as far as the shape tells it, and a tenth of the device. `prefill_us` is the
    time of one computed token, `decode_ms` that of a step that only decodes; by default what the
    ledger measured. Shorter prefixes than `min_cache_tokens` are not cached; by default the least
    of what the engines of the range's models say, else DEFAULT_MIN_TOKENS.

    The traffic is `trace` (lines of JSON in Mooncake's format), `made`, or the turns of a range of
    the ledger.
    """

    model: Name = "llama-3-8b"
    config: dict[str, Any] | None = None
    kv_dtype: KvDtype = "bfloat16"
    device_gib: Annotated[float, msgspec.Meta(gt=0, le=65_536)] = 80.0
    weights_gib: _Gib | None = None
    host_gib: _Gib = 0.0
    disk_gib: _Gib = 0.0
    engines: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] = 1
    lease_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    max_running: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    prefill_us: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None
    decode_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] | None = None
    min_cache_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    trace: Annotated[str, msgspec.Meta(max_length=MAX_TRACE_CHARACTERS)] | None = None
    made: MadeTraffic | None = None
    workspace: Name | None = None
    key: Name | None = None
    served_model: Name | None = None
    since_ms: _Ms | None = None
    until_ms: _Ms | None = None


def family_names() -> list[str]:
    return list(tomllib.loads(FAMILIES.read_text("utf-8")))
