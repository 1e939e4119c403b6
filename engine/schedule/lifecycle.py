"""A request's life beside the scheduler's decisions: from submit to its final counts."""

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Protocol

import msgspec

from engine.cache.ids import Digest, TokenId
from engine.cache.prefix_cache import PrefixCache
from engine.clock import Clock
from engine.errors import DuplicateRequest, Overloaded
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
    LeaseEnded,
    Started,
)
from engine.schedule.books import Books
from engine.schedule.request import RequestState, SequenceState, new_boundaries
from engine.schedule.runner import SampleParams


class Publish(Protocol):
    """Takes a step's events, in order, on the engine's thread. It must not block."""

    def __call__(self, events: list[Event]) -> None: ...


class SequenceQueue(Protocol):
    """The waiting and running sequences: our scheduler, or a stand-in for vLLM's."""

    @property
    def waiting(self) -> Sized: ...

    def add(self, sequence: SequenceState) -> None: ...
    def add_fork(self, sequence: SequenceState) -> None: ...
    def has(self, sequence: SequenceState) -> bool: ...

    def remove(self, sequence: SequenceState) -> None:
        """Take a waiting or running sequence out, and give its blocks back."""
        ...


class AskPrefilled(Protocol):
    """Finds out what a request computed that ended before its first token.

    Returns whether it will be told: then `close` is called once with the number of tokens.
    """

    def __call__(self, request: RequestState, close: Callable[[int], None]) -> bool: ...


