"""Usage, savings, latency, prefixes and turns, as the admin API answers with them.

Tokens are counts, money is nano-dollars, times are milliseconds since 1970 or seconds.

OpenAPI shows the docstrings of these structs, so they tell the fields, a line each.
"""

from typing import Any

import msgspec

from engine.protocol import CacheUsage, InputUsage
from gateway.structs.misses import DivergenceKind, Section

NOT_DELIVERED = "not delivered"
"""The `price` of a turn whose answer the client did not get. It costs nothing. Its tokens and times
are the engine's work, which sums by price tell apart."""


def is_error(outcome: str) -> bool:
    """Whether a turn failed: its outcome is the type of an error."""
    return outcome.endswith("error")


# What a new measure of these sums must touch:
# - its expression over turns, in `ledger/rollups.py` (`measures`);
# - its column in `ledger/schema.py` (`TurnRollupRow`), and REVISION there, with a revision in
#   `migrations/versions` that fills the sums of before from their turns;
# - its field here;
# - its reference in `tests/gateway/ledger/test_sums.py`;
# - where it has a tile: its line in `admin/meanings.toml`, the tile in `dashboard/views`, and the
#   tile's row in `tests/dashboard/test_figures_add_up.py`.
# A measure over a new fact of turns needs that too: a field of `TurnRecord`, and of `TurnRow`.
# Drains, rebuilds, reads, exports and the API follow these. A Prometheus counter of turns is apart
# from these: it counts in `Metrics.count_turn`.
class Totals(InputUsage, kw_only=True):
    """Sums over turns.

    - `automatic_input_tokens`: those of `input_tokens` that were reused from memory
    - `unpriced`: turns without a price; their cost is in no sum of money
    - `cost_without_cache_nano`: the cost of the same tokens without a cache
    - `prefill_tokens`: computed in `prefill_us` microseconds, by turns whose prefill was timed
    """

    requests: int = 0
    requests_with_read: int = 0
    errors: int = 0
    unpriced: int = 0
    automatic_input_tokens: int = 0
    output_tokens: int = 0
    cost_nano: int = 0
    thinking_tokens: int = 0
    cost_without_cache_nano: int = 0
    prefill_tokens: int = 0
    prefill_us: int = 0

    @property
    def is_priced(self) -> bool:
        """Whether any turn has a price: without one, money is unknown and not 0."""
        return self.requests > self.unpriced

    @property
    def computed_input_tokens(self) -> int:
        """The input tokens that were not reused from memory."""
        return self.input_tokens - self.automatic_input_tokens

    @property
    def saved_nano(self) -> int:
        """The cost of the same tokens without a cache, less their cost."""
        return self.cost_without_cache_nano - self.cost_nano


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """One interval.

    - `is_partial`: the range has only a part of it
    """

    start_ms: int
    is_partial: bool
    totals: Totals
    saved_nano: int


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Null where there is nothing to divide by."""

    token_hit_rate: float | None
    cacheable_hit_rate: float | None
    request_hit_rate: float | None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A range, the period of the same length before it, and its intervals.

    - `miss_reasons`: of requests without a read
    - `part_reasons`: of requests that read less than what they marked
    - `mixed_reasons`: of both together, where turns were deleted whose sums did not tell them apart
    - `mark_reasons`: of markers that were not read; engines must report each marker
    """

    since_ms: int
    until_ms: int
    bucket_seconds: int
    totals: Totals
    rates: HitRates
    saved_nano: int
    before: Totals
    rates_before: HitRates
    saved_nano_before: int
    series: list[Bucket]
    miss_reasons: dict[str, int]
    part_reasons: dict[str, int]
    mixed_reasons: dict[str, int]
    mark_reasons: dict[str, int]
    outcomes: dict[str, int]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of turns with these values. A dimension that was not asked for is None."""

    workspace: str | None
    key: str | None
    engine: str | None
    model: str | None
    totals: Totals
    rates: HitRates
    saved_nano: int


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """counterfactual + write premium − read discount = actual, in nano-dollars of own prices, over
    the turns whose price is still in the file.

    - `undelivered`: requests whose client got an error in place of an answer: they cost nothing
    - `unexplained`: requests whose price is no longer in the file
    """

    counterfactual_nano: int
    write_premium_nano: int
    read_discount_nano: int
    actual_nano: int
    saved_nano: int
    undelivered: int
    unexplained: int


class HostedCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of the same tokens at a published price. It is not the cost here."""

    model: str
    price: str
    source: str | None
    as_of: str | None
    nano: int
    nano_without_cache: int


