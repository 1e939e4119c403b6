"""What every backend owes its clients: a request's frames, entries and exact counts.

A backend computes as it likes, and tells its `Accounting` what happens: a request `arrived`, its
prompt is computed (`started`), a `token` came, a choice `ended`. Nothing here decides what runs.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from engine.cache.ids import Digest, TokenId
from engine.cache.lifetimes import ValueCounts
from engine.cache.prefix_cache import PrefixCache
from engine.clock import Clock
from engine.errors import DuplicateRequest
from engine.protocol import (
    Delta,
    Done,
    DropReply,
    ErrorCode,
    Event,
    Failed,
    FinalCounts,
    Finished,
    FinishReason,
    InputUsage,
    KeptRecord,
    LeaseEnded,
    Started,
)
from engine.protocol.reports import (
    SECONDS_PER_TOKEN,
    TOKENS_PER_REQUEST,
    Distributions,
    LeaseEnd,
    PrefillSums,
)
from engine.schedule.request import RequestState, SequenceState, new_boundaries
from engine.schedule.runner import SampleParams

MAX_UNACKNOWLEDGED = 65_536
MAX_RECORDS_BYTES = 64 << 20


Publish = Callable[[list[Event]], None]
"""Takes a step's events, in order, on the engine's thread. It must not block."""


class Accounting:
    """One epoch's accounting; not thread-safe.

    A caller that ends a choice must give its blocks back first.

    With `counts_prefill` a failed request's `computed` has the tokens that were computed for it.
    Without it the backend must ask for their number, and call `close_failed` later.
    """

    def __init__(
        self,
        cache: PrefixCache,
        clock: Clock,
        publish: Publish,
        *,
        epoch: str,
        max_context_tokens: int,
        totals: "Totals | None" = None,
        counts_prefill: bool = True,
    ) -> None:
        self._cache = cache
        self.clock = clock
        self._publish = publish
        self._epoch = epoch
        self._max_context_tokens = max_context_tokens
        self._counts_prefill = counts_prefill
        self.totals = totals or Totals()
        self.prefill_times = PrefillSums()
        self._requests: dict[str, RequestState] = {}
        self._events: list[Event] = []
        self.num_published = 0

    # In.

    def arrived(self, request: RequestState, sample: list[SampleParams]) -> None:
        """Take a request in. The look-up happens here, on the state at its arrival.

        Raises DuplicateRequest, with nothing changed.
        """
        request_id = request.request_id
        if request_id in self._requests or self.totals.has(request_id):
            raise DuplicateRequest(f"request {request_id!r} is running or unacknowledged")
        self.expire(self.clock.now())
        request.look_up(self._cache)
        request.sequences = [
            request.new_sequence(
                choice,
                self._cache.new_table(request.query, may_fork=len(request.parsers) > 1),
                parser,
                sample[choice],
            )
            for choice, parser in enumerate(request.parsers)
        ]
        request.boundaries = new_boundaries(request)
        self._requests[request_id] = request

    def find(self, request_id: str) -> RequestState | None:
        """The request, until its end."""
        return self._requests.get(request_id)

    def drop(
        self, scope: str | None, key: Digest | None, reason: LeaseEnd = "dropped"
    ) -> DropReply:
        """Drop one entry or all entries of a scope. Their leases end with the reason."""
        dropped = self._cache.entries.drop(scope, key, reason)
        self.publish()
        return DropReply(dropped)

    def drop_adapter(self, digest: str) -> bool:
        """End the entries that an adapter acts on.

        False, with nothing changed, while a request uses the adapter.
        """
        adapters = (request.query.adapter for request in self._requests.values())
        if any(adapter is not None and adapter.digest == digest for adapter in adapters):
            return False
        self._cache.entries.drop_adapter(digest)
        self.publish()
        return True

    def expire(self, now: float) -> None:
        self._cache.entries.expire(now)

    def seconds_to_expiry(self, now: float) -> float:
        due = self._cache.entries.next_expiry()
        return math.inf if due is None else max(due - now, 0.0)

    # Along the way.

    def started(self, sequence: SequenceState) -> None:
        """The prompt is computed: write the entries. From this frame on they are readable."""
        request = sequence.request
        if request.started_at is not None:
            return
        assert request.began_at is not None
        now = self.clock.now()
        request.started_at = now
        written = request.write(self._cache, sequence, now)
        read_tier = written.read_tier
        request.usage = written.usage
        self.totals.started(written.usage, now - request.began_at)
        if written.held:
            # Earlier changes go first, since they may be of the same names.
            self._events += [*self._cache.pool.changes.take(), *written.held]
        brought = 0.0
        if read_tier not in (None, "device") and request.brought_at is not None:
            brought = max(request.brought_at - request.began_at, 0.0)
        request.emit(
            Started(
                request_id=request.request_id,
                epoch=self._epoch,
                usage=written.usage,
                breakpoints=written.breakpoints,
                receipt=written.receipt,
                miss_reason=written.miss_reason,
                queue_seconds=request.began_at - request.submitted_at,
                prefill_seconds=now - request.began_at,
                unheld=list(request.unheld),
                folded=list(request.folded),
                inexact=list(request.inexact),
                read_tier=read_tier,
                bring_back_seconds=brought,
                leases_granted=self._cache.entries.leases.num_granted,
            )
        )
        if request.request.sampling.max_tokens == 0:
            sequence.finish = "length"

    def token(self, sequence: SequenceState, token: TokenId) -> None:
        """Take one sampled token: parse it, emit its deltas, decide whether it was the last."""
        request = sequence.request
        max_tokens = request.request.sampling.max_tokens
        sequence.append(token)
        self._note_output(sequence)
        num_thought = sequence.parser.thinking_tokens
        deltas = sequence.parser.feed(token)
        if sequence.logprobs is not None:
            is_thought = sequence.parser.thinking_tokens > num_thought
            deltas = sequence.logprobs.told(token, deltas, is_thought=is_thought)
        _say(sequence, deltas)
        if sequence.parser.finish is not None:
            sequence.finish = sequence.parser.finish
        elif max_tokens is not None and sequence.num_output >= max_tokens:
            sequence.finish = "length"
        elif len(sequence.tokens) + request.query.cut >= self._max_context_tokens:
            sequence.finish = "context"

    def text(self, sequence: SequenceState, deltas: Sequence[Delta], num_output: int) -> None:
        """Take a piece of text from a server that gives no tokens.

        The answer has about `num_output` tokens so far.
        """
        if deltas:
            self._note_output(sequence)
        missing = num_output - sequence.num_output
        if missing < 0:
            del sequence.tokens[missing:]
        sequence.tokens.extend([0] * missing)
        _say(sequence, deltas)

    def _note_output(self, sequence: SequenceState) -> None:
        """Note that a token of the choice has come, or a piece of text from a server of text."""
        now = self.clock.now()
        last = sequence.last_output_at
        sequence.last_output_at = now
        if last is not None:
            self.totals.inter_token_seconds.add(now - last)

    def publish(self) -> None:
        """Publish the changes of leases and names since the last time, and this step's writes."""
        ended = self._cache.entries.leases.take_ended()
        for lease in ended:
            self.totals.counters[f"leases_{lease.reason}"] += 1
            self._events.append(
                LeaseEnded(
                    seq=0,
                    entry=lease.entry.key.hex(),
                    names=lease.names,
                    # Gateways of earlier versions know no other word for it.
                    reason="dropped" if lease.reason == "released" else lease.reason,
                )
            )
        self._events += self._cache.pool.changes.take()
        if self._events:
            events = self._events
            self._events = []
            self.num_published += len(events)
            self._publish(events)

    # Out.

    def ended(self, sequence: SequenceState, code: ErrorCode | UnsetType = UNSET) -> None:
        """Close one choice, which has its `finish`. The last one closes the request.

        `code`: why it failed, of a choice that did.
        """
        request = sequence.request
        reason = sequence.finish
        assert reason is not None
        if request.started_at is None:
            message = "the prompt does not fit into the engine's memory"
            self.failed(sequence, message, "overloaded")
            return
        deltas = sequence.parser.close()
        _say(sequence, sequence.logprobs.closed(deltas) if sequence.logprobs else deltas)
        request.emit(
            Finished(
                reason=reason,
                output_tokens=sequence.num_output,
                thinking_tokens=sequence.parser.thinking_tokens,
                stop_sequence=sequence.parser.stop_sequence,
                choice=sequence.choice,
                code=code,
            )
        )
        request.num_finished += 1
        request.output_tokens += sequence.num_output
        request.thinking_tokens += sequence.parser.thinking_tokens
        if request.num_finished == len(request.sequences):
            del self._requests[request.request_id]
            self._close(request, reason)
            request.emit(
                Done(
                    request_id=request.request_id,
                    output_tokens=request.output_tokens,
                    decode_seconds=self.clock.now() - request.started_at,
                )
            )

    def cancelled(self, request: RequestState) -> None:
        if request.started_at is None:
            self.failed(request.leader, "the request was cancelled", "cancelled")
            return
        for sequence in request.unfinished:
            sequence.finish = "cancelled"
            self.ended(sequence)

    def failed(self, sequence: SequenceState, message: str, code: ErrorCode = "internal") -> None:
        """End a choice that can't be computed, with `code`.

        If its response has not begun, the whole request fails and nothing was written.
        """
        request = sequence.request
        if request.started_at is not None and code == "too_costly":
            sequence.finish = "too_costly"
            self.ended(sequence)
            return
        if request.started_at is not None:
            sequence.finish = "failed"
            self.ended(sequence, code)
            return
        request.take_back(self._cache)
        request.leader.finish = "cancelled" if code == "cancelled" else "failed"
        del self._requests[request.request_id]
        if self._counts_prefill:
            self.close_failed(request, request.computed.total)
        else:
            self.totals.awaits(request.request_id)
        request.emit(Failed(code=code, message=message))

    def close_failed(self, request: RequestState, prefilled_tokens: int) -> None:
        """Note how much was computed of a prompt whose response never began."""
        assert request.leader.finish is not None
        self._close(request, request.leader.finish, prefilled_tokens)

    def _close(
        self, request: RequestState, reason: FinishReason, prefilled_tokens: int = 0
    ) -> None:
        counts = FinalCounts(
            request_id=request.request_id,
            epoch=self._epoch,
            reason=reason,
            usage=request.usage,
            prefilled_tokens=prefilled_tokens,
            output_tokens=request.output_tokens,
            thinking_tokens=request.thinking_tokens,
            scope=request.request.scope,
        )
        self.totals.ended(counts, request.request.record)