class Lifecycle:
    """`ask_prefilled`: set where the scheduler knows the computed tokens, and not we."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: SequenceQueue,
        books: Books,
        clock: Clock,
        *,
        epoch: str,
        max_waiting: int,
        max_context_tokens: int,
        publish: Publish,
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._accounts = books
        self._clock = clock
        self._epoch = epoch
        self._max_waiting = max_waiting
        self._max_context_tokens = max_context_tokens
        self._publish = publish
        self._requests: dict[str, RequestState] = {}
        self._events: list[Event] = []
        self.num_published = 0
        self.ask_prefilled: AskPrefilled | None = None

    # In.

    def submit(self, request: RequestState, sample: list[SampleParams]) -> None:
        """Take a request in. The look-up happens here, on the state at its arrival.

        Raises DuplicateRequest and Overloaded, with nothing changed.
        """
        request_id = request.request_id
        if request_id in self._requests or self._accounts.has(request_id):
            raise DuplicateRequest(f"request {request_id!r} is running or unacknowledged")
        if len(self._scheduler.waiting) >= self._max_waiting:
            raise Overloaded("too many requests are waiting")
        self.expire(self._clock.now())
        request.found = self._cache.look_up(request.query)
        request.boundaries = new_boundaries(request)
        request.sequences = [
            SequenceState(
                request,
                choice,
                self._cache.new_table(request.query),
                parser,
                sample[choice],
                list(request.query.tokens),
            )
            for choice, parser in enumerate(request.parsers)
        ]
        self._requests[request_id] = request
        self._scheduler.add(request.leader)

    def cancel(self, request_id: str) -> bool:
        """End a request now. False if it is not here. Its blocks are free when this returns."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.started_at is None:
            self._fail(request, "cancelled", "the request was cancelled")
        else:
            for sequence in request.sequences:
                if sequence.finish is None:
                    sequence.finish = "cancelled"
                    self._finish(sequence)
        return True

    def fail(self, sequence: SequenceState, message: str, code: ErrorCode = "internal") -> None:
        """End a choice that the engine can't compute, and its request if that has not begun.

        `code` is told where the request has not begun.
        """
        if sequence.request.started_at is None:
            self._fail(sequence.request, code, message)
        else:
            sequence.finish = "failed"
            self._finish(sequence)

    def drop(self, scope: str, key: Digest | None) -> DropReply:
        """Drop one entry or all entries of a scope, for an operator."""
        dropped = self._cache.entries.drop(scope, key)
        self.publish()
        return DropReply(dropped)

    def expire(self, now: float) -> None:
        self._cache.entries.expire(now)

    def seconds_to_expiry(self, now: float) -> float:
        due = self._cache.entries.next_expiry()
        return math.inf if due is None else max(due - now, 0.0)

    # Along the way.

    def fork_choices(self, leader: SequenceState) -> None:
        """All prompt tokens but the last are computed. From here the other choices share them."""
        request = leader.request
        num_shared = len(request.query.tokens) - 1
        if leader is not request.leader or request.is_forked:
            return
        if leader.table.num_tokens >= num_shared:
            request.is_forked = True
            for sequence in request.sequences[1:]:
                sequence.table = leader.table.fork(num_shared)
                self._scheduler.add_fork(sequence)

    def start_if_first(self, sequence: SequenceState) -> None:
        """The prompt is computed: write the entries. From this frame on they are readable."""
        request = sequence.request
        if request.started_at is not None:
            return
        assert request.found is not None and request.began_at is not None
        now = request.started_at = self._clock.now()
        written = self._cache.write(request.query, request.found, sequence.table, now)
        request.usage = written.usage
        self._accounts.started(written.usage, now - request.began_at)
        if written.held is not None:
            # What went before is told before, since it may have been the same names.
            self._events += [*self._cache.pool.changes.take(), written.held]
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
                read_tier=written.read_tier,
                bring_back_seconds=request.seconds_to_bring_back(written.read_tier),
            )
        )
        if request.request.sampling.max_tokens == 0:
            sequence.finish = "length"

    def drew(self, num_proposed: int, num_accepted: int) -> None:
        """A step drew tokens of one choice: one, and so many that had been proposed."""
        self._accounts.drew(num_proposed, num_accepted)

    def take_token(self, sequence: SequenceState, token: TokenId) -> None:
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
        elif len(sequence.tokens) >= self._max_context_tokens:
            sequence.finish = "context"

    def take_deltas(
        self, sequence: SequenceState, deltas: Sequence[Delta], num_output: int
    ) -> None:
        """Take what a server of text answered. `num_output` tokens have come so far, about."""
        if deltas:
            self._note_output(sequence)
        missing = num_output - sequence.num_output
        if missing < 0:
            del sequence.tokens[missing:]
        sequence.tokens.extend([0] * missing)
        _say(sequence, deltas)

    def _note_output(self, sequence: SequenceState) -> None:
        """A token of the choice has come, or a piece of text from a server of text."""
        now, last = self._clock.now(), sequence.last_output_at
        sequence.last_output_at = now
        if last is not None:
            self._accounts.distributions.inter_token_seconds.add(now - last)

    def finish_ended(self, running: Iterable[SequenceState]) -> None:
        for sequence in list(running):
            if sequence.finish is not None:
                self._finish(sequence)

    def publish(self) -> None:
        """Publish the changes of leases and names since the last time, and this step's writes."""
        ended = self._cache.entries.leases.take_ended()
        for lease in ended:
            self._accounts.lease_ended(lease.reason)
            self._events.append(
                LeaseEnded(
                    seq=0, entry=lease.entry.key.hex(), names=lease.names, reason=lease.reason
                )
            )
        self._events += self._cache.pool.changes.take()
        if self._events:
            events, self._events = self._events, []
            self.num_published += len(events)
            self._publish(events)

    # Out.

    def _finish(self, sequence: SequenceState) -> None:
        """Close one choice. The last one closes the request."""
        request, reason = sequence.request, sequence.finish
        assert reason is not None
        if request.started_at is None:
            self._fail(request, "overloaded", "the prompt does not fit into the engine's memory")
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
            )
        )
        self._scheduler.remove(sequence)
        request.num_finished += 1
        request.output_tokens += sequence.num_output
        request.thinking_tokens += sequence.parser.thinking_tokens
        if request.num_finished == len(request.sequences):
            self._close(request, reason)

    def _close(self, request: RequestState, reason: FinishReason) -> None:
        assert request.started_at is not None
        self._close_books(request, reason)
        request.emit(
            Done(
                request_id=request.request_id,
                output_tokens=request.output_tokens,
                decode_seconds=self._clock.now() - request.started_at,
            )
        )

    def _fail(self, request: RequestState, code: ErrorCode, message: str) -> None:
        """End a request whose response never began. Nothing was written."""
        for sequence in request.sequences:
            if self._scheduler.has(sequence):
                self._scheduler.remove(sequence)
        if request.found is not None:
            self._cache.take_back(request.found)
        self._close_books(request, "cancelled" if code == "cancelled" else "failed")
        request.emit(Failed(code=code, message=message))

    def _close_books(self, request: RequestState, reason: FinishReason) -> None:
        del self._requests[request.request_id]

        def close(prefilled_tokens: int) -> None:
            self._accounts.ended(
                FinalCounts(
                    request_id=request.request_id,
                    epoch=self._epoch,
                    reason=reason,
                    usage=request.usage,
                    prefilled_tokens=prefilled_tokens,
                    output_tokens=request.output_tokens,
                    thinking_tokens=request.thinking_tokens,
                    scope=request.request.scope,
                ),
                request.request.record,
            )

        if request.usage is not None:
            close(0)
        elif self.ask_prefilled is not None and self.ask_prefilled(request, close):
            self._accounts.awaits(request.request_id)
        else:
            close(request.computed.total)


def _say(sequence: SequenceState, deltas: Iterable[Delta]) -> None:
    """Emit deltas, marked with their choice, which parsers don't know."""
    for delta in deltas:
        choice = sequence.choice
        sequence.request.emit(msgspec.structs.replace(delta, choice=choice) if choice else delta)
