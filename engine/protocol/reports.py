"""What an engine reports about itself: its description, counters, memory and entries."""

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
    """Whether an engine keeps one promise of this protocol.

    - `exact_read`, `exact_write`: the counts are what happened in memory.
    - `hold`: a lease keeps its content until it expires.
    - `isolation`: no scope reads another scope's content, or learns of it by time.
    - `events`: the stream of events tells what leaves memory.
    - `forced_tools`: the answer has a call if `tool_choice` is `any` or `tool`.
    """

    name: GuaranteeName
    is_kept: bool
    # What keeps the promise, or why it is not kept.
    note: str = ""


EngineRole = Literal["prefill", "decode", "both"]
"""What an engine gets from gateways.

- `prefill`: prompts that another engine answers.
- `decode`: turns, and answers to prompts that another engine computed.
- `both`: whole turns.
"""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests may ask for."""

    name: str
    # The SHA-256 of its weights, by which requests ask for it.
    digest: str
    rank: int
    num_bytes: int
    # It acts on a prompt from this text's last occurrence on; None: on the whole prompt.
    invocation: str | None = None
    # Whether it is being unloaded: its requests are finished, and no others are taken.
    is_leaving: bool = False


class Technique(msgspec.Struct, frozen=True, kw_only=True):
    """How far the answers of one technique are from exact ones.

    They were measured on texts that the model itself wrote.
    """

    method: Method
    # A scorer's `keep`, `Document.recompute` for `blocks`, the computed layers for `sibling`.
    parameter: int | float
    # The mean divergence of the next token's distribution from the exact one, in nats.
    kl: float
    # The part of the places at which the most likely token is the exact prompt's, 0 to 1.
    agreement: float
    # The number of places that were compared.
    tokens: int
    # Whether requests may ask for it.
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
    """Why a request may not ask an engine for this approximation; None if it may.

    The measured technique with the nearest parameter at or below this one decides. Numbers are
    compared with numbers and shares with shares. The number 0 is also the least share.
    """
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
    """What tells a model from another one of the same name. An empty text means: not known."""

    # A digest of its weights' files, in hex.
    weights: str = ""
    # A digest of its chat template, in hex.
    template: str = ""
    # A digest of its tokens and their ids, in hex.
    vocabulary: str = ""
    # The model's name by the server that an engine of the backend `upstream` stands in front of.
    server: str = ""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is and can do. A number of 0 and an empty text mean: not told."""

    backend: Literal["native", "vllm", "synthetic", "upstream"]
    model: str
    # It changes with every start. Only what a store kept outlives an epoch.
    epoch: str
    max_context_tokens: int
    block_size: int
    num_blocks: int
    # Entries end at multiples of this many tokens; 1 is exact to the token.
    granularity: int
    min_cache_tokens: int
    # Names of capabilities. Some may be of a later version than the reader's.
    capabilities: Sequence[str]
    # Whether tools are rendered before the system prompt, or where the model's template puts them.
    prefix_order: Literal["tools_first", "template"] = "template"
    tool_format: str | None = None
    reasoning_format: str | None = None
    kv_bytes_per_token: int = 0
    state_blocks: int = 0
    # The type of the stored keys and values.
    kv_dtype: str = ""
    # The native engine's kernels: `sdpa`, `triton`, or `cpp` with the processor level it is for.
    attention: str = ""
    # `cpu`, or a GPU's name or kind.
    device: str = ""
    default_sampling: Sampling = Sampling(max_tokens=None)
    # The most sequences that are computed together. Further ones wait at the engine.
    max_running: int = 0
    # The most UTF-8 bytes of one token: n bytes of text are n / this many tokens at least.
    longest_token_bytes: int = 0
    # The kind of the server that an engine of the backend `upstream` stands in front of.
    upstream: str | None = None
    # Each name once.
    guarantees: list[Guarantee] = []
    # An engine for `prefill` or `decode` shares a store with the others of its model.
    role: EngineRole = "both"
    # Whether requests may carry a `record`.
    keeps_records: bool = False
    adapters: list[AdapterInfo] = []
    # The measured approximations. Empty if they are off, or if the engine has none.
    techniques: list[Technique] = []
    # Whether the engine still measures its own approximations.
    is_measuring: bool = False
    # Tells the model from another one of the name `model`.
    identity: ModelIdentity = ModelIdentity()
    # The TTL classes that breakpoints may have. Some may be of a later version than the reader's.
    ttls: tuple[str, ...] = FIRST_TTLS
    # Whether `/v1/drop` takes `by` and `/v1/entries` answers in pages. Both came in one version.
    takes_releases: bool = False
    protocol_version: int = PROTOCOL_VERSION

    @property
    def known_capabilities(self) -> frozenset[Capability]:
        """Its capabilities, without those of a later version than this code."""
        return frozenset(name for name in CAPABILITIES if name in self.capabilities)


class BlockStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by what holds them. The first five classes add up to `total`."""

    total: int
    # Blocks without content of use.
    free: int
    # Blocks that a sequence refers to.
    active: int
    # Blocks that leases alone refer to.
    leased: int
    # Blocks without a reference that belong to a best-effort entry.
    best_effort: int
    # Other blocks without a reference whose content can be reused.
    cached: int
    # Blocks of any class with more than one reference.
    shared: int = 0
    # Active blocks of requests that came by another protocol.
    foreign: int = 0


LeaseEnd = Literal["expired", "sacrificed", "yielded", "dropped", "released", "damaged"]
"""How a lease can end while its engine lives. `Counters` has a field `leases_…` for each.

An operator `dropped` it, or the workspace that had it `released` it.
"""
LEASE_ENDS: tuple[LeaseEnd, ...] = get_args(LeaseEnd)


class Counters(InputUsage, kw_only=True):
    """Totals since the epoch began.

    The tokens of `InputUsage` are those of started requests. `computed_tokens` alone has the others
    as well.
    """

    requests: int = 0
    # The computed tokens of requests that ended before they started.
    prefilled_tokens: int = 0
    output_tokens: int = 0
    # Steps, each counted once for every choice that got tokens in it.
    sampling_steps: int = 0
    # The tokens that were proposed in these steps.
    draft_tokens: int = 0
    # The proposed tokens that were drawn.
    accepted_draft_tokens: int = 0
    copied_blocks: int = 0
    # Device blocks whose content was given up so that they could be used again.
    evicted_blocks: int = 0
    # Best-effort entries that lost a block for room.
    evicted_entries: int = 0
    # Blocks copied to the host.
    demoted_blocks: int = 0
    # Blocks copied back from the host.
    promoted_blocks: int = 0
    preempted_requests: int = 0
    # All leases, with those that the store brought back. Less the ended ones it counts live leases.
    leases_granted: int = 0
    leases_expired: int = 0
    leases_sacrificed: int = 0
    leases_yielded: int = 0
    # Leases that left the device for the store. They are live.
    leases_lowered: int = 0
    leases_dropped: int = 0
    leases_released: int = 0
    leases_damaged: int = 0


class LeaseStats(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that leases hold."""

    # A block that several leases hold counts once.
    blocks: int
    # The most blocks that leases may hold.
    max_blocks: int


