"""The shapes of an advice, as the admin API answers with it. Pure.

Money is in nano-dollars, None where a turn has no price. `multiples` is the same in input tokens:
an input token is 1, a five-minute write 1.25, an hour's write 2, a read 0.1.
"""

from typing import Literal

import msgspec

from gateway.advice.differences import FaultKind

Verdict = Literal["mark", "unmark", "leave"]
PolicyMode = Literal["off", "prefix", "conversation"]


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved, or lost where it is negative. `tokens` are those that need no prefill."""

    tokens: int
    multiples: float
    nano: int | None = None
    prefill_seconds: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts' tokens and their cost under one way to place markers.

    `name` is `observed`, `as_sent` or a placement; `saves` is against `as_sent`. All but `observed`
    are computed for a cache that loses nothing before its time.
    """

    name: str
    requests_with_read: int
    input_tokens: int
    cache_read_tokens: int
    cache_write_5m_tokens: int
    cache_write_1h_tokens: int
    computed_tokens: int
    multiples: float
    nano: int | None
    saves: Amount | None = None


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Where a marker goes: a block's path, or a place that moves with the conversation."""

    place: str
    ttl: Literal["5m", "1h"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence with its number, and the turns that it rests on.

    `kind` is a fault's or one of `too_short`, `too_many`, `order`, `unmarked`, `changing_end`,
    `suspect`. `path` is the block. `num_turns` are all turns, `turns` some of them, `earlier` the
    turns that these were compared with.
    """

    kind: FaultKind | Literal["too_short", "invalid", "unmarked", "changing_end", "suspect"]
    path: str
    text: str
    change: str
    tokens: int
    multiples: float
    nano: int | None = None
    prefill_seconds: float | None = None
    num_turns: int = 0
    turns: list[str] = []
    earlier: list[str] = []


class Prewarm(msgspec.Struct, frozen=True, kw_only=True):
    """Whether sending the shared prefix ahead (`max_tokens: 0`) pays.

    `num_races` turns wrote what another turn was still writing. `saves` is what pre-warms before
    those would have saved beside the advised markers, their own cost taken off.
    """

    pays: bool
    num_races: int
    saves: Amount
    text: str


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The key's `auto_cache` that does the same for requests that mark nothing."""

    auto_cache: PolicyMode
    auto_cache_ttl: Literal["5m", "1h"] | None


class StreamAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice for the turns of one key with one model.

    `shared_end` is where the stable prefix ends, of `shared_tokens` on average. `saves` is what the
    advised markers would have saved over these turns; of a verdict `leave` it is 0, and
    `next_best` says what the best other way would have cost more. `lost` is what the turns lost
    against a cache that loses nothing: restarts, evictions, other engines.
    """

    workspace: str
    key: str
    model: str
    num_turns: int
    first_ms: int
    last_ms: int
    verdict: Verdict
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
    is_estimated: bool = False
