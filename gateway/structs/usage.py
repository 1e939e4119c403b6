"""Usage, savings, latency, prefixes and turns, as the admin API answers with them.

Tokens are counts, money is nano-dollars, times are milliseconds since 1970 or seconds.
"""

from typing import Any, Literal

import msgspec

from engine.protocol import CacheUsage, InputUsage

NOT_DELIVERED = "not delivered"
"""The `price` of a turn whose answer the client did not get. It costs nothing. Its tokens and times
are the engine's work, which sums by price tell apart."""


class Totals(InputUsage, kw_only=True):
    """Sums over turns. `saved_nano` = without cache − actual; `unpriced` turns are in neither.
    `automatic_input_tokens` are those of `input_tokens` that were reused from memory all the same.
    `prefill_tokens` were computed in `prefill_us` microseconds, by turns whose prefill was
    timed."""

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
    """One interval, from `start_ms` on. `is_partial`: the interval is not over."""

    start_ms: int
    is_partial: bool
    totals: Totals
    saved_nano: int


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """None where there is nothing to divide by."""

    token_hit_rate: float | None
    cacheable_hit_rate: float | None
    request_hit_rate: float | None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A range, the period of the same length before it, and its intervals. `miss_reasons` are of
    requests without a read, `part_reasons` of those that read less than what they marked.
    `mixed_reasons` are of both, where turns are gone that were summed before the two were told
    apart. `mark_reasons` are of markers: their sum is the number of markers that were not read, of
    turns whose engines told of each."""

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
    """counterfactual + write_premium − read_discount = actual, in nano-dollars of own prices. It
    contains the turns whose price is still in the file. `undelivered` counts requests whose client
    got an error in place of an answer: they cost nothing. `unexplained` counts the others."""

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
    """Prefill that reads avoided, on one engine for one model: `prefill_tokens` were read, and
    `seconds_per_token` is the marginal time of a token, by a fit over all steps that the engine has
    told of. It and the time are None where too little was seen. `gpu_hours` counts the engine as
    one GPU; None where it does not say that it computes on one."""

    engine: str | None
    model: str
    prefill_tokens: int
    seconds_per_token: float | None
    prefill_seconds: float | None
    gpu_hours: float | None


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    """`own` is what this traffic cost and saved here. `hosted` is what it would have cost there.
    `prefill_seconds_avoided` adds up the engines whose time of a token is known, and
    `gpu_hours_avoided` those of them that compute on a GPU; None where there is none.
    `unmeasured_tokens` were read on engines whose time of a token is not known."""

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
    """A prefix by its last request. `num_tools`, `num_system` and `num_messages` count the blocks
    up to its end; None where the request's fingerprint does not have that place. `tokens` are the
    marked ones of that request, `ttl` is what its marker asked for. `name` is what the client
    called the request in its metadata. `content` is what became of that request's prompt and answer
    (`KEPT_CONTENTS`)."""

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
"""Those that a client of Messages chooses between. Only their gaps are counted by prefix."""


class PrefixReport(CacheUsage, kw_only=True):
    """One prefix over its whole life in the ledger, of all models. `model` and `ttl` are those of
    its last request, where that is there. `models` names two of its models where it has several,
    else the one: then no TTL is judged, since each model holds the prefix for itself and the gaps
    are those between requests of all. `saved_nano` is net of the write premium, None if a turn had
    no price; `is_paid_back`: it is positive. `gaps_5m` of its turns came at most 5 minutes after
    the one before, `gaps_1h` later but within an hour; `nano_with_5m` and `nano_with_1h` are the
    costs of its marked tokens with each TTL, given those gaps. `better_ttl` is the cheaper one, and
    `better_ttl_saves_nano` what it would have saved, 0 if the prefix has it already; both are None
    for a TTL that the gaps do not judge. `reads_to_pay_back` is the fewest reads whose discount
    exceeds the premium of one write. `look` is None where its turns are gone."""

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


Section = Literal["tools", "system", "messages"]


class TurnMark(msgspec.Struct, frozen=True, kw_only=True):
    """One marker of a turn, on a `block` of a section, counted from 0. `tokens` stand up to it;
    None without a boundary. `missed` is why they were not read in full; None where they were."""

    section: Section
    block: int
    tokens: int | None
    ttl: str
    missed: str | None


class Turn(InputUsage, kw_only=True):
    """One row of the turns table. `saved_nano` is None where the model has no price. `price` is
    `not delivered` where the client got an error in place of an answer. `miss_reason` is that of
    the last marker; None where that was read, or where the prompt merely grew. `marks` are None in
    turns of earlier versions, and of engines that do not tell of each marker."""

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
    """A text, a thought or a call (`name` is its tool's, `text` its input) of one choice."""

    choice: int
    kind: str
    text: str
    name: str | None


class KeptContent(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt` is what the engine got: tools, system blocks and messages, whatever the dialect."""

    prompt: Any
    answer: list[AnswerPart]


class TurnContent(KeptContent, frozen=True, kw_only=True):
    """It is deleted at `until_ms`, or earlier where its workspace keeps for fewer days then."""

    turn: str
    until_ms: int


class TurnBeginning(msgspec.Struct, frozen=True, kw_only=True):
    """The first words of a kept prompt, 80 characters at most: those of its first system block, or
    else of its first text. White space is one space."""

    turn: str
    text: str


class TurnPage(msgspec.Struct, frozen=True, kw_only=True):
    """`next` is the cursor of the following page; None on the last page. `num_searched`: the page
    ends behind so many turns, since its filters have to look at each. There may be more."""

    turns: list[Turn]
    next: str | None
    num_searched: int | None = None


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One error answer. `workspace` and `key` are None where the request had no valid key. `limit`
    is the one of the workspace that refused it."""

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
    """The requests of one key that were refused for one reason in the minute that begins at
    `minute_ms`, before they were turns. `workspace` and `key` are None where they had no valid
    key."""

    minute_ms: int
    workspace: str | None
    key: str | None
    reason: str
    requests: int


class RefusalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` were refused in all, of which `counts` tell the newest."""

    requests: int
    counts: list[RefusalCount]


class Limited(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one key that one limit of its workspace refused."""

    workspace: str
    key: str
    limit: str
    requests: int
    last_ms: int


DivergenceKind = Literal[
    "model_changed", "tools_changed", "system_changed", "messages_changed", "unavailable"
]


class TurnDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a turn's prompt first differs from an earlier one's; `kind` None where it only grew.
    Without `from` the earlier turn is the one, of the workspace's 200 turns before, that shares the
    longest prefix, or else the latest whose tools and system blocks are as many and as long; None
    where there is none. `segment` counts the earlier prompt's tools, system and message blocks from
    0; `section` and `block` are the same place within one of these. `missed_tokens`, estimated by
    bytes, are the earlier prompt's from there on. `missed_nano` is what reading them would have
    saved; None without a price, or where the prompts share no prefix. With `shared_tokens` both
    prompts begin.

    `is_exact` where the workspace keeps the contents of both: the first `characters` of the block's
    text are alike, and the next one is not. Else the place is known by names that stand at the ends
    of blocks and at multiples of `grid_characters` within them, of which a long prompt keeps some:
    `characters` and `shared_tokens` are the least, and the difference stands before
    `characters_below` of the same block, or before `shared_tokens_below` tokens; None where nothing
    bounds it."""

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
    """`bucket_seconds` is the width of the series' intervals: a minute to an hour in ranges of up
    to two days, a day in longer ones. Models of which engines of several kinds answered are
    `mixed`: their turns with a read and without one may not be of the same engines."""

    hits: Percentiles
    misses: Percentiles
    cells: list[LatencyCell]
    bucket_seconds: int
    series: list[LatencyPoint]
    mixed: list[str] = []


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One turn whose answer began. `overhead_seconds` is the time that gateway and network added to
    the engine's queue and prefill. None if the engine sent no times."""

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
    """The answered turns of the range where it has at most as many as were asked for, `is_whole`;
    else those of a sample that the turns' ids decide, so it is the same each time. `num_turns` are
    all turns of the range. `overhead_p50` and `overhead_p95` (seconds) are of all `samples`."""

    since_ms: int
    until_ms: int
    num_turns: int
    is_whole: bool
    samples: list[Sample]
    overhead: list[Overhead]
    overhead_p50: float | None
    overhead_p95: float | None
