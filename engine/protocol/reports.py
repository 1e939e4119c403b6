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
    """An adapter that requests may ask for by its `digest`, the SHA-256 of its weights.

    It acts on a prompt from the last occurrence of the text `invocation` on; None: on all of it.
    One that `is_leaving` finishes its requests, and takes no others.
    """

    name: str
    digest: str
    rank: int
    num_bytes: int
    invocation: str | None = None
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
        one
        for one in techniques
        if one.method == method
        and one.parameter <= parameter
        and (isinstance(one.parameter, type(parameter)) or not one.parameter)
    ]
    if not known:
        other = {"blocks": "place blocks anywhere", "sibling": "read entries of a sibling"}
        return f"this engine does not {other.get(method, f'compress by {method}')}"
    one = max(known, key=lambda one: one.parameter)
    if one.is_allowed:
        return None
    return (
        f"{one.name} is too far from exact on this model: KL {one.kl:.2f}, "
        f"agreement {one.agreement:.2f}"
    )


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What tells a model from another one of the same name. An empty text is not known.

    `weights` is a digest of its weights' files, `template` of its chat template, `vocabulary` of
    its tokens and their ids, all in hex. `server` is what the server in front of which an engine
    stands says that it serves.
    """

    weights: str = ""
    template: str = ""
    vocabulary: str = ""
    server: str = ""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`granularity`: entries sit at multiples of this many tokens (1 is exact to the token).

    `prefix_order` says whether tools are rendered before the system prompt or where the model's
    own template puts them. `epoch` changes with every start: nothing of an older one is held.
    `max_running` sequences are computed together at most; what is sent beyond waits there.
    `longest_token_bytes` of text, as UTF-8, become one token at most, so a prompt of n bytes has at
    least n / that many tokens. `upstream` is the kind of the server that an engine of the backend
    `upstream` stands in front of. `kv_dtype` is the type that keys and values are kept in,
    `attention` what the native engine attends with: `sdpa`, `triton`, or `cpp` and the processor's
    level that the kernel was built for; `device` is `cpu`, or a GPU's name or kind. A 0 or empty
    text is what the engine does not tell. `guarantees` has each name once. An engine with a `role`
    shares a store with the others of its model. Requests may carry a `record` where it
    `keeps_records`. `techniques` are the approximations that were measured; none where they
    are off, or the engine can't. While an engine `is_measuring` those of its own are not known yet.
    `identity` says which model stands behind the name `model`.
    """

    backend: Literal["native", "vllm", "synthetic", "upstream"]
    model: str
    epoch: str
    max_context_tokens: int
    block_size: int
    num_blocks: int
    granularity: int
    min_cache_tokens: int
    capabilities: list[Capability]
    prefix_order: Literal["tools_first", "template"] = "template"
    tool_format: str | None = None
    reasoning_format: str | None = None
    kv_bytes_per_token: int = 0
    state_blocks: int = 0
    kv_dtype: str = ""
    attention: str = ""
    device: str = ""
    default_sampling: Sampling = Sampling(max_tokens=None)
    max_running: int = 0
    longest_token_bytes: int = 0
    upstream: str | None = None
    guarantees: list[Guarantee] = []
    role: EngineRole = "both"
    keeps_records: bool = False
    adapters: list[AdapterInfo] = []
    techniques: list[Technique] = []
    is_measuring: bool = False
    identity: ModelIdentity = ModelIdentity()
    protocol_version: int = PROTOCOL_VERSION


class BlockStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by what holds them; the five add up to `total`.

    `active` blocks are referenced by a sequence, `leased` ones by leases alone. `best_effort` ones
    have no reference and belong to a best-effort entry. `cached` ones have no
    reference and reusable content, `free` ones nothing of use. `shared` blocks have more than one
    reference, in whatever class. `foreign` ones are active for requests of other protocols.
    """

    total: int
    free: int
    active: int
    leased: int
    best_effort: int
    cached: int
    shared: int = 0
    foreign: int = 0


class Counters(InputUsage, kw_only=True):
    """Totals since the epoch began; tokens by class count started requests only.

    `computed_tokens` count the others too: `prefilled_tokens` are those of requests that ended
    before they started. `evicted_entries` were best-effort and lost a block for room.
    `evicted_blocks` with content were reused on the device; `demoted_blocks` were copied to the
    host, `promoted_blocks` back. `leases_lowered` left the device for the store. `leases_granted`
    began, those that the store brought back from an earlier epoch among them. Less those that ended
    (`leases_` and `expired`, `sacrificed`, `yielded`, `dropped` or `damaged`) they are live.

    `sampling_steps` count a step once for each choice that it drew tokens of. With speculation
    `draft_tokens` were proposed there, of which `accepted_draft_tokens` were drawn.
    """

    requests: int = 0
    prefilled_tokens: int = 0
    output_tokens: int = 0
    sampling_steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    copied_blocks: int = 0
    evicted_blocks: int = 0
    evicted_entries: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    preempted_requests: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    leases_sacrificed: int = 0
    leases_yielded: int = 0
    leases_lowered: int = 0
    leases_dropped: int = 0
    leases_damaged: int = 0


class LeaseStats(msgspec.Struct, frozen=True, kw_only=True):
    """What leases hold, and may hold, in blocks; one that several hold counts once."""

    blocks: int
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
    """The store on disk, since the epoch began.

    `refused`: why the engine runs without the store of its settings; all else is 0 then. `problem`:
    why files can't be written, as the system said it last; None where they can.

    `held_blocks` of the `used_blocks` are of entries; `leases` of the `entries` are leased.
    Of other engines of a shared store `peer_blocks` are known, and `peer_read_bytes` were read.
    `pending_entries` wait for their copies, or for their lines in the journal; `unsaved_entries`
    ended before, or found no room. `misses` counts files and journal lines that were not what they
    must be, by reason. Of the leases that the journal told as live, `restored_leases` are readable
    again and `lost_leases` are not.
    """

    is_up: bool
    blocks: int = 0
    used_blocks: int = 0
    held_blocks: int = 0
    max_bytes: int = 0
    used_bytes: int = 0
    entries: int = 0
    leases: int = 0
    pending_entries: int = 0
    unsaved_entries: int = 0
    displaced_entries: int = 0
    queued_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    loaded_blocks: int = 0
    restored_entries: int = 0
    restored_leases: int = 0
    lost_leases: int = 0
    failed_writes: int = 0
    peer_blocks: int = 0
    peer_read_bytes: int = 0
    misses: dict[str, int] = {}
    refused: StoreRefusal | None = None
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
    """One live entry; `entry` (32 hex digits) identifies it within its scope.

    `name` is the gateway's name of just this prefix. `shared_by` counts the sequences that hold its
    deepest full block. `reason` says why nothing holds a `best_effort` one. `tier` is where its
    first block is. An entry that `is_stored` outlives a restart. `own_tokens` are those that no
    shorter entry has, nor a leased one if it is best effort: each is in one entry's. What is
    `approximate` has fewer tokens in memory.
    """

    entry: str
    scope: str
    tokens: int
    blocks: int
    ttl: Ttl
    state: EntryState
    expires_in_seconds: float
    reads: int
    name: str | None = None
    shared_by: int = 0
    reason: BestEffortReason | None = None
    tier: Tier = "device"
    is_stored: bool = False
    own_tokens: int = 0
    approximate: Compressed | Literal["blocks", "sibling"] | None = None