TOKENS_PER_REQUEST = tuple(4.0**power for power in range(14))
"""Upper edges of buckets, in tokens: those of OpenTelemetry's `gen_ai.client.token.usage`."""
SECONDS_PER_TOKEN = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 10.0, 30.0),
)
"""Upper edges of buckets, in seconds: those of `gen_ai.server.time_per_output_token`, and six
more."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """How many values are in each range."""

    edges: list[float]
    # counts[i] values lie above edges[i - 1], up to edges[i]. The last count is above all edges.
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
    # The used blocks that belong to entries.
    held_blocks: int = 0
    max_bytes: int = 0
    used_bytes: int = 0
    entries: int = 0
    # The entries that are leased.
    leases: int = 0
    # Entries that wait for their copies, or for their lines in the journal.
    pending_entries: int = 0
    # Entries that ended before they were stored, or found no room.
    unsaved_entries: int = 0
    displaced_entries: int = 0
    queued_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    loaded_blocks: int = 0
    restored_entries: int = 0
    # The leases that the journal has as live and that are readable again.
    restored_leases: int = 0
    # The leases that the journal has as live and that are not readable.
    lost_leases: int = 0
    failed_writes: int = 0
    # The known blocks of other engines of a shared store.
    peer_blocks: int = 0
    # The bytes read from other engines' files.
    peer_read_bytes: int = 0
    # The files and journal lines that failed a check, by reason.
    misses: dict[str, int] = {}
    # Why the engine runs without the store of its settings. All counts are 0 then.
    refused: StoreRefusal | None = None
    # Why files can't be written; None: they can. The refusal `server_flags` names the flag here.
    problem: str | None = None


class PrefillSums(msgspec.Struct, kw_only=True):
    """The sums that a fit of seconds = a + b · tokens + c · decodes takes, since the epoch began.

    What an observation is depends on the engine:

    - an engine that computes by itself: a step
    - an engine in front of another program: the prefill of a request that ran alone
    - a synthetic engine: a step, with the time that its settings give it

    Each of the last six fields is the sum of the products of two values.
    """

    observations: int = 0
    # The observations in which prompts were computed.
    prefills: int = 0
    # The prompts' tokens that were computed in `seconds`.
    tokens: int = 0
    # The choices that got one token each in the same time.
    decodes: int = 0
    # The prompts' tokens of steps without a decode.
    unshared_tokens: int = 0
    seconds: float = 0.0
    tokens_tokens: float = 0.0
    tokens_decodes: float = 0.0
    decodes_decodes: float = 0.0
    tokens_seconds: float = 0.0
    decodes_seconds: float = 0.0
    seconds_seconds: float = 0.0

    def observe(self, tokens: int, decodes: int, seconds: float) -> None:
        """Add an observation: `seconds` for `tokens` of prompts and one token of each of `decodes`
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
    # The requests that run.
    running: int
    # The requests that wait.
    waiting: int
    blocks: BlockStats
    counters: Counters
    # None: the engine does not tell.
    leases: LeaseStats | None = None
    # The readable entries.
    num_entries: int = 0
    # The entries that are leased.
    num_leases: int = 0
    # The entries with the reason `automatic`. The rest are best-effort for another reason.
    num_automatic: int = 0
    unacknowledged: int = 0
    prefill_seconds: float = 0.0
    host_blocks: int = 0
    host_blocks_used: int = 0
    # The running requests that came by another protocol.
    foreign_running: int = 0
    # llama.cpp's slots that get no requests: in use by somebody else, or they don't come to rest.
    slots_away: int = 0
    # None: the engine does not tell.
    distributions: Distributions | None = None
    # None: the engine does not tell.
    prefill_times: PrefillSums | None = None
    store: StoreStats | None = None


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """How many times are in each range."""

    edges_seconds: list[float]
    # counts[i] values lie above edge i - 1, up to edge i. The last count is above all edges.
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
    """Consecutive blocks by what holds them, as in `BlockStats`. The first five add up to all."""

    free: int = 0
    active: int = 0
    leased: int = 0
    best_effort: int = 0
    cached: int = 0
    shared: int = 0


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """Device blocks of one live entry, or of a scope without an entry.

    Each block counts once, for the shortest leased entry that it belongs to. A block of no leased
    entry counts for the shortest of its entries.
    """

    # None: not known.
    scope: str | None
    # None: no entry, or the smallest entries of a scope together, beyond MAX_HOLDINGS.
    entry: str | None = None
    name: str | None = None
    tokens: int = 0
    # Blocks that a sequence uses.
    active: int = 0
    # Blocks that leases alone hold.
    leased: int = 0
    # Blocks without a reference, of which a lease keeps a copy in the store.
    lowered: int = 0
    # Blocks without a reference that belong to an entry that nothing holds.
    best_effort: int = 0
    # Blocks without a reference that belong to no entry.
    cached: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What is in an engine's memory."""

    epoch: str
    block_size: int
    # How many of the pool's blocks each cell has.
    blocks_per_cell: int = 0
    # The pool's blocks in order, in MAX_CELLS cells at most; empty without `block_map`.
    cells: list[BlockCell] = []
    referenced_blocks: int | None = None
    # The room for tokens in referenced blocks that is empty.
    unused_tokens: int | None = None
    # The host tier.
    host: BlockStats | None = None
    # All blocks that are not free. If there are no cells: the blocks of entries alone.
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
    # Whether a breakpoint's `seconds` decide its end, instead of its TTL.
    has_own_lifetime: bool = False
    reads: int
    # The gateway's digest of this prefix, as in a request's `names`. The client has no part in it.
    name: str | None = None
    # The number of sequences that hold its deepest full block.
    shared_by: int = 0
    # Why nothing holds a `best_effort` entry.
    reason: BestEffortReason | None = None
    # Where its first block is.
    tier: Tier = "device"
    # Whether it outlives a restart.
    is_stored: bool = False
    # Tokens of no shorter entry, nor of a leased one if this is best-effort: each counts once.
    own_tokens: int = 0
    # The approximation that wrote it; None: exact. A compressed entry has fewer tokens in memory.
    approximate: Compressed | Literal["blocks", "sibling"] | None = None
