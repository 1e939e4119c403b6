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
    """What is saved, or lost where it is negative.

    - `tokens`: those that need no prefill
    """

    tokens: int
    multiples: float
    nano: int | None = None
    prefill_seconds: float | None = None


class Outcome(CacheUsage, kw_only=True):
    """The prompts' tokens and their cost under one way to place markers. All but `observed` are
    computed for a cache that loses nothing before its time.

    - `name`: `observed`, `as_sent` or a placement
    - `saves`: against `as_sent`
    """

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
    """One sentence with its number, and the turns that it rests on.

    - `kind`: a fault's, a near-duplicate's, or one of those about markers
    - `path`: the block
    - `num_turns`: all turns
    - `turns`: some of them
    - `earlier`: the turns that these were compared with
    """

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
    """Prefixes (tools and system blocks) that would be one after a normalisation. They are of a
    workspace's turns, of all its keys.

    What that would have saved is computed as for markers.

    - `kind`, `path`: of their first difference
    - `is_compared`: stored prompts told what differs; elsewhere digests and times do
    - `by_key`: what each key's turns would have saved
    """

    workspace: str
    model: str
    num_prefixes: int
    is_compared: bool
    by_key: dict[str, Amount] = {}


class Prewarm(msgspec.Struct, frozen=True, kw_only=True):
    """Whether it pays to send the shared prefix ahead (`max_tokens: 0`).

    - `num_races`: turns that wrote what another turn was still writing
    - `saves`: what pre-warms before those would have saved beside the best markers, net of their
      own cost
    - `markers`: those that it needs; none where the markers that are sent do
    """

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
    """Advice for the turns of one key with one model.

    The verdict is what saves most. `fix` is to do what `fix` says, `prewarm` to send the prefix
    ahead, and the others are about markers.

    - `shared_end`: where the stable prefix ends, of `shared_tokens` on average
    - `fix`: the first of the `findings`, or a near-duplicate if `is_near`
    - `saves`: what the verdict would have saved over these turns, no less than any finding would; 0
      with `leave`, where no finding saves anything
    - `next_best`: with `leave`: what the best other markers would have cost more
    - `lost`: what the turns lost against a cache that loses nothing
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
    fix: Finding | None = None
    is_near: bool = False


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a request.

    - `marker`: the TTL of the marker on it
    """

    path: str
    tokens: int
    marker: str | None


class RequestAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice for one pasted request.

    - `tokens`: estimated from bytes
    - `blocks`: the first 200
    - `marked`: the request with the markers in place; null where nothing is to be marked, or where
      the dialect has no markers and a policy of the key does it
    - `body`: what was read
    - `as_messages`: the same as a body of the Messages API; null where it has more than texts and
      tools
    - `num_images`: the images in it; only a model listed with `sees` is shown them
    """

    dialect: str
    tokens: int
    blocks: list[Block]
    findings: list[Finding]
    marked: dict[str, Any] | None
    body: dict[str, Any]
    as_messages: dict[str, Any] | None
    num_images: int = 0


class AdviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Advice for a range, or for requests.

    - `text`: what was looked at
    - `num_without_sketch`: turns of an earlier version, which are left out
    - `is_cut`: the range has more turns, which are older
    - `streams`: the turns by key and model, those with the most tokens first, 50 at most
    - `requests`: advice for the requests that were sent; two or more are compared as one stream too
    - `saves`: the sum of the streams'
    - `near_duplicates`: the dearest first
    """

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
    """One sentence with its number, and the turns that it rests on.

    - `page`: the dashboard's page that shows the same
    - `workspace`, `model`: that page's filters; null filters nothing
    - `multiples`: what it is worth in input tokens
    - `nano`: the same in nano-dollars; null where a turn has no price
    - `num_turns`: all turns
    - `turns`: some of them
    """

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
    """The lines that are worth most, six at most.

    They come from the newest 20,000 turns of the seven days before `until_ms`, from the workspaces'
    sums, and from the 100 most used prefixes. A workspace, or a group of key and model, with fewer
    than 20 requests gives no line. An answer is reused for ten minutes.

    - `num_judged`: the turns of groups with enough requests to give a line
    - `is_cut`: the seven days have more turns
    - `num_more`: lines that are left out
    """

    text: str
    since_ms: int
    until_ms: int
    num_turns: int
    num_judged: int
    is_cut: bool
    lines: list[SummaryLine]
    num_more: int
