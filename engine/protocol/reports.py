"""What an engine tells of itself: its description, its counters, its memory, its entries."""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from engine.protocol import (
    CAPABILITIES,
    FIRST_TTLS,
    PROTOCOL_VERSION,
    BestEffortReason,
    Capability,
    Compressed,
    EntryState,
    GuaranteeName,
    InputUsage,
    Method,
    Sampling,
    Tier,
    Ttl,
)


class Guarantee(msgspec.Struct, frozen=True):
    """Whether an engine keeps one promise of this protocol, and by what, or why not.

    Exact counts are what the memory did. `hold`: a lease keeps its content until it expires.
    `isolation`: no scope reads or times another's content. `events`: what leaves is told.
    """

    name: GuaranteeName
    is_kept: bool
    note: str = ""


EngineRole = Literal["prefill", "decode", "both"]
"""What gateways send: prompts that others answer, turns and such answers, or whole turns."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests may ask for."""

    name: str
    # The SHA-256 of its weights, by which requests ask for it.
    digest: str
    rank: int
    num_bytes: int
    # It acts on a prompt from the last occurrence of this text on; None: on all of it.
    invocation: str | None = None
    # It finishes its requests, and takes no others.
    is_leaving: bool = False


class Technique(msgspec.Struct, frozen=True, kw_only=True):
    """How far the answers of one technique are from exact ones.

    They were measured on texts that the model itself wrote.
    """

    # A scorer that chooses what is kept of a prefix, `blocks`, or `sibling`.
    method: Method
    # Of a scorer: the part of the prefix that is kept. Of `blocks`: how many of a document's first
    # tokens, or which share of all, are computed where it stands. Of `sibling`: how many of the
    # first layers are computed.
    parameter: int | float
    # The mean divergence of the next token's distribution, in nats.
    kl: float
    # The part of the places at which the most likely token is the same.
    agreement: float
    # The number of places.
    tokens: int
    # Requests may ask for it.
    is_allowed: bool

    @property
    def name(self) -> str:
        return f"{self.method} at {self.parameter}"


STILL_MEASURING = (
    "this engine still measures how far approximate answers are from exact ones: it answers exact"
    " requests meanwhile"
)


