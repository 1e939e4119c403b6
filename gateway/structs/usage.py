"""Usage, savings, latency, prefixes and turns, as the admin API answers with them.

Money is in nano-dollars. A moment is in milliseconds since 1970, and a duration is in seconds,
unless the field's name ends in another unit.

OpenAPI shows the docstrings of these structs. So each docstring describes the struct's fields, one
line a field.
"""

from typing import Any

import msgspec

from engine.protocol import CacheUsage, InputUsage
from gateway.structs.misses import DivergenceKind, Section

NOT_DELIVERED = "not delivered"
"""The `price` of a turn whose answer the client did not get. Such a turn costs nothing. Its tokens
and times count, because the engine did the work. Sums by price keep these turns apart."""


def is_error(outcome: str) -> bool:
    """Whether a turn failed: its outcome is the type of an error."""
    return outcome.endswith("error")


# Counts of turns by reason or by outcome need no measure: `Usage` has `miss_reasons` and
# `outcomes`.
# A new measure of these sums changes these places:
# - its expression over turns, in `ledger/rollups.py` (`measures`);
# - its column in `ledger/schema.py` (`TurnRollupRow`), and REVISION there;
# - a revision in `migrations/versions`, which adds the column and fills it from the stored turns;
# - its field here;
# - its reference in `tests/gateway/ledger/test_sums.py`;
# - where it has a tile: its line in `admin/meanings.toml`, the tile in `dashboard/views`, and the
#   tile's row in `tests/dashboard/test_figures_add_up.py`.
# A measure over a new fact of turns also needs a field for that fact in `TurnRecord` and `TurnRow`.
# Drains, rebuilds, reads, exports and the API follow from these places. A Prometheus counter of
# turns is another thing: `Metrics.count_turn` counts it.
class Totals(InputUsage, kw_only=True):
    """Sums over turns.

    - `errors`: turns whose outcome is an error
    - `unpriced`: turns without a price; no sum of money has their cost
    - `automatic_input_tokens`: the part of `input_tokens` that was reused from memory
    - `cost_without_cache_nano`: what the same tokens would have cost without a cache
    - `prefill_tokens`: the tokens that turns with a timed prefill computed
    - `prefill_us`: how long these turns' prefills took, in microseconds
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
        """Whether any turn has a price. If none has, money is unknown, which is not 0."""
        return self.requests > self.unpriced

    @property
    def computed_input_tokens(self) -> int:
        """The input tokens that were not reused from memory."""
        return self.input_tokens - self.automatic_input_tokens

    @property
    def saved_nano(self) -> int:
        """What the cache saved: the cost without a cache, less the cost."""
        return self.cost_without_cache_nano - self.cost_nano


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one interval.

    - `is_partial`: the range cuts the interval, so these are sums of a part of it
    """

    start_ms: int
    is_partial: bool
    totals: Totals
    saved_nano: int


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Shares from 0 to 1. A share is null if there is nothing to divide by.

    - `token_hit_rate`: tokens that were read, of all prompt tokens
    - `cacheable_hit_rate`: tokens that were read, of those that were read or written
    - `request_hit_rate`: requests with a read, of all requests
    """

    token_hit_rate: float | None
    cacheable_hit_rate: float | None
    request_hit_rate: float | None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of a range, of its intervals, and of the period before it, which is as long.

    - `totals`, `rates`, `saved_nano`: of the range
    - `before`, `rates_before`, `saved_nano_before`: of the period before it
    - `miss_reasons`: why requests read nothing, with the number of requests
    - `part_reasons`: why requests read less than what they marked, with the number of requests
    - `mixed_reasons`: both together; sums of earlier versions did not keep the two apart, and their
      turns are deleted
    - `mark_reasons`: why markers were not read in full, with the number of markers; turns count
      here only if their engine reported each marker
    - `outcomes`: how turns ended, with the number of turns
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
    """The sums of the turns with these values. A dimension that nobody asked for is null."""

    workspace: str | None
    key: str | None
    engine: str | None
    model: str | None
    totals: Totals
    rates: HitRates
    saved_nano: int


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """From the cost without a cache to the actual cost, at the gateway's own prices.

    counterfactual + write premium − read discount = actual. These are sums over the delivered turns
    whose price is still in the price file.

    - `undelivered`: requests whose client got an error in place of an answer; they cost nothing
    - `unexplained`: requests without a price, or whose price is no longer in the file
    """

    counterfactual_nano: int
    write_premium_nano: int
    read_discount_nano: int
    actual_nano: int
    saved_nano: int
    undelivered: int
    unexplained: int


class HostedCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the same tokens would cost at a published price. Nobody pays this cost here.

    - `price`: the price's id
    - `source`, `as_of`: where the price was published, and the day of the price list
    - `nano_without_cache`: the cost there without caching
    """

    model: str
    price: str
    source: str | None
    as_of: str | None
    nano: int
    nano_without_cache: int


