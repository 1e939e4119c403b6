"""The engine's totals, and every request's final counts until they are acknowledged.

A request's record is kept as long as its counts. The records together have a bound of their own;
beyond it the oldest are dropped and their counts stay.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.cache.leases import EndReason
from engine.cache.lifetimes import ValueCounts
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.protocol import (
    SECONDS_PER_TOKEN,
    TOKENS_PER_REQUEST,
    BlockStats,
    Counters,
    Distribution,
    Distributions,
    FinalCounts,
    InputUsage,
    KeptRecord,
    LeaseStats,
)
from engine.schedule.scheduler import Scheduler

MAX_UNACKNOWLEDGED = 65_536
MAX_RECORDS_BYTES = 64 << 20


class RequestDistributions:
    """Of one engine, since its epoch began. What they count is said at `Distributions`."""

    def __init__(self) -> None:
        self.input_tokens = ValueCounts(TOKENS_PER_REQUEST)
        self.output_tokens = ValueCounts(TOKENS_PER_REQUEST)
        self.inter_token_seconds = ValueCounts(SECONDS_PER_TOKEN)

    def report(self) -> Distributions:
        return Distributions(
            input_tokens=_told(self.input_tokens),
            output_tokens=_told(self.output_tokens),
            inter_token_seconds=_told(self.inter_token_seconds),
        )


def _told(values: ValueCounts) -> Distribution:
    return Distribution(edges=values.edges, counts=list(values.counts), total=values.total)


@dataclass(slots=True)
class Books:
    """`prefill_seconds` sums the times of started requests between admission and first token."""

    totals: dict[str, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    num_forgotten: int = 0
    distributions: RequestDistributions = field(default_factory=RequestDistributions)
    _awaited: set[str] = field(default_factory=set)
    _unacknowledged: dict[str, FinalCounts] = field(default_factory=dict)
    _records: dict[str, bytes] = field(default_factory=dict)
    _records_bytes: int = 0

    @property
    def num_unacknowledged(self) -> int:
        return len(self._unacknowledged)

    def has(self, request_id: str) -> bool:
        return request_id in self._unacknowledged or request_id in self._awaited

    def started(self, usage: InputUsage, prefill_seconds: float) -> None:
        self.prefill_seconds += prefill_seconds
        self._add("requests", 1)
        self.distributions.input_tokens.add(usage.prompt_tokens)
        for name in InputUsage.__struct_fields__:
            self._add(name, getattr(usage, name))

    def drew(self, num_proposed: int, num_accepted: int) -> None:
        """A step drew tokens of one choice, `num_accepted` of the proposed ones among them."""
        self._add("sampling_steps", 1)
        if num_proposed:
            self._add("draft_tokens", num_proposed)
            self._add("accepted_draft_tokens", num_accepted)

    def lease_ended(self, reason: EndReason) -> None:
        self._add(f"leases_{reason}", 1)

    def awaits(self, request_id: str) -> None:
        """The request has ended, and `ended` is called when its counts are known."""
        self._awaited.add(request_id)

    def ended(self, counts: FinalCounts, record: str = "") -> None:
        """`record` is the gateway's, which came with the request."""
        self._awaited.discard(counts.request_id)
        self._add("output_tokens", counts.output_tokens)
        if counts.usage is not None:
            self.distributions.output_tokens.add(counts.output_tokens)
        # A request that ended before it started has no usage, and yet computed these.
        self._add("computed_tokens", counts.prefilled_tokens)
        self._add("prefilled_tokens", counts.prefilled_tokens)
        self._unacknowledged[counts.request_id] = counts
        if len(self._unacknowledged) > MAX_UNACKNOWLEDGED:
            oldest = next(iter(self._unacknowledged))
            del self._unacknowledged[oldest]
            self._drop_record(oldest)
            self.num_forgotten += 1
        if record:
            self._records[counts.request_id] = kept = record.encode()
            self._records_bytes += len(kept)
        while self._records_bytes > MAX_RECORDS_BYTES:
            self._drop_record(next(iter(self._records)))

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._unacknowledged.pop(request_id, None)
            self._drop_record(request_id)

    def records(self, request_ids: Iterable[str]) -> list[KeptRecord]:
        """Those of these requests' records that are kept."""
        return [
            KeptRecord(request_id, self._records[request_id].decode())
            for request_id in dict.fromkeys(request_ids)
            if request_id in self._records
        ]

    def unacknowledged(self) -> list[FinalCounts]:
        return list(self._unacknowledged.values())

    def counters(self, cache: PrefixCache, scheduler: Scheduler) -> Counters:
        return Counters(
            **self.totals,
            copied_blocks=cache.pool.num_copied,
            evicted_blocks=cache.pool.num_evicted,
            evicted_entries=cache.entries.lifetimes.num_evicted,
            leases_yielded_idle=cache.entries.leases.num_idle_yielded,
            leases_lowered=cache.entries.leases.num_lowered,
            preempted_requests=scheduler.num_preempted,
            demoted_blocks=cache.host.num_demoted if cache.host is not None else 0,
            promoted_blocks=cache.host.num_promoted if cache.host is not None else 0,
        )

    def _drop_record(self, request_id: str) -> None:
        self._records_bytes -= len(self._records.pop(request_id, b""))

    def _add(self, name: str, amount: int) -> None:
        self.totals[name] = self.totals.get(name, 0) + amount


def pool_stats(pool: BlockPool) -> BlockStats:
    counts = pool.counts()
    return BlockStats(
        total=pool.num_blocks,
        free=counts.free,
        active=counts.active,
        leased=counts.leased,
        best_effort=counts.best_effort,
        cached=counts.cached,
        shared=counts.shared,
    )


def lease_stats(cache: PrefixCache) -> LeaseStats:
    leases, pool = cache.entries.leases, cache.pool
    return LeaseStats(
        blocks=pool.num_leased,
        max_blocks=leases.max_blocks,
        idle_blocks=pool.num_idle,
        max_idle_blocks=leases.max_idle_blocks,
    )