def why_refused(
    techniques: Sequence[Technique], method: Method, parameter: int | float
) -> str | None:
    """Why an engine may not be asked for it; None if it may. The next lower parameter that was
    measured decides. No token recomputed is also the least share."""
    known = [
        technique
        for technique in techniques
        if technique.method == method
        and technique.parameter <= parameter
        and (isinstance(technique.parameter, type(parameter)) or not technique.parameter)
    ]
    if not known:
        other = {"blocks": "place blocks anywhere", "sibling": "read entries of a sibling"}
        return f"this engine does not {other.get(method, f'compress by {method}')}"
    nearest = max(known, key=lambda technique: technique.parameter)
    if nearest.is_allowed:
        return None
    return (
        f"{nearest.name} is too far from exact on this model: KL {nearest.kl:.2f}, "
        f"agreement {nearest.agreement:.2f}"
    )


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What tells a model from another one of the same name. An empty text is not known."""

    # A digest of its weights' files, in hex.
    weights: str = ""
    # A digest of its chat template, in hex.
    template: str = ""
    # A digest of its tokens and their ids, in hex.
    vocabulary: str = ""
    # What the server that an engine stands in front of says that it serves.
    server: str = ""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is and can do. It does not tell a number that is 0 or a text that is empty."""

    backend: Literal["native", "vllm", "synthetic", "upstream"]
    model: str
    # Changes with every start: nothing of an earlier epoch is held.
    epoch: str
    max_context_tokens: int
    block_size: int
    num_blocks: int
    # Entries sit at multiples of so many tokens; 1 is exact to the token.
    granularity: int
    min_cache_tokens: int
    # A gateway or a dashboard may not know all of them.
    capabilities: Sequence[str]
    # Whether tools are rendered before the system prompt, or where the model's template has them.
    prefix_order: Literal["tools_first", "template"] = "template"
    tool_format: str | None = None
    reasoning_format: str | None = None
    kv_bytes_per_token: int = 0
    state_blocks: int = 0
    # The type that keys and values are kept in.
    kv_dtype: str = ""
    # What the native engine attends with: `sdpa`, `triton`, or `cpp` and the processor's level
    # that the kernel was built for.
    attention: str = ""
    # `cpu`, or a GPU's name or kind.
    device: str = ""
    default_sampling: Sampling = Sampling(max_tokens=None)
    # The most sequences that are computed together. Others wait at the engine.
    max_running: int = 0
    # The most bytes of text, as UTF-8, that become one token. A prompt of n bytes has at least
    # n / that many tokens.
    longest_token_bytes: int = 0
    # The kind of the server that an engine of the backend `upstream` stands in front of.
    upstream: str | None = None
    # Each name once.
    guarantees: list[Guarantee] = []
    # An engine for `prefill` or `decode` shares a store with the others of its model.
    role: EngineRole = "both"
    # Requests may carry a `record`.
    keeps_records: bool = False
    adapters: list[AdapterInfo] = []
    # The approximations that were measured; none where they are off, or the engine can't.
    techniques: list[Technique] = []
    # The engine's own approximations are not known yet.
    is_measuring: bool = False
    # Which model stands behind the name `model`.
    identity: ModelIdentity = ModelIdentity()
    # The TTL classes that its breakpoints may have. A gateway may not know all of them.
    ttls: tuple[str, ...] = FIRST_TTLS
    # `/v1/drop` may say who asks, and `/v1/entries` answers page by page: both came in one version.
    takes_releases: bool = False
    protocol_version: int = PROTOCOL_VERSION

    @property
    def known_capabilities(self) -> frozenset[Capability]:
        """Its capabilities, without those of a later version than this code."""
        return frozenset(name for name in CAPABILITIES if name in self.capabilities)


class BlockStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by what holds them; the five classes add up to `total`."""

    total: int
    # They have nothing of use.
    free: int
    # A sequence refers to them.
    active: int
    # Leases alone refer to them.
    leased: int
    # They have no reference and belong to a best-effort entry.
    best_effort: int
    # They have no reference and reusable content.
    cached: int
    # Those with more than one reference, in whatever class.
    shared: int = 0
    # Those that are active for requests of other protocols.
    foreign: int = 0


LeaseEnd = Literal["expired", "sacrificed", "yielded", "dropped", "released", "damaged"]
"""How a lease can end while its engine lives: the fields of `Counters` behind `leases_`. An
operator `dropped` it, or the workspace that had it `released` it."""
LEASE_ENDS: tuple[LeaseEnd, ...] = get_args(LeaseEnd)


class Counters(InputUsage, kw_only=True):
    """Totals since the epoch began.

    Tokens by class count started requests only; `computed_tokens` count the others too.
    """

    requests: int = 0
    # The computed tokens of requests that ended before they started.
    prefilled_tokens: int = 0
    output_tokens: int = 0
    # A step counts once for each choice that it drew tokens of.
    sampling_steps: int = 0
    # The tokens that were proposed in these steps.
    draft_tokens: int = 0
    # Those of them that were drawn.
    accepted_draft_tokens: int = 0
    copied_blocks: int = 0
    # With content, and reused on the device.
    evicted_blocks: int = 0
    # Best-effort ones that lost a block for room.
    evicted_entries: int = 0
    # Copied to the host.
    demoted_blocks: int = 0
    # Copied back from the host.
    promoted_blocks: int = 0
    preempted_requests: int = 0
    # Those that the store brought back from an earlier epoch are among them. Less those that
    # expired, or were sacrificed, yielded, dropped, released or damaged, they are live.
    leases_granted: int = 0
    leases_expired: int = 0
    leases_sacrificed: int = 0
    leases_yielded: int = 0
    # They left the device for the store, and live.
    leases_lowered: int = 0
    leases_dropped: int = 0
    leases_released: int = 0
    leases_damaged: int = 0


class LeaseStats(msgspec.Struct, frozen=True, kw_only=True):
    """What leases hold, in blocks. A block that several leases hold counts once."""

    blocks: int
    # What they may hold.
    max_blocks: int


TOKENS_PER_REQUEST = tuple(4.0**power for power in range(14))
"""Buckets of tokens: those of `gen_ai.client.token.usage` in OpenTelemetry's conventions."""
SECONDS_PER_TOKEN = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 10.0, 30.0),
)
"""Buckets of seconds: those of `gen_ai.server.time_per_output_token`, and six more."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """How many values are in each range."""

    edges: list[float]
    # Item i: the values of at most `edges[i]`, and above the edge before. The last item: those
    # above all edges.
    counts: list[int]
    # The sum of the values.
    total: float


class Distributions(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of started requests, and seconds from one output token of a choice to its next."""

    input_tokens: Distribution
    output_tokens: Distribution
    inter_token_seconds: Distribution