class Avoided(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill that reads avoided, on one engine for one model.

    - `prefill_tokens`: the tokens that were read
    - `seconds_per_token`: the marginal time of a token, fitted over all steps that the engine has
      reported; null if the steps were too few
    - `prefill_seconds`: the time of these tokens; null if `seconds_per_token` is
    - `gpu_hours`: the same time in hours, where the engine counts as one GPU; null also if the
      engine does not say that it computes on a GPU
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
    - `hosted`: what this traffic would have cost at published prices
    - `prefill_tokens_avoided`: the tokens that were read, on all engines
    - `prefill_seconds_avoided`: their time on the engines whose time of a token is known; null if
      it is known of none
    - `gpu_hours_avoided`: the part of that time on GPUs, in hours; null if no such engine says that
      it computes on a GPU
    - `unmeasured_tokens`: the tokens read on engines whose time of a token is not known
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
    """What the last request of a prefix tells about the prefix.

    - `last_turn`, `last_ms`: the request's id, and when it came
    - `tokens`: the marked tokens of the request
    - `ttl`: the TTL of the request's marker
    - `name`: the name that the client gave the request in its metadata; an entry's name is another
      thing: a digest
    - `num_tools`, `num_system`, `num_messages`: how many blocks of each section the prefix has;
      null if the request's fingerprint does not tell
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
"""The TTLs of the hosted Messages API. For each of them the ledger counts the gaps between a
prefix's requests. Another TTL needs a column of gaps (`PrefixRow`), its count
(`rollups.gap_changes`) and its cost (`PrefixReport`)."""


class PrefixReport(CacheUsage, kw_only=True):
    """One prefix over its whole life in the ledger, with the requests of all models.

    - `model`, `ttl`: those of the prefix's last request, if the ledger still has that request
    - `models`: the prefix's one model, or two of its several models; no TTL is judged of several
      models, because each holds the prefix for itself and the gaps are between requests of all
    - `saved_nano`: what reads saved, less the write premium; null if a turn had no price
    - `is_paid_back`: whether `saved_nano` is positive
    - `gaps_5m`: the turns that came at most 5 minutes after the turn before them
    - `gaps_1h`: the turns that came later than that, but within an hour
    - `nano_with_5m`, `nano_with_1h`: what its marked tokens cost with each TTL, given these gaps
    - `better_ttl`: the cheaper TTL; null if the gaps can't judge the prefix's own TTL
    - `better_ttl_saves_nano`: what the better TTL would have saved; 0 if the prefix has that TTL
    - `reads_to_pay_back`: the fewest reads whose discount exceeds the premium of one write
    - `look`: null if the prefix's turns are deleted
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

    - `block`: the marked block's number in its section, from 0
    - `tokens`: the prompt's tokens up to the marker; null if no token boundary is there
    - `missed`: why these tokens were not read in full; null if they were
    """

    section: Section
    block: int
    tokens: int | None
    ttl: str
    missed: str | None


class Turn(InputUsage, kw_only=True):
    """One turn.

    - `miss_reason`: why the last marker was not read; null if it was read, or if the prompt only
      grew
    - `num_removed`: how many known client nonces were kept out of the prompt
    - `price`: the price sheet's id; `not delivered` if the client got an error in place of an
      answer
    - `available_tokens`: the prompt's tokens that some engine held
    - `captured_tokens`: the prompt's tokens that the chosen engine held
    - `saved_nano`: null if the model has no price
    - `marks`: null in turns of earlier versions, and if the engine did not report each marker
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
        """The input tokens that were reused from memory without a promise."""
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
    KEPT: "They were kept. They are on their way to the database, or are already deleted.",
    TOO_LARGE: "They were not kept: together they were too long.",
    NO_ROOM: "They were not kept: too much waited for the database.",
    UNFINISHED: "The turn was cut off. What it had was deleted, or was lost with its gateway.",
    NOT_BEGUN: "They were not kept: the answer never began.",
}
"""What can become of a turn's prompt and answer if its workspace keeps contents. A page says the
sentence where it has no prompt and answer to show."""


class AnswerPart(msgspec.Struct, kw_only=True):
    """A part of one choice of an answer.

    - `choice`: the choice's number, from 0
    - `kind`: a text, a thought or a call
    - `text`: the text; for a call, its input
    - `name`: for a call, the tool's name; else null
    """

    choice: int
    kind: str
    text: str
    name: str | None


class KeptContent(msgspec.Struct, frozen=True, kw_only=True):
    """The stored prompt and answer of a turn.

    - `prompt`: what the engine got: tools, system blocks and messages, in the form of no dialect
    """

    prompt: Any
    answer: list[AnswerPart]


class TurnContent(KeptContent, frozen=True, kw_only=True):
    """The stored prompt and answer of a turn.

    - `until_ms`: when they are deleted; they are deleted earlier if the workspace is later set to
      store contents for fewer days
    """

    turn: str
    until_ms: int