def _say(sequence: SequenceState, deltas: Iterable[Delta]) -> None:
    """Emit deltas with the number of their choice, which parsers don't know."""
    for delta in deltas:
        choice = sequence.choice
        sequence.request.emit(msgspec.structs.replace(delta, choice=choice) if choice else delta)


@dataclass(slots=True)
class Totals:
    """An engine's totals, and every request's final counts until they are acknowledged.

    A request's record is kept as long as its counts. The records together have a bound of their
    own. Beyond it the oldest are dropped, and their counts stay.
    """

    counters: Counter[str] = field(default_factory=Counter)
    # The seconds between admission and first token, summed over started requests.
    prefill_seconds: float = 0.0
    num_forgotten: int = 0
    input_tokens: ValueCounts = field(default_factory=lambda: ValueCounts(TOKENS_PER_REQUEST))
    output_tokens: ValueCounts = field(default_factory=lambda: ValueCounts(TOKENS_PER_REQUEST))
    inter_token_seconds: ValueCounts = field(default_factory=lambda: ValueCounts(SECONDS_PER_TOKEN))
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
        self.counters["requests"] += 1
        self.input_tokens.add(usage.prompt_tokens)
        for name in InputUsage.__struct_fields__:
            self.counters[name] += getattr(usage, name)

    def drew(self, num_proposed: int, num_accepted: int) -> None:
        """Note that a step drew tokens of one choice. `num_accepted` of them had been proposed."""
        self.counters["sampling_steps"] += 1
        if num_proposed:
            self.counters["draft_tokens"] += num_proposed
            self.counters["accepted_draft_tokens"] += num_accepted

    def awaits(self, request_id: str) -> None:
        """The request has ended, and `ended` is called when its counts are known."""
        self._awaited.add(request_id)

    def ended(self, counts: FinalCounts, record: str = "") -> None:
        """`record` is the gateway's record, which came with the request."""
        self._awaited.discard(counts.request_id)
        self.counters["output_tokens"] += counts.output_tokens
        if counts.usage is not None:
            self.output_tokens.add(counts.output_tokens)
        # A request that ended before it started has no usage, but computed these tokens.
        self.counters["computed_tokens"] += counts.prefilled_tokens
        self.counters["prefilled_tokens"] += counts.prefilled_tokens
        self._unacknowledged[counts.request_id] = counts
        if len(self._unacknowledged) > MAX_UNACKNOWLEDGED:
            oldest = next(iter(self._unacknowledged))
            del self._unacknowledged[oldest]
            self._drop_record(oldest)
            self.num_forgotten += 1
        if record:
            encoded = record.encode()
            self._records[counts.request_id] = encoded
            self._records_bytes += len(encoded)
        while self._records_bytes > MAX_RECORDS_BYTES:
            self._drop_record(next(iter(self._records)))

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._unacknowledged.pop(request_id, None)
            self._drop_record(request_id)

    def records(self, request_ids: Iterable[str]) -> list[KeptRecord]:
        """The records of these requests, as far as they are kept."""
        return [
            KeptRecord(request_id, self._records[request_id].decode())
            for request_id in dict.fromkeys(request_ids)
            if request_id in self._records
        ]

    def unacknowledged(self) -> list[FinalCounts]:
        return list(self._unacknowledged.values())

    def distributions(self) -> Distributions:
        return Distributions(
            input_tokens=self.input_tokens.distribution(),
            output_tokens=self.output_tokens.distribution(),
            inter_token_seconds=self.inter_token_seconds.distribution(),
        )

    def _drop_record(self, request_id: str) -> None:
        self._records_bytes -= len(self._records.pop(request_id, b""))