StoreRefusal = Literal[
    "in_use", "strangers", "newer", "older", "unusable", "too_small", "server_flags"
]


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The store on disk, since the epoch began."""

    is_up: bool
    blocks: int = 0
    used_blocks: int = 0
    # Those of the used ones that are of entries.
    held_blocks: int = 0
    max_bytes: int = 0
    used_bytes: int = 0
    entries: int = 0
    # The leased ones of the entries.
    leases: int = 0
    # They wait for their copies, or for their lines in the journal.
    pending_entries: int = 0
    # They ended before they were there, or found no room.
    unsaved_entries: int = 0
    displaced_entries: int = 0
    queued_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    loaded_blocks: int = 0
    restored_entries: int = 0
    # Of the leases that the journal told as live, those that are readable again,
    restored_leases: int = 0
    # and those that are not.
    lost_leases: int = 0
    failed_writes: int = 0
    # Those that are known of other engines of a shared store.
    peer_blocks: int = 0
    # What was read of other engines' files.
    peer_read_bytes: int = 0
    # The files and journal lines that were not what they must be, by reason.
    misses: dict[str, int] = {}
    # Why the engine runs without the store of its settings. All else is 0 then.
    refused: StoreRefusal | None = None
    # Why files can't be written, as the system said it last; None: they can. With the refusal
    # `server_flags` it names the flag.
    problem: str | None = None


class PrefillSums(msgspec.Struct, kw_only=True):
    """What a fit of seconds = a + b · tokens + c · decodes takes: sums since the epoch began.

    An observation is a step of an engine that computes itself. Where another program computes it is
    a request's prefill that had the engine to itself. Of a synthetic engine it is a step's time by
    its settings. The last six are sums of products of two.
    """

    observations: int = 0
    # The observations in which prompts were computed.
    prefills: int = 0
    # Of prompts, computed in `seconds`.
    tokens: int = 0
    # Choices that got one token each in the same time.
    decodes: int = 0
    # The tokens of steps that decoded nothing. Such a step ran for them alone.
    unshared_tokens: int = 0
    seconds: float = 0.0
    tokens_tokens: float = 0.0
    tokens_decodes: float = 0.0
    decodes_decodes: float = 0.0
    tokens_seconds: float = 0.0
    decodes_seconds: float = 0.0
    seconds_seconds: float = 0.0

    def observe(self, tokens: int, decodes: int, seconds: float) -> None:
        """`tokens` of prompts took so many seconds, beside one token of each of `decodes`
        choices."""
        self.observations += 1
        self.prefills += tokens > 0
        self.tokens += tokens
        self.decodes += decodes
        self.seconds += seconds
        self.tokens_tokens += tokens * tokens
        self.tokens_decodes += tokens * decodes
        self.decodes_decodes += decodes * decodes
        self.tokens_seconds += tokens * seconds
        self.decodes_seconds += decodes * seconds
        self.seconds_seconds += seconds * seconds


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's counts at one moment."""

    epoch: str
    uptime_seconds: float
    # All requests that run.
    running: int
    # All requests that wait.
    waiting: int
    blocks: BlockStats
    counters: Counters
    # None where the engine does not tell.
    leases: LeaseStats | None = None
    # All that are readable.
    num_entries: int = 0
    # The leased ones of them.
    num_leases: int = 0
    # Those with the reason `automatic`. The rest are best-effort for another reason.
    num_automatic: int = 0
    unacknowledged: int = 0
    prefill_seconds: float = 0.0
    host_blocks: int = 0
    host_blocks_used: int = 0
    # The running requests of `BlockStats.foreign`.
    foreign_running: int = 0
    # Slots of llama.cpp's server that get no requests: somebody else uses them, or they don't come
    # to rest.
    slots_away: int = 0
    # None where the engine does not tell.
    distributions: Distributions | None = None
    # None where the engine does not tell.
    prefill_times: PrefillSums | None = None
    store: StoreStats | None = None


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """`counts[i]` values were at most `edges_seconds[i]`; the last count is of all above."""

    edges_seconds: list[float]
    counts: list[int]


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times in the lives of entries since the epoch began."""

    # How long expired entries lived.
    expired: Histogram
    # How long evicted entries lived.
    evicted: Histogram
    # How long an evicted entry had not been used.
    idle_before_eviction: Histogram
    # From one use of an entry to its next.
    reuse_gaps: Histogram


class BlockCell(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks by what holds them, as in `BlockStats`: the first five add up."""

    free: int = 0
    active: int = 0
    leased: int = 0
    best_effort: int = 0
    cached: int = 0
    shared: int = 0


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """Device blocks of one live entry, or of a scope without an entry.

    Each block counts once: for the shortest entry that it belongs to, leased ones first.
    """

    # None: not known.
    scope: str | None
    # None also for the smallest entries of a scope, beyond MAX_HOLDINGS.
    entry: str | None = None
    name: str | None = None
    tokens: int = 0
    # A sequence uses them.
    active: int = 0
    # Leases alone hold them.
    leased: int = 0
    # They have no reference. A lease keeps a copy of them in the store.
    lowered: int = 0
    # They have no reference, and belong to an entry that nothing holds.
    best_effort: int = 0
    # They have no reference, and belong to no entry.
    cached: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What is in an engine's memory."""

    epoch: str
    block_size: int
    # Of the pool, in each cell.
    blocks_per_cell: int = 0
    # The pool in the order of its blocks, at most MAX_CELLS. None without the capability
    # `block_map`. They may be of moments some steps apart.
    cells: list[BlockCell] = []
    referenced_blocks: int | None = None
    # The room in referenced blocks that no token is in.
    unused_tokens: int | None = None
    # The host tier.
    host: BlockStats | None = None
    # Of the same moments as the cells. With the free blocks they are all of the pool. Without cells
    # they are only what entries stand on.
    holdings: list[Holding] = []
    lifetimes: Lifetimes


class EntryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One live entry."""

    # Identifies it within its scope, 32 hex digits.
    entry: str
    scope: str
    tokens: int
    blocks: int
    ttl: Ttl
    state: EntryState
    expires_in_seconds: float
    # It ends at a time that a breakpoint told (`seconds`): its TTL's time says nothing of it.
    has_own_lifetime: bool = False
    reads: int
    # The gateway's digest of just this prefix, as requests have it in their `names`. It is no word
    # of the client's; `PrefixLook.name` of the admin API is.
    name: str | None = None
    # The number of sequences that hold its deepest full block.
    shared_by: int = 0
    # Why nothing holds a `best_effort` one.
    reason: BestEffortReason | None = None
    # Where its first block is.
    tier: Tier = "device"
    # It outlives a restart.
    is_stored: bool = False
    # Those that no shorter entry has, nor a leased one if this one is best-effort. So each token
    # counts for one entry.
    own_tokens: int = 0
    # An approximate entry has fewer tokens in memory.
    approximate: Compressed | Literal["blocks", "sibling"] | None = None