class TurnBeginning(msgspec.Struct, frozen=True, kw_only=True):
    """The first words of a kept prompt, 80 characters at most.

    - `text`: the beginning of the first system block, or of the first text if there is no system
      block; each stretch of white space is one space
    """

    turn: str
    text: str


class TurnPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of turns.

    - `next`: the cursor of the next page; null on the last page
    - `num_searched`: how many turns the search looked at before it stopped, with more turns
      perhaps behind them; null if the search did not stop
    """

    turns: list[Turn]
    next: str | None
    num_searched: int | None = None


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One error answer.

    - `workspace`, `key`: null if the request had no valid key
    - `limit`: the limit of the workspace that refused the request; null if none did
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
    """How many requests of one key were refused for one reason in one minute.

    They were refused before they were turns.

    - `minute_ms`: when the minute began
    - `workspace`, `key`: null if the requests had no valid key
    """

    minute_ms: int
    workspace: str | None
    key: str | None
    reason: str
    requests: int


class RefusalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Refused requests.

    - `requests`: how many requests were refused in all
    - `counts`: the newest refusals, by minute, key and reason
    """

    requests: int
    counts: list[RefusalCount]


class Limited(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of one key one limit of its workspace refused.

    - `last_ms`: when the limit last refused one
    """

    workspace: str
    key: str
    limit: str
    requests: int
    last_ms: int


class TurnDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a turn's prompt first differs from an earlier one's.

    Without `from` the earlier turn is one of the workspace's 200 turns before. It is the turn that
    shares the longest prefix. If none shares a prefix, it is the latest turn with as many tools,
    and with as many system blocks of the same length.

    The place is exact if the workspace stores the contents of both turns. Else the place is known
    by the names of prefixes. A prefix has a name where a block ends and at each multiple of
    `grid_characters` within a block. Of a long prompt only some names are stored.

    - `earlier`: null if there is no such turn
    - `kind`: null if the prompt only grew
    - `segment`: the block that differs, by its number among all blocks of the earlier prompt, from
      0; tools come first, then system blocks, then the messages' blocks
    - `section`, `block`: the same block, by its section and its number there, from 0
    - `missed_tokens`: the earlier prompt's tokens from that place on, estimated by bytes
    - `missed_nano`: what reading these tokens would have saved; null without a price, or if the
      prompts share no prefix
    - `shared_tokens`: the tokens with which both prompts begin; if the place is not exact, the
      fewest that it can be
    - `is_exact`: whether the place is exact
    - `grid_characters`: the distance between names within a block, in characters
    - `characters`: the characters of the block's text that are equal; if the place is not exact,
      the fewest that it can be
    - `characters_below`, `shared_tokens_below`: the difference stands before these places; null if
      nothing bounds it
    - `earlier_tokens`: the tokens of the earlier prompt
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
    """Percentiles of the time to the first token, in seconds.

    They come from a histogram: each is known to within 1 % of itself. They are null without a turn.
    """

    requests: int
    p50: float | None
    p95: float | None
    p99: float | None


class LatencyCell(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of one model and one prompt length, either those with a read or those without.

    - `above_tokens`, `up_to_tokens`: the prompts have more tokens than the first, and not more than
      the second; the second is null if the length has no upper bound
    - `is_hit`: whether these are the turns with a read
    """

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

    - `hits`, `misses`: of turns with a read, and of turns without
    - `bucket_seconds`: the width of the series' intervals: a minute to an hour in ranges of up to
      two days, a day in longer ranges
    - `mixed`: the models that engines of several kinds answered for; of such a model, the turns
      with a read and those without may be of different engines
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
      null if the engine reported no times
    - `available_tokens`: the prompt's tokens that some engine held
    - `captured_tokens`: the prompt's tokens that the chosen engine held
    - `delivered_tokens`: the prompt's tokens that were reused
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
        """The key to sort samples by. The first samples in this order are a random smaller sample,
        because the end of an id is random."""
        return self.id[30:], self.id[26:30], self.id


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """The time that gateway and network added before first tokens, in seconds.

    It is of the sampled turns of one interval. An interval is a 40th of the range long, and begins
    at a multiple of its length since 1970.
    """

    start_ms: int
    turns: int
    p50: float
    p95: float


class LatencySamples(msgspec.Struct, frozen=True, kw_only=True):
    """The answered turns of the range, or a sample of them.

    The turns' ids decide which turns are in the sample, so it is the same each time.

    - `num_turns`: how many turns the range has, answered or not
    - `is_whole`: whether `samples` has all answered turns
    - `overhead`: the overhead over time
    - `overhead_p50`, `overhead_p95`: the overhead of all `samples`, in seconds
    """

    since_ms: int
    until_ms: int
    num_turns: int
    is_whole: bool
    samples: list[Sample]
    overhead: list[Overhead]
    overhead_p50: float | None
    overhead_p95: float | None
