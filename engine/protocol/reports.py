"""What an engine tells of itself: its description, its counters, its memory, its entries."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.protocol import (
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
    """How far approximate answers are from exact ones, measured on texts that the model itself
    wrote.

    They are answers behind a prefix of which a scorer keeps the part `parameter`, or behind
    documents (`blocks`) of which that many first tokens, or that share, are computed where they
    stand, or behind a `sibling`'s entries of which that many first layers are. `kl` is the mean
    divergence of the next token's distribution, in nats; `agreement` the part of `tokens` places at
    which the most likely token is the same. What `is_allowed` may be asked for.
    """

    method: Method
    parameter: int | float
    kl: float
    agreement: float
    tokens: int
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
    capabilities: list[Capability]
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
    # So many sequences are computed together at most. What is sent beyond waits there.
    max_running: int = 0
    # So many bytes of text, as UTF-8, become one token at most. A prompt of n bytes has at least
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
    protocol_version: int = PROTOCOL_VERSION


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
    # expired, or were sacrificed, yielded, dropped or damaged, they are live.
    leases_granted: int = 0
    leases_expired: int = 0
    leases_sacrificed: int = 0
    leases_yielded: int = 0
    # They left the device for the store, and live.
    leases_lowered: int = 0
    leases_dropped: int = 0
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
    """`counts[i]` values were at most `edges[i]`, the last above all. `total` is their sum."""

    edges: list[float]
    counts: list[int]
    total: float


class Distributions(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of started requests, and seconds from one output token of a choice to its next."""

    input_tokens: Distribution
    output_tokens: Distribution
    inter_token_seconds: Distribution


StoreRefusal = Literal["in_use", "strangers", "newer", "older", "unusable", "too_small"]


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
    # Why files can't be written, as the system said it last; None: they can.
    problem: str | None = None


class PrefillSums(msgspec.Struct, kw_only=True):
    """Sums over `observations` since the epoch began, of which `prefills` computed prompts.

    Each is a step of an engine that computes itself. It is a request's prefill that had the engine
    to itself, where another program computes. `tokens` of prompts are computed in `seconds`, beside
    one token of each of `decodes` choices. `unshared_tokens` are those of steps that decoded
    nothing: without them such a step would not have run. The others are sums of products of two.
    They are what a fit of seconds = a + b · tokens + c · decodes takes.
    """

    observations: int = 0
    prefills: int = 0
    tokens: int = 0
    decodes: int = 0
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
    """`leases`, `distributions` and `prefill_times` are None where the engine does not tell.

    `running` and `waiting` count all requests; `foreign_running` are those of `BlockStats.foreign`.
    Of the `num_entries`, `num_leases` are leased and `num_automatic` have the reason `automatic`.
    The others are best-effort for another reason.
    """

    epoch: str
    uptime_seconds: float
    running: int
    waiting: int
    blocks: BlockStats
    counters: Counters
    leases: LeaseStats | None = None
    num_entries: int = 0
    num_leases: int = 0
    num_automatic: int = 0
    unacknowledged: int = 0
    prefill_seconds: float = 0.0
    host_blocks: int = 0
    host_blocks_used: int = 0
    foreign_running: int = 0
    distributions: Distributions | None = None
    prefill_times: PrefillSums | None = None
    store: StoreStats | None = None


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """`counts[i]` values were at most `edges_seconds[i]`; the last count is of all above."""

    edges_seconds: list[float]
    counts: list[int]


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times in the lives of entries since the epoch began.

    `expired` and `evicted` are how long such entries lived. `idle_before_eviction` is how long an
    evicted entry had not been used. `reuse_gaps` are from one use of an entry to its next.
    """

    expired: Histogram
    evicted: Histogram
    idle_before_eviction: Histogram
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
    """Device blocks of one live entry, or of a scope without an entry. Each block counts once: for
    the shortest entry that it belongs to, leased ones first.

    `active`: a sequence uses them. `leased`: leases alone hold them. The others have no reference:
    a lease keeps a copy of `lowered` ones in the store, `best_effort` ones belong to an entry that
    nothing holds, `cached` ones to none. `scope` None is not known. Without an `entry` are also
    the smallest entries of a scope, beyond MAX_HOLDINGS.
    """

    scope: str | None
    entry: str | None = None
    name: str | None = None
    tokens: int = 0
    active: int = 0
    leased: int = 0
    lowered: int = 0
    best_effort: int = 0
    cached: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What is in an engine's memory.

    `cells` are the pool in the order of its blocks, `blocks_per_cell` each, at most MAX_CELLS; none
    without the capability `block_map`. They may be of moments some steps apart. `unused_tokens` is
    the room in `referenced_blocks` that no token is in. `host` is the host tier. `holdings` are of
    the same moments as `cells`, and with the free blocks all of the pool; without `cells` they are
    only what entries stand on.
    """

    epoch: str
    block_size: int
    blocks_per_cell: int = 0
    cells: list[BlockCell] = []
    referenced_blocks: int | None = None
    unused_tokens: int | None = None
    host: BlockStats | None = None
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
    reads: int
    # The gateway's name of just this prefix.
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
