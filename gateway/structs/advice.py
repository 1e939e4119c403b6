"""Advice, as the admin API answers with it.

Money is in nano-dollars, None where a turn has no price. `multiples` is the same in input tokens:
an input token is 1, a five-minute write 1.25, an hour's write 2, a read 0.1.
"""

from typing import Any, Literal

import msgspec

from engine.protocol import CacheUsage, Ttl
from gateway.structs.fleet import AutoCacheMode

FaultKind = Literal[
    "tool_order",
    "key_order",
    "tool_set",
    "date",
    "hour",
    "minute",
    "nonce",
    "varying_text",
    "growing_text",
    "moved_text",
    "sliding_history",
]
DuplicateKind = Literal[
    "tool_order", "key_order", "date", "time", "nonce", "whitespace", "varying_text"
]
Verdict = Literal["fix", "prewarm", "mark", "unmark", "leave"]


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved, or lost where it is negative. `tokens` are those that need no prefill."""

    tokens: int
    multiples: float
    nano: int | None = None
    prefill_seconds: float | None = None


class Outcome(CacheUsage, kw_only=True):
    """The prompts' tokens and their cost under one way to place markers. `name` is `observed`,
    `as_sent` or a placement; `saves` is against `as_sent`. All but `observed` are computed for a
    cache that loses nothing before its time."""

    name: str
    requests_with_read: int
    input_tokens: int
    computed_tokens: int
    multiples: float
    nano: int | None
    saves: Amount | None = None


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Where a marker goes: a block's path, or a place that moves with the conversation."""

    place: str
    ttl: Ttl


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence with its number, and the turns that it rests on. `kind` is a fault's or one of
    `too_short`, `too_many`, `order`, `unmarked`, `changing_end`, `suspect`. `path` is the block.
    `num_turns` are all turns, `turns` some of them, `earlier` the turns that these were compared
    with."""

    kind: (
        FaultKind
        | DuplicateKind
        | Literal["too_short", "invalid", "unmarked", "changing_end", "suspect"]
    )
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


class NearDuplicate(Finding, frozen=True, kw_only=True):
    """Prefixes (tools and system blocks) of a workspace's turns, of all its keys, that one
    normalisation makes one: `kind` and `path` are of their first difference. What it would have
    saved is computed as for markers, and `by_key` for each key's turns. `is_compared`: kept prompts
    told what differs; elsewhere digests and times do."""

    workspace: str
    model: str
    num_prefixes: int
    is_compared: bool
    by_key: dict[str, Amount] = {}


class Prewarm(msgspec.Struct, frozen=True, kw_only=True):
    """Whether sending the shared prefix ahead (`max_tokens: 0`) pays. `num_races` turns wrote what
    another turn was still writing. `saves` is what pre-warms before those would have saved beside
    the best markers, their own cost taken off; `markers` are those that it needs, none where those
    that are sent do."""

    pays: bool
    num_races: int
    saves: Amount
    text: str
    markers: list[Marker] = []


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The key's `auto_cache` that does the same for requests that mark nothing."""

    auto_cache: AutoCacheMode
    auto_cache_ttl: Ttl | None


class StreamAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice for the turns of one key with one model. `shared_end` is where the stable prefix ends,
    of `shared_tokens` on average. The verdict is what saves most: `fix` is to do what `fix` says,
    the first of the `findings`, or a near-duplicate if `is_near`; `prewarm` is to send the prefix
    ahead; the others are about markers. `saves` is what that would have saved over these turns,
    which is no less than each finding would. Of a verdict `leave` it is 0, no finding saves
    anything, and `next_best` says what the best other markers would have cost more. `lost` is what
    the turns lost against a cache that loses nothing."""

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
    fix: Finding | None = None
    is_near: bool = False


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a request: its path, its tokens, and the TTL of the marker on it."""

    path: str
    tokens: int
    marker: str | None


class RequestAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` are estimated from bytes. `marked` is the request with the markers in place; None
    where nothing is to be marked or the dialect has no markers, and then a policy of the key does
    it. `blocks` are the first 200. `body` is what was read, `as_messages` the same as a body of the
    Messages API; None where it has more than texts and tools. `num_images` are the images in it,
    which a model sees only if it is listed with `sees`."""

    dialect: str
    tokens: int
    blocks: list[Block]
    findings: list[Finding]
    marked: dict[str, Any] | None
    body: dict[str, Any]
    as_messages: dict[str, Any] | None
    num_images: int = 0


class AdviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """`streams` are the turns by key and model, those with the most tokens first, 50 at most.
    `requests` go with those that were given; two or more are compared as one stream too. `text`
    says what was looked at. `num_without_sketch` turns are of an earlier version and are left out.
    `is_cut`: the range has more turns, which are older. `near_duplicates` come the dearest first.
    `saves` is the sum of the streams'."""

    text: str
    num_turns: int
    num_without_sketch: int
    is_cut: bool
    since_ms: int | None
    until_ms: int | None
    streams: list[StreamAdvice]
    requests: list[RequestAdvice]
    saves: Amount
    near_duplicates: list[NearDuplicate] = []


LineKind = Literal["ttl", "unpaid", "markers", "fault", "prewarm"]


class SummaryLine(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence with its number, and the turns that it rests on. `page` is the dashboard's page
    that shows the same, filtered by `workspace` and `model` (None filters nothing). `multiples` is
    what it is worth in input tokens. `nano` is that in nano-dollars, None where a turn has no
    price. `num_turns` are all turns, `turns` some of them."""

    kind: LineKind
    text: str
    page: Literal["advice", "savings"]
    workspace: str | None
    model: str | None
    multiples: float
    nano: int | None
    num_turns: int
    turns: list[str]


class AdviceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The lines that are worth most, six at most; `num_more` are left out. They come from the
    newest 20,000 turns of the seven days before `until_ms`, from the workspaces' sums, and from the
    100 most used prefixes. A workspace, or a group of key and model, with fewer than 20 requests
    gives no line. An answer is kept for ten minutes."""

    text: str
    since_ms: int
    until_ms: int
    num_turns: int
    # Those of groups with enough requests to give a line.
    num_judged: int
    is_cut: bool
    lines: list[SummaryLine]
    num_more: int
