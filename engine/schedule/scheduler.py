"""Plans the next step: first decoding sequences, then prefill, then waiting requests that fit.

A waiting request is admitted when all blocks of its prompt can be allocated, in order of arrival
within its scope. Scopes take turns by computed tokens, at prefill and at admission. While several
scopes share the engine a step is short (`pace.py`). So a long prompt of one scope does not delay
another scope's short one. Batch sequences are planned behind all interactive ones
(`batch_share.py`).

If the first request in order does not fit, later ones may overtake it, MAX_OVERTAKEN times at most.
After that it gets the blocks of the running sequences as they end. Another request of its scope may
also pass it, if it would evict what that request reuses (`reuse_order.py`). If a running sequence
finds no block for its next token, the youngest sequence is preempted and recomputed later. Batch
sequences are preempted before interactive ones. They are also preempted for interactive requests
that find no block or place. Leases are ended only when nothing else can run.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from engine.cache.digests import common_blocks
from engine.cache.ids import BlockId
from engine.cache.pool import NoFreeBlocks
from engine.cache.prefix_cache import PrefixCache
from engine.cache.store_tier import Load
from engine.cache.table import BlockCopy
from engine.schedule.batch_share import BatchShare
from engine.schedule.pace import StepPace, StepRoom
from engine.schedule.request import PrefillChunk, SequenceState, Twin, prefill_chunks
from engine.schedule.reuse_order import MAX_LOOKED_AT, MAX_OVERTAKEN, ReuseOrder
from engine.schedule.speculation import Speculation
from engine.schedule.waiting import WaitingClasses

MAX_TRIED = 4
"""How many others a step tries after the first request that does not fit. A try reads the whole
prompt."""
SPARE_SHARE = 8
"""For every so many places of `max_running` there is one spare place. A spare place is for a scope
of which nothing else runs."""


def most_running(max_running: int) -> int:
    """How many sequences are admitted together at most, with the spare places."""
    return max_running + max_running // SPARE_SHARE


class Arrivals(NamedTuple):
    """What lower tiers bring in a step."""

    # Copies from host to device blocks.
    promotions: list[BlockCopy]
    loads: list[Load]
    # How many blocks have to be computed after all.
    num_missed: int = 0


class Scheduler:
    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_step_tokens: int,
        max_running: int,
        speculation: Speculation | None = None,
    ) -> None:
        """`max_step_tokens` bounds a step's prefill, and so the time for which decoding waits."""
        self._cache = cache
        self.speculation = speculation
        self._pace = StepPace(max_step_tokens)
        self._reuse_order = ReuseOrder(cache, max_step_tokens)
        self._max_running = max_running
        self._batch_share = BatchShare()
        self._has_batch_turn = False
        self.waiting = WaitingClasses()
        self.running: list[SequenceState] = []
        self.copies: list[BlockCopy] = []
        self.num_preempted = 0

    @property
    def is_shared(self) -> bool:
        """Whether several scopes have requests, or had some lately."""
        return self._pace.is_shared

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: SequenceState) -> None:
        if self.has_work:
            # What it reuses must stay in memory while it waits.
            self._cache.touch(sequence.request.query.digests)
        self.waiting[sequence.is_batch].add(sequence)

    def has(self, sequence: SequenceState) -> bool:
        return sequence in self.running or sequence in self.waiting[sequence.is_batch]

    def remove(self, sequence: SequenceState) -> None:
        """Take a waiting or running sequence out, and give its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting[sequence.is_batch].remove(sequence)
        if sequence is sequence.request.leader:
            sequence.request.let_go(self._cache)
        sequence.release()

    def schedule(self, now: float) -> list[PrefillChunk]:
        """The next step's chunks. The copies of `take_copies` must be made before them."""
        waiting = self.waiting
        scopes = {sequence.scope for sequence in self.running if not sequence.is_batch}
        scopes |= waiting[False].scopes
        batch_scopes = {sequence.scope for sequence in self.running if sequence.is_batch}
        batch_scopes |= waiting[True].scopes
        scopes |= {f"batches of {scope}" for scope in batch_scopes}
        self._pace.see(scopes, now)
        # Look the next request up again if its blocks were given up, before anything is written.
        for is_batch in (False, True):
            sequence = self._next_waiting(is_batch)
            if sequence is not None and sequence.lacks_look_up:
                sequence.request.look_up(self._cache)
        chunks = self._decode(is_batch=False)
        room = self._pace.new_room(len(chunks))
        chunks += self._prefills(room, now, is_batch=False)
        num_interactive = len(chunks)
        is_busy = chunks or any(
            sequence.is_part_due and not sequence.is_batch for sequence in self.running
        )
        allows = self._batch_share.allows(self.running, self.waiting, now)
        self._has_batch_turn = allows or not is_busy
        if self._has_batch_turn:
            chunks += self._decode(is_batch=True)
            if num_interactive:
                is_overdue = self._batch_share.is_overdue(now)
                room = self._pace.new_room(0) if is_overdue else self._pace.new_part()
            chunks += self._prefills(room, now, is_batch=True)
        if self.speculation is not None:
            chunks = self.speculation.extended(chunks, self._cache.pool, self.copies)
        self._charge(chunks[:num_interactive], is_batch=False)
        self._charge(chunks[num_interactive:], is_batch=True)
        return chunks

    def _charge(self, chunks: Sequence[PrefillChunk], *, is_batch: bool) -> None:
        """Charge the scopes of a class for what a step computes of theirs."""
        computed = Counter[str]()
        for chunk in chunks:
            computed[chunk.sequence.scope] += chunk.count + len(chunk.draft)
        self.waiting[is_batch].charge(computed)

    def computed(self, chunks: Sequence[PrefillChunk], seconds: float) -> None:
        """Learn from a step that computed these chunks in so many seconds."""
        if any(chunk.sequence.is_batch for chunk in chunks):
            self._batch_share.computed()
        prefilled = [(chunk.start, chunk.count) for chunk in chunks if not chunk.is_decode]
        self._pace.learn(prefilled, seconds)

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockId], list[BlockCopy]]:
        """The work that must be done before anything is written on the device.

        In this order: copies to the host, blocks to clear, copies on the device.
        """
        host = self._cache.host
        pool = self._cache.pool
        copies = self.copies
        self.copies = []
        to_clear = pool.to_clear
        pool.to_clear = []
        demotions = host.take_demotions() if host is not None else []
        return demotions, to_clear, copies

    def take_arrivals(self, max_loads: int = 0) -> Arrivals:
        """The blocks that one step brings back, in the order in which their sequences wait.

        They are at most as many copies as the host tier allows, and `max_loads` from the store.
        """
        promotions: list[BlockCopy] = []
        loads: list[Load] = []
        num_missed = 0
        is_first = True
        arriving = [(sequence, table) for sequence in self.running for table in sequence.tables]
        for sequence, table in arriving:
            while table.incoming:
                block = table.next_incoming
                if block.tier == "host":
                    assert self._cache.host is not None
                    if len(promotions) >= self._cache.host.max_copies:
                        break
                    promotions.append(self._cache.host.promote(table))
                    continue
                store = next(tier for tier in self._cache.stores if tier.pool is block.home)
                if store.is_lost(block):
                    request = sequence.request
                    if self._cache.state_blocks or sequence.is_whole:
                        # Its entry is read whole or not at all, so look it up again.
                        self._preempt(sequence)
                        break
                    is_new = sequence is request.leader and request.started_at is None
                    self._cache.miss(request.query, request.lookup if is_new else None, table)
                    num_missed += 1
                    continue
                load = store.promote(table) if len(loads) < max_loads else None
                if load is None:
                    store.ask(table.arriving(), is_first=is_first)
                    is_first = False
                    break
                loads.append(load)
        return Arrivals(promotions, loads, num_missed)

    # Inside.

    def _next_waiting(self, is_batch: bool) -> SequenceState | None:
        """The next request of its class that does not wait for a twin's blocks.

        Requests that wait for a twin keep their places.
        """
        queue = self.waiting[is_batch]
        ready = (sequence for sequence in queue if not self._awaits_twin(sequence))
        return self._reuse_order.next(next(ready, None), queue, self._awaits_twin)

    def _next_behind(
        self, overtaken: Sequence[SequenceState], is_batch: bool
    ) -> SequenceState | None:
        """The next request that may fit. The requests in `overtaken` do not fit."""
        if not overtaken:
            return self._next_waiting(is_batch)
        if len(overtaken) > MAX_TRIED:
            return None
        if any(other.request.num_overtaken >= MAX_OVERTAKEN for other in overtaken):
            return None
        free = self._cache.pool.num_reclaimable
        for sequence in islice(self.waiting[is_batch], MAX_LOOKED_AT):
            request = sequence.request
            if request.num_needed > free or sequence in overtaken or sequence.lacks_look_up:
                continue
            if request.started_at is None and sequence is not request.leader:
                continue  # the first choice begins before the others
            if not self._awaits_twin(sequence):
                return sequence
        return None

    def _awaits_twin(self, sequence: SequenceState) -> bool:
        """Whether a running sequence computes what this one would compute, and waiting pays.

        It pays if it saves at least a block, and at least half of the tokens it waits for. So a
        request that read most of the prefix from an entry does not wait for a sequence that
        computes it from the beginning. There is no circle: a sequence waits only for running
        sequences, and these wait for none.
        """
        request = sequence.request
        size = self._cache.pool.block_size
        most_saved = 0
        if not sequence.is_new or self._cache.state_blocks:
            return False
        twin = request.twin
        is_computing = twin is not None and twin.sequence in self.running
        if twin is not None and is_computing and twin.sequence.num_computed < twin.tokens:
            return True
        digests = request.query.digests
        request.twin = None
        read = request.lookup.read if request.lookup is not None else 0
        usable = (digests.num_tokens - 1) // size
        for other in self.running:
            # A batch sequence may be paused: an interactive request does not wait for it.
            is_done = other.num_pending < size and not other.is_preparing
            if is_done or other.is_batch > request.leader.is_batch:
                continue
            shared = min(common_blocks(digests, other.request.query.digests), usable) * size
            computed = other.num_computed
            saved = shared - max(read, computed)
            if saved >= size and 2 * saved >= shared - computed and saved > most_saved:
                request.twin = Twin(other, shared)
                most_saved = saved
        if request.twin is not None:
            request.raced = max(request.raced, request.twin.tokens)
        return request.twin is not None

    def _decode(self, *, is_batch: bool) -> list[PrefillChunk]:
        chunks = []
        for sequence in [sequence for sequence in self.running if sequence.is_batch == is_batch]:
            if sequence.table.incoming:
                continue  # its last token may be on its way
            # Get blocks for one more token, by preempting the youngest sequence if necessary.
            while sequence.num_pending == 1 and sequence.can_sample and sequence in self.running:
                try:
                    self.copies.extend(sequence.table.prepare(1))
                except NoFreeBlocks:
                    if len(self.running) > 1:
                        self._preempt(self._youngest())
                    elif not self._free_what_nobody_runs_on():
                        # Alone with the whole pool: there is nothing to wait for.
                        sequence.finish = "context"
                        break
                else:
                    start = sequence.table.num_tokens
                    chunks.append(PrefillChunk(sequence, start, 1, is_last=True))
                    break
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def _youngest(self) -> SequenceState:
        """The sequence to preempt: the youngest batch sequence, else the youngest of all."""
        batch = [sequence for sequence in self.running if sequence.is_batch]
        return batch[-1] if batch else self.running[-1]

    def _preempt_batch(self, needy: SequenceState, keep: int = 0) -> bool:
        """Preempt the youngest batch sequence for an interactive request.

        `keep` batch sequences go on running. Return whether a sequence was preempted.
        """
        if needy.is_batch or sum(sequence.is_batch for sequence in self.running) <= keep:
            return False
        self._preempt(self._youngest())
        return True

    def _prefills(self, room: StepRoom, now: float, *, is_batch: bool) -> list[PrefillChunk]:
        """Prefill running sequences of a class and admit the next, the least served scope first.

        A running sequence wins a tie, unless its prompt is long and the waiting one is short.
        """
        chunks: list[PrefillChunk] = []
        queue = self.waiting[is_batch]
        running = (sequence for sequence in self.running if sequence.is_batch == is_batch)
        pending = (
            sequence for sequence in running if sequence.num_pending > 1 and sequence.can_sample
        )
        prefilling = deque(sorted(pending, key=queue.served))
        overtaken: list[SequenceState] = []
        candidate = self._next_waiting(is_batch)
        if not is_batch:
            self._pace.begin(self.running, candidate)
        while room.is_left and (prefilling or candidate is not None):
            is_admitted = False
            goes_on = False
            if candidate is not None and prefilling:
                # The scope that got less comes first.
                first = prefilling[0]
                goes_on = queue.served(first) <= queue.served(candidate)
                if queue.served(first) == queue.served(candidate) and self._pace.is_shared:
                    goes_on = self._pace.is_short(first) or not self._pace.is_short(candidate)
            if candidate is None or goes_on:
                sequence = prefilling.popleft()
                if self._pace.yields(sequence):
                    continue
            elif not room.tokens_for(candidate) or self._pace.yields(candidate):
                candidate = None
                continue
            elif self._admit(candidate, now):
                self._reuse_order.admitted(candidate, overtaken)
                sequence = candidate
                candidate = self._next_behind(overtaken, is_batch)
                self._pace.admitted(sequence)
                is_admitted = True
            else:
                overtaken.append(candidate)
                candidate = self._next_behind(overtaken, is_batch)
                continue
            for chunk in prefill_chunks(sequence, room.tokens_for(sequence)):
                chunks.append(chunk)
                room.take(chunk.start, chunk.count)
            # Its scope pays for the time that was spent, even if next to nothing is computed.
            num_blocks = len(sequence.tokens) // self._cache.pool.block_size
            tokens = room.take_admission(num_blocks) if is_admitted else 0
            if tokens:
                queue.charge({sequence.scope: tokens})
        return chunks

    def _admit(self, sequence: SequenceState, now: float) -> bool:
        """Have it run, if there is a place and room for it.

        The spare places are for scopes of which nothing runs. So no scope keeps others out by
        running many sequences.
        """
        if sequence.lacks_look_up or not sequence.can_sample:
            return False
        num_places_left = self._max_running - len(self.running)
        # One batch sequence keeps its place, so that batches get their floor.
        if num_places_left <= 0 and not self._preempt_batch(sequence, keep=1):
            is_new_scope = all(other.scope != sequence.scope for other in self.running)
            if not is_new_scope or len(self.running) >= most_running(self._max_running):
                return False
        request = sequence.request
        while True:
            try:
                self.copies += sequence.begin(self._cache)
            except NoFreeBlocks as lack:
                request.num_needed = lack.num_needed
                if self._preempt_batch(sequence):
                    continue
                if self.running:
                    return False
                if self._free_what_nobody_runs_on(besides=sequence):
                    continue
                sequence.finish = "context"  # it does not fit into the whole pool
            else:
                if request.began_at is None:
                    request.began_at = now
            break
        self.waiting[sequence.is_batch].remove(sequence)
        self.running.append(sequence)
        return sequence.finish is None

    # Work between two steps.

    def next_to_prepare(self) -> SequenceState | None:
        """The sequence that gets a part of its work done before the next step.

        One sequence of a class is worked on until it is done. A batch sequence gets a part only
        after a step that computed batch sequences. Then it goes first, so that batches get their
        floor.
        """
        has_batch_turn = self._has_batch_turn
        due = [sequence for sequence in self.running if sequence.is_part_due]
        if not has_batch_turn:
            due = [sequence for sequence in due if not sequence.is_batch]

        def order(sequence: SequenceState) -> tuple[bool, bool, int]:
            served = self.waiting[sequence.is_batch].served(sequence)
            return sequence.is_batch != has_batch_turn, sequence.parts is None, served

        return min(due, key=order, default=None)

    def prepare(self, sequence: SequenceState) -> None:
        """Do a part of its work, and charge its scope. After the last part it goes on."""
        if sequence.parts is None:
            sequence.parts = sequence.new_parts()
        num_tokens = next(sequence.parts, None)
        if num_tokens is not None:
            if sequence.is_batch:
                self._batch_share.computed()
            self.waiting[sequence.is_batch].charge({sequence.scope: num_tokens})
            return
        sequence.parts = None
        while sequence.finish is None:
            try:
                self.copies += sequence.go_on(self._cache)
            except NoFreeBlocks as lack:
                sequence.request.num_needed = lack.num_needed
                if len(self.running) > 1:
                    self._preempt(sequence)
                elif self._free_what_nobody_runs_on():
                    continue  # if it were preempted, it would be admitted and preempted for ever
                else:
                    sequence.finish = "context"
            return

    def _preempt(self, sequence: SequenceState) -> None:
        """Give the sequence's blocks back and put it first in the queue.

        Its tokens are recomputed or reused later.
        """
        self.num_preempted += 1
        self.running.remove(sequence)
        sequence.release()
        if sequence.is_new:
            sequence.request.give_up(self._cache)
        self.waiting[sequence.is_batch].put_back(sequence)

    def _free_what_nobody_runs_on(self, besides: SequenceState | None = None) -> bool:
        """Free blocks when nothing else can run.

        The blocks that waiting requests have pinned go first. Then leases end, one at a time.
        """
        for sequence in reversed(list(self.waiting)):
            request = sequence.request
            if sequence is not besides and request.has_pinned_blocks:
                request.give_up(self._cache)
                return True
        return self._cache.entries.leases.sacrifice()
