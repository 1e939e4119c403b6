"""Advice, as the admin API answers with it.

Money (`nano`) is in nano-dollars. It is null if a turn has no price. `multiples` is the same cost
in units of one input token: an input token is 1, a token written for five minutes is 1.25, a token
written for an hour is 2, and a token read is 0.1.
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
    """An amount that is saved. It is lost if it is negative.

    - `tokens`: the tokens that need no prefill
    - `prefill_seconds`: their time; null if the time of a token is not known
    """

    tokens: int
    multiples: float
    nano: int | None = None
    prefill_seconds: float | None = None


class Outcome(CacheUsage, kw_only=True):
    """The prompts' tokens and their cost with one way to place markers.

    `observed` is what happened. Every other outcome is computed for a cache that loses nothing
    before its time.

    - `name`: `observed`, `as_sent` (the same markers) or a placement
    - `saves`: what this way saves against `as_sent`
    """

    name: str
    requests_with_read: int
    input_tokens: int
    computed_tokens: int
    multiples: float
    nano: int | None
    saves: Amount | None = None


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """A marker that is advised.

    - `place`: a block's path, or a place that moves with the conversation
    """

    place: str
    ttl: Ttl


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence with its amounts, and the turns that it rests on.

    - `kind`: the kind of a fault or of a near-duplicate, or a kind about markers
    - `path`: the block that the finding is about
    - `text`: what was found
    - `change`: what to change
    - `tokens`, `multiples`, `nano`, `prefill_seconds`: what the change would have saved
    - `num_turns`: how many turns it rests on
    - `turns`: some of these turns
    - `earlier`: the turns that `turns` were compared with
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
    """Prefixes (tools and system blocks) that would be one prefix after a normalisation.

    They are of one workspace's turns with one model, with all keys of the workspace. What one
    prefix would have saved is computed as for markers.

    - `kind`, `path`: of the prefixes' first difference
    - `is_compared`: whether stored prompts told what differs; else digests and times told it
    - `by_key`: what the turns of each key would have saved
    """

    workspace: str
    model: str
    num_prefixes: int
    is_compared: bool
    by_key: dict[str, Amount] = {}


class Prewarm(msgspec.Struct, frozen=True, kw_only=True):
    """Whether it pays to send the shared prefix ahead, in a request with `max_tokens: 0`.

    - `num_races`: the turns that wrote what another turn was still writing
    - `saves`: what such requests before these turns would have saved, beyond what the best markers
      save and less their own cost
    - `markers`: the markers that a pre-warm needs; empty if the sent markers suffice
    """

    pays: bool
    num_races: int
    saves: Amount
    text: str
    markers: list[Marker] = []


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The `auto_cache` of a key that has the effect of the advised markers, without any marker."""

    auto_cache: AutoCacheMode
    auto_cache_ttl: Ttl | None


class StreamAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice for the turns of one key with one model.

    The verdict is the step that saves most. `fix` is to make the change that the field `fix` names.
    `prewarm` is to send the prefix ahead. `mark` and `unmark` change markers. `leave` changes
    nothing.

    - `shared_end`: the block where the stable prefix ends
    - `shared_tokens`: the tokens of the stable prefix, on average
    - `markers`: the markers that are advised
    - `saves`: what the verdict would have saved over these turns; no finding would have saved more;
      0 with `leave`
    - `next_best`: with `leave`, how much more the best other markers would have cost
    - `lost`: what the turns lost against a cache that loses nothing
    - `policy`: the key's policy that does the same as `markers`; null if no policy does
    - `turns`: some of these turns
    - `fix`: the first of the `findings`, or a near-duplicate if `is_near`
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

    - `marker`: the TTL of the marker on the block; null if it has none
    """

    path: str
    tokens: int
    marker: str | None


class RequestAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice for one pasted request.

    - `tokens`: the request's tokens, estimated from bytes
    - `blocks`: the first 200 blocks
    - `marked`: the request with the markers in place; null if nothing is to be marked, or if the
      dialect has no markers, where a policy of the key does the same
    - `body`: the request's body, as it was read from the pasted text
    - `as_messages`: the same request as a body of the Messages API; null if the request has more
      than texts and tools
    - `num_images`: how many images the request has; only a model listed with `sees` is shown them
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
    """Advice for the turns of a range, or for requests that were sent to be judged.

    - `text`: a sentence on what was looked at
    - `num_without_sketch`: how many turns were left out because an earlier version recorded them
    - `is_cut`: whether the range has more turns, older than those that were looked at
    - `streams`: the turns by key and model, those with the most tokens first, 50 at most
    - `requests`: advice for each request that was sent; two or more requests are also compared, as
      one stream
    - `saves`: the sum of the `saves` of all streams
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
    """One sentence with its amount, and the turns that it rests on.

    - `page`: the dashboard's page that shows the same
    - `workspace`, `model`: the filters of that page; null filters nothing
    - `multiples`: what the change is worth, in input tokens
    - `nano`: the same in nano-dollars; null if a turn has no price
    - `num_turns`: how many turns it rests on
    - `turns`: some of these turns
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
    """The changes that are worth most, six at most, one line each.

    The lines come from the newest 20,000 turns of the seven days before `until_ms`, from the
    workspaces' sums, and from the 100 most used prefixes. A workspace with fewer than 20 requests
    gives no line, and neither does a group of key and model. An answer is reused for ten minutes.

    - `num_turns`: how many turns were looked at
    - `num_judged`: how many of these are in groups with enough requests to give a line
    - `is_cut`: whether the seven days have more turns
    - `num_more`: how many lines were left out
    """

    text: str
    since_ms: int
    until_ms: int
    num_turns: int
    num_judged: int
    is_cut: bool
    lines: list[SummaryLine]
    num_more: int
