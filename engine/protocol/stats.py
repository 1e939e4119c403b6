"""What an engine has done since its epoch began, and what holds its blocks now."""

from typing import Literal

import msgspec

from engine.protocol.frames import InputUsage


class BlockStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by what holds them; the five add up to `total`.

    `active` blocks are referenced by a sequence, `leased` ones by leases alone. `best_effort` ones
    have no reference and belong to a best-effort entry that was used lately. `cached` ones have no
    reference and reusable content, `free` ones nothing of use. `shared` blocks have more than one
    reference, in whatever class. `foreign` ones are active only for requests that reached the
    engine's server by another way than this protocol.
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
    before they started, as `FinalCounts` tells them. `evicted_entries` were best-effort and lost a
    block for room. `evicted_blocks` with content were reused on the device; `demoted_blocks` were
    copied to the host, then or before, `promoted_blocks` were copied back. `leases_yielded_idle`
    are the part of `leases_yielded` that ended because idle leases held more than their bound.
    `leases_lowered` left the device for the store, and did not end.

    `sampling_steps` count a step once for each choice that it drew tokens of; 0: not counted. With
    speculation `draft_tokens` were proposed there, of which `accepted_draft_tokens` were drawn.
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
    leases_expired: int = 0
    leases_sacrificed: int = 0
    leases_yielded: int = 0
    leases_yielded_idle: int = 0
    leases_lowered: int = 0
    leases_dropped: int = 0
    leases_damaged: int = 0


class LeaseStats(msgspec.Struct, frozen=True, kw_only=True):
    """What leases hold, and may hold, in blocks; one that several hold counts once.

    `idle_blocks` are held by idle leases alone; both are None where those have no bound.
    """

    blocks: int
    max_blocks: int
    idle_blocks: int | None = None
    max_idle_blocks: int | None = None


TOKENS_PER_REQUEST = tuple(4.0**power for power in range(14))
"""Buckets of tokens, 1 to 67,108,864: those of `gen_ai.client.token.usage` in OpenTelemetry's
semantic conventions for generative AI."""
SECONDS_PER_TOKEN = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 10.0, 30.0),
)
"""Buckets of seconds a token: those of `gen_ai.server.time_per_output_token` (10 ms to 2.5 s) in
the same conventions, three below for small models, and three above for tokens that a long prefill
or a preemption held up."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """`counts[i]` values were at most `edges[i]` and above the edge before; the last count is of
    all above. `total` is the sum of all values."""

    edges: list[float]
    counts: list[int]
    total: float


class Distributions(msgspec.Struct, frozen=True, kw_only=True):
    """Since the epoch began: prompt tokens of started requests, their output tokens, and the
    seconds from one output token of a choice to its next."""

    input_tokens: Distribution
    output_tokens: Distribution
    inter_token_seconds: Distribution


StoreRefusal = Literal["in_use", "strangers", "newer", "unusable", "too_small"]


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The store on disk, since the epoch began.

    `refused`: why the engine runs without the store that its settings name. It is in use by another
    engine, has files that are no store's, is of a newer version, can't be opened, or has room for
    too few blocks. All else is 0 then.

    `held_blocks` of the `used_blocks` are of entries; `leases` of the `entries` are leased.
    Of other engines of a shared store `peer_blocks` are known, and `peer_read_bytes` were read.
    Files of blocks take `used_bytes` of at most `max_bytes` on disk.

    `pending_entries` wait for their copies, or for their lines in the journal; `unsaved_entries`
    ended before, or found no room.
    `misses` counts files and journal lines that were not what they must be, by reason.
    Of the leases that the journal told as live, `restored_leases` are readable again and
    `lost_leases` are not.
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


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """`leases` and `distributions` are None where the engine does not tell.

    `running` and `waiting` count all requests; `foreign_running` are those of `BlockStats.foreign`.
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
    unacknowledged: int = 0
    prefill_seconds: float = 0.0
    host_blocks: int = 0
    host_blocks_used: int = 0
    foreign_running: int = 0
    distributions: Distributions | None = None
    store: StoreStats | None = None