class Avoided(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill that reads avoided, on one engine for one model.

    - `prefill_tokens`: tokens that were read
    - `seconds_per_token`: the marginal time of a token, by a fit over all steps that the engine has
      reported; this and the times are null where these were too few
    - `gpu_hours`: the engine counts as one GPU; null where it does not say that it computes on one
    """

    engine: str | None
    model: str
    prefill_tokens: int
    seconds_per_token: float | None
    prefill_seconds: float | None
    gpu_hours: float | None


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    """What caching saved.

    - `own`: what this traffic cost and saved here
    - `hosted`: what it would have cost there
    - `prefill_seconds_avoided`: of the engines whose time of a token is known; null where there is
      none
    - `gpu_hours_avoided`: of those among them that compute on a GPU; null where there is none
    - `unmeasured_tokens`: read on engines whose time of a token is not known
    """

    since_ms: int
    until_ms: int
    own: Waterfall
    hosted: list[HostedCost]
    avoided: list[Avoided]
    prefill_tokens_avoided: int
    prefill_seconds_avoided: float | None
    gpu_hours_avoided: float | None
    unmeasured_tokens: int


class PrefixLook(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix by its last request.

    - `tokens`: the marked tokens of that request
    - `ttl`: what its marker asked for
    - `name`: what the client called the request in its metadata; no digest, as an entry's is
    - `num_tools`, `num_system`, `num_messages`: the blocks up to the prefix's end; null where the
      request's fingerprint does not have that place
    - `content`: what became of the request's prompt and answer (`KEPT_CONTENTS`)
    """

    last_turn: str
    last_ms: int
    model: str
    tokens: int
    ttl: str | None
    user_agent: str | None
    name: str | None
    num_tools: int | None
    num_system: int | None
    num_messages: int | None
    content: str | None = None


JUDGED_TTLS = ("5m", "1h")
"""Those of the hosted Messages API. Only their gaps are counted by prefix: a further one needs a
column of gaps (`PrefixRow`), its count (`rollups.gap_changes`) and its cost (`PrefixReport`)."""


class PrefixReport(CacheUsage, kw_only=True):
    """One prefix over its whole life in the ledger, of all models.

    - `model`, `ttl`: those of its last request, where that is still there
    - `models`: its one model, or two of several. Of several no TTL is judged: each model holds the
      prefix for itself, and the gaps are those between requests of all
    - `saved_nano`: net of the write premium; null if a turn had no price
    - `is_paid_back`: whether `saved_nano` is positive
    - `gaps_5m`, `gaps_1h`: turns that came at most 5 minutes after the one before, and later but
      within an hour
    - `nano_with_5m`, `nano_with_1h`: the costs of its marked tokens with each TTL, given those gaps
    - `better_ttl`: the cheaper one; null where the prefix's own TTL can't be judged by the gaps
    - `better_ttl_saves_nano`: what the better TTL would have saved; 0 where the prefix has it
    - `reads_to_pay_back`: the fewest reads whose discount exceeds the premium of one write
    - `look`: null where its turns are deleted
    """

    workspace: str
    prefix: str
    model: str
    models: list[str]
    ttl: str | None
    first_ms: int
    last_ms: int
    requests: int
    requests_with_read: int
    saved_nano: int | None
    is_paid_back: bool | None
    gaps_5m: int
    gaps_1h: int
    nano_with_5m: int | None
    nano_with_1h: int | None
    better_ttl: str | None
    better_ttl_saves_nano: int | None
    reads_to_pay_back: int | None
    look: PrefixLook | None


class TurnMark(msgspec.Struct, frozen=True, kw_only=True):
    """One marker of a turn.

    - `block`: of the section, counted from 0
    - `tokens`: of the prompt up to the marker; null without a boundary
    - `missed`: why they were not read in full; null where they were
    """

    section: Section
    block: int
    tokens: int | None
    ttl: str
    missed: str | None


class Turn(InputUsage, kw_only=True):
    """One turn.

    - `miss_reason`: that of the last marker; null where it was read, or where the prompt merely
      grew
    - `price`: the price sheet's id; `not delivered` where the client got an error in place of an
      answer
    - `saved_nano`: null where the model has no price
    - `marks`: null in turns of earlier versions, and where the engine did not report each marker
    """

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
    num_removed: int
    output_tokens: int
    thinking_tokens: int
    first_token_seconds: float | None
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    available_tokens: int | None
    captured_tokens: int | None
    duration_seconds: float | None
    prefix: str | None
    prefix_ttl: str | None
    price: str | None
    cost_nano: int | None
    saved_nano: int | None
    http_request_id: str | None
    user_agent: str | None
    name: str | None
    status: int | None
    error: str | None
    approximate: str | None
    content: str | None = None
    marks: list[TurnMark] | None = None

    @property
    def automatic_input_tokens(self) -> int:
        """The input tokens that were reused from memory all the same."""
        return min(max(self.automatic_tokens - self.written_tokens, 0), self.input_tokens)

    @property
    def computed_input_tokens(self) -> int:
        return self.input_tokens - self.automatic_input_tokens


KEPT = "kept"
TOO_LARGE = "too_large"
NO_ROOM = "no_room"
UNFINISHED = "unfinished"
NOT_BEGUN = "not_begun"
KEPT_CONTENTS = {
    KEPT: "They were kept, and are on their way to the database or deleted.",
    TOO_LARGE: "They were not kept: together they were too long.",
    NO_ROOM: "They were not kept: too much waited for the database.",
    UNFINISHED: "The turn was cut off: what it had is deleted, or was lost with its gateway.",
    NOT_BEGUN: "They were not kept: the answer never began.",
}
"""What becomes of a turn's prompt and answer where its workspace keeps them, and what is said of it
where there are none."""


class AnswerPart(msgspec.Struct, kw_only=True):
    """A part of one choice.

    - `kind`: a text, a thought or a call
    - `text`: of a call its input
    - `name`: of a call its tool
    """

    choice: int
    kind: str
    text: str
    name: str | None


class KeptContent(msgspec.Struct, frozen=True, kw_only=True):
    """The stored prompt and answer of a turn.

    - `prompt`: what the engine got, in no dialect: tools, system blocks and messages
    """

    prompt: Any
    answer: list[AnswerPart]


class TurnContent(KeptContent, frozen=True, kw_only=True):
    """The stored prompt and answer of a turn.

    - `until_ms`: when they are deleted; earlier where the workspace then stores them for fewer days
    """

    turn: str
    until_ms: int


class TurnBeginning(msgspec.Struct, frozen=True, kw_only=True):
    """The first words of a kept prompt, 80 characters at most: those of its first system block, or
    else of its first text. White space is one space."""

    turn: str
    text: str


class TurnPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of turns.

    - `next`: the cursor of the following page; null on the last page
    - `num_searched`: the page ends behind so many turns, because its filters must look at each;
      there may be more
    """

    turns: list[Turn]
    next: str | None
    num_searched: int | None = None


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One error answer.

    - `workspace`, `key`: null where the request had no valid key
    - `limit`: the workspace's limit that refused it
    """

    at_ms: int
    request_id: str
    workspace: str | None
    key: str | None
    limit: str | None
    status: int
    type: str
    message: str
    path: str
    user_agent: str | None


class RefusalCount(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one key that were refused for one reason in one minute, before they were
    turns.

    - `minute_ms`: when the minute began
    - `workspace`, `key`: null where they had no valid key
    """

    minute_ms: int
    workspace: str | None
    key: str | None
    reason: str
    requests: int


class RefusalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Refused requests.

    - `requests`: how many there were
    - `counts`: the newest of them
    """

    requests: int
    counts: list[RefusalCount]


class Limited(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one key that one limit of its workspace refused."""

    workspace: str
    key: str
    limit: str
    requests: int
    last_ms: int


class TurnDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a turn's prompt first differs from an earlier one's.

    Without `from` the earlier turn is one of the workspace's 200 turns before: the one that shares
    the longest prefix, or else the latest with as many tools and system blocks of the same length.

    Where the workspace stores the contents of both, the place is exact. Else it is known by names.
    These stand at the ends of blocks and at multiples of `grid_characters` within them, and a long
    prompt stores only some.

    - `earlier`: null where there is no such turn
    - `kind`: null where the prompt only grew
    - `segment`: counts the earlier prompt's tools, system and message blocks from 0
    - `section`, `block`: the same place within one of these
    - `missed_tokens`: the earlier prompt's tokens from there on, estimated by bytes
    - `missed_nano`: what reading them would have saved; null without a price, or where the prompts
      share no prefix
    - `shared_tokens`: both prompts begin with so many; the least where the place is not exact
    - `is_exact`: the first `characters` of the block's text are equal, and the next one is not
    - `characters`: the least where the place is not exact
    - `characters_below`, `shared_tokens_below`: the difference stands before these; null where
      nothing bounds it
    """

    turn: str
    earlier: str | None = None
    kind: DivergenceKind | None = None
    segment: int | None = None
    missed_tokens: int | None = None
    section: Section | None = None
    block: int | None = None
    characters: int | None = None
    missed_nano: int | None = None
    shared_tokens: int | None = None
    is_exact: bool = False
    grid_characters: int | None = None
    characters_below: int | None = None
    shared_tokens_below: int | None = None
    earlier_tokens: int | None = None


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token, from a histogram. Each is known to within 1 % of itself."""

    requests: int
    p50: float | None
    p95: float | None
    p99: float | None


class LatencyCell(msgspec.Struct, frozen=True, kw_only=True):
    """Turns of a model with a prompt length in (`above_tokens`, `up_to_tokens`], with or without a
    read."""

    model: str
    above_tokens: int
    up_to_tokens: int | None
    is_hit: bool
    seconds: Percentiles


class LatencyPoint(msgspec.Struct, frozen=True, kw_only=True):
    start_ms: int
    hits: Percentiles
    misses: Percentiles


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Times to the first token.

    - `bucket_seconds`: the width of the series' intervals: a minute to an hour in ranges of up to
      two days, a day in longer ones
    - `mixed`: models whose turns were answered by engines of several kinds: turns with a read and
      without one may be of different engines
    """

    hits: Percentiles
    misses: Percentiles
    cells: list[LatencyCell]
    bucket_seconds: int
    series: list[LatencyPoint]
    mixed: list[str] = []


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One turn whose answer began.

    - `overhead_seconds`: the time that gateway and network added to the engine's queue and prefill;
      null where the engine reported no times
    """

    id: str
    opened_ms: int
    engine: str | None
    prompt_tokens: int
    cache_read_tokens: int
    first_token_seconds: float
    overhead_seconds: float | None
    available_tokens: int | None
    captured_tokens: int | None
    delivered_tokens: int

    @property
    def order(self) -> tuple[str, str, str]:
        """By this order the first of a sample are a smaller sample: the end of an id is random."""
        return self.id[30:], self.id[26:30], self.id


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that gateway and wire added before first tokens, of the sampled turns of one
    interval; intervals are a 40th of the range long and aligned to the epoch."""

    start_ms: int
    turns: int
    p50: float
    p95: float


class LatencySamples(msgspec.Struct, frozen=True, kw_only=True):
    """Answered turns of the range: all, or a sample that the turns' ids decide, so that it is the
    same each time.

    - `is_whole`: whether all are there
    - `num_turns`: all turns of the range
    - `overhead_p50`, `overhead_p95`: seconds, of all `samples`
    """

    since_ms: int
    until_ms: int
    num_turns: int
    is_whole: bool
    samples: list[Sample]
    overhead: list[Overhead]
    overhead_p50: float | None
    overhead_p95: float | None
