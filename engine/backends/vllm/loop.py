"""Brings requests to vLLM and its tokens back, on the event loop's thread.

vLLM steps by itself. Here its outputs become frames, and the connector's reports become first
frames. Entries expire here. Only calls that must know what a step did wait for a step.

Our record of what vLLM holds is the same cache, entries and names as on our own blocks. The
connector says which entries are leased and which blocks are gone. Expiry and look-ups are decided
here.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog

from engine.backends.external import ExternalLoop, MirrorCache, MirrorPool, new_order
from engine.backends.vllm.core import OrderRefused, Output, TurnFailed, VllmCore
from engine.backends.vllm.directive import (
    Directive,
    Loss,
    Report,
    Want,
    WantOutcome,
    Watch,
)
from engine.cache.block import Block, Entry, Recorded
from engine.cache.digests import TOKEN_BYTES, ChainHasher
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.lookup import longest_hit
from engine.cache.prefix_cache import CacheQuery, Lookup
from engine.cache.table import BlockTable
from engine.clock import ManualClock
from engine.protocol import EntryState, ErrorCode, Failed, HeldName, MissReason
from engine.protocol.reports import LeaseEnd
from engine.schedule.accounting import Accounting
from engine.schedule.request import RequestState, SequenceState
from engine.store.journal import Put, Record, Times, Touch
from engine.supervisor import Supervisor, trace_of

_WATCH = "name:"


class HeldEntries(Entries):
    """Entries whose leases the connector holds. It reports which entries got or lost a lease."""

    def __init__(
        self, pool: MirrorPool, *, grace_seconds: float = 0.0, is_recorded: bool = False
    ) -> None:
        """With `is_recorded` a tier below has a journal, for which `take_records` makes records."""
        super().__init__(
            pool,
            lease_share=1.0,
            scope_lease_share=1.0,  # the connector decides
            grace_seconds=grace_seconds,
        )
        # The last report's states. Of entries that are not written yet, `write` reads them.
        self._states: dict[Digest, EntryState] = {}
        # The keys of entries that ended since this list was emptied last.
        self.removed: list[Digest] = []
        # The keys of entries whose lease lapsed, in order. The connector may still hold the leases.
        self.unleased: dict[Digest, None] = {}
        self._is_recorded = is_recorded
        self._changed: dict[Entry, None] = {}

    def learn(self, held: Iterable[WantOutcome]) -> None:
        """Note what became of a request's wants, and lease what the connector leases."""
        self._states = {Digest(bytes.fromhex(outcome.key)): outcome.state for outcome in held}
        for key in self._states:
            entry = self.get(key)
            if entry is not None and not entry.is_broken and not entry.is_leased:
                self._try_lease(entry)

    def lose(self, key: Digest, loss: Loss) -> None:
        """Note an entry that lost its lease or its content in vLLM."""
        entry = self.get(key)
        if entry is None:
            return
        if loss.reason in ("sacrificed", "yielded"):
            if entry.is_leased:
                self._end_lease(entry, "sacrificed" if loss.reason == "sacrificed" else "yielded")
            return
        # vLLM's cache is emptied by hand alone (`/reset_prefix_cache`, sleep).
        why: MissReason = "dropped" if loss.reason == "reset" else entry.why_broken
        self.end(entry, why, "dropped")
        entry.is_broken = True

    def take_back_put(self, put: Put, blocks: list[Block], now: float, wall: float) -> None:
        """Take in an entry of an earlier process. Its `blocks` are those of the tier below."""
        entry = put.entry(now, wall, is_leased=False)
        entry.blocks = entry.stored = blocks
        entry.recorded = Recorded(blocks, put.times.is_leased)
        self._states = {entry.key: "leased" if put.times.is_leased else "best_effort"}
        self.take_in(entry)

    @property
    def has_changed(self) -> bool:
        """Whether entries may have changed that the journal has to know of."""
        return bool(self._changed)

    def take_records(self, now: float, wall: float) -> list[Record]:
        """The records of what changed since the last call, for the journal.

        They have nothing of entries that ended: these are released by `take_released`. They have
        nothing of entries that nobody asked to hold: the tier below has no copy of these.
        """
        changed = self._changed
        self._changed = {}
        records = list[Record]()
        for entry in filter(self.is_live, changed):
            times = Times.of(entry, now, wall)
            if entry.recorded is not None:
                records.append(Touch(key=entry.key.hex(), times=times))
                continue
            if not entry.is_asked_for:
                continue
            entry.recorded = Recorded([], entry.is_leased)
            packed = b"".join(bytes(block.tokens) for block in entry.blocks)
            names = {
                index: [HeldName(name, tokens) for name, tokens in block.names.items()]
                for index, block in enumerate(entry.blocks)
                if block.names
            }
            records.append(Put.of(entry, times, packed, names))
        return records

    def _lapse(self, entry: Entry) -> None:
        if entry.is_leased:
            self.unleased[entry.key] = None
        super()._lapse(entry)

    def _try_lease(self, entry: Entry) -> bool:
        if entry.is_asked_for and self._states.get(entry.key) != "leased":
            if not entry.is_leased and entry.why_unleased in (None, "automatic"):
                entry.why_unleased = "over_budget"
            return False
        return super()._try_lease(entry)

    def bring_back(self, entry: Entry, blocks: Sequence[Block]) -> None:
        super().bring_back(entry, blocks)
        if not entry.is_partly_away:
            entry.stored = None  # it may have a copy, but the connector does not say so

    def _lease_in_store(self, entry: Entry) -> bool:
        if not entry.is_partly_away:
            return False
        self.leases.num_granted += 1
        entry.is_leased = True
        entry.lease_tier = "disk"
        entry.why_unleased = None
        return True

    def _end_lease(self, entry: Entry, reason: LeaseEnd) -> None:
        if entry.lease_tier == "device":
            super()._end_lease(entry, reason)
            return
        entry.is_leased = False
        free = (block for block in entry.blocks if not block.is_promised)
        self.leases.tell_end(entry, reason, [name for block in free for name in block.names])

    def _note(self, entry: Entry) -> None:
        if self._is_recorded:
            self._changed[entry] = None

    _want_copy = _note

    def end(self, entry: Entry, miss_reason: MissReason, lease_end: LeaseEnd | None = None) -> None:
        super().end(entry, miss_reason, lease_end)
        self.removed.append(entry.key)


class HeldCache(MirrorCache):
    """The cache of an engine that computes in vLLM.

    A request is looked up here, asks the connector by its `directive`, and is admitted with the
    connector's report (`admit`). A key that no request wants and no entry has is to be released
    (`take_released`).
    """

    entries: HeldEntries

    def __init__(
        self,
        pool: MirrorPool,
        entries: HeldEntries,
        hasher: ChainHasher,
        *,
        has_states: bool = False,
    ) -> None:
        super().__init__(pool, entries, hasher)
        self.has_states = has_states
        self._wanted: Counter[Digest] = Counter()

    def restore(self, puts: Sequence[Put], now: float, wall: float) -> None:
        """Take in the entries that the tier below has from an earlier process."""
        size = self.pool.block_size * TOKEN_BYTES
        if not puts:
            return
        below = MirrorPool(
            sum(len(put.packed) // size for put in puts), self.pool.block_size, tier="disk"
        )
        below.changes = self.pool.changes
        self.pools.append(below)
        for put in puts:
            digests = self.digests(put.scope, array("I", put.packed), put.adapter)
            blocks = below.mirror(digests)
            self.entries.take_back_put(put, blocks, now, wall)
            for index, names in put.names.items():
                blocks[index].names.update({name.digest: name.tokens for name in names})
            below.release_chain(blocks)

    def directive(
        self, request_id: str, query: CacheQuery, lookup: Lookup, lease_blocks: int | None
    ) -> Directive:
        """What a request that was looked up asks of the connector. Call `let_off` once it is over.

        `lease_blocks` is the scope's share of the lease budget. None is the engine's default.
        """
        wants: dict[Digest, Want] = {}
        for mark in lookup.marks:
            tokens = mark.tokens
            key = query.digests.at(tokens)
            entry = self.entries.find(query.digests, tokens, query.arrived_at)
            if entry is not None:
                want = _want_of(entry)
                is_asked_for = entry.is_asked_for or mark.hold
                wants[key] = msgspec.structs.replace(want, is_asked_for=is_asked_for)
                continue
            expires_at = query.arrived_at + self.entries.seconds(mark.ttl, mark.seconds)
            wants[key] = Want(
                key=key.hex(), tokens=tokens, expires_at=expires_at, is_asked_for=mark.hold
            )
        hit = lookup.hit
        if hit is not None and hit.key not in wants:
            wants[hit.key] = _want_of(hit)
        self._wanted.update(wants.keys())
        size = self.pool.block_size
        lengths = sorted({name.tokens // size for name in query.names} - {0})
        watches = [
            Watch(key=_WATCH + query.digests.full[length - 1].hex(), tokens=length * size)
            for length in lengths
        ]
        return Directive(
            request_id=request_id,
            scope=query.scope,
            wants=sorted(wants.values(), key=lambda want: want.tokens),
            read=None if hit is None else hit.key.hex(),
            lease_blocks=lease_blocks,
            watches=watches,
        )

    def let_off(self, directive: Directive) -> list[Digest]:
        """Note that a request started or never will. The result is its keys that nothing needs."""
        keys = [Digest(bytes.fromhex(want.key)) for want in directive.wants]
        self._wanted.subtract(keys)
        self._wanted += Counter()  # drops counts of zero
        return self._idle(keys)

    def take_released(self) -> list[Digest]:
        """The keys of ended entries that no request waits for. The connector may end them."""
        removed = self.entries.removed
        self.entries.removed = []
        return self._idle(removed)

    def take_unleased(self) -> list[Digest]:
        """The keys of lapsed leases whose entries are kept for turns that arrived before.

        A key that a request waits for comes once that request has started, which may lease it anew.
        """
        unleased = self.entries.unleased
        entries = self.entries
        due = [key for key in unleased if not self._wanted[key]]
        for key in due:
            del unleased[key]
        lapsed = ((key, entries.get(key)) for key in due)
        return [key for key, entry in lapsed if entry is not None and not entry.is_leased]

    def admit(self, query: CacheQuery, lookup: Lookup, table: BlockTable, report: Report) -> None:
        """Settle a request that has its first token: what it read, and what is held for it.

        If the hit was lost on the way, another entry is read whose tokens were all reused, or none.
        """
        reused = report.hit_tokens
        if not self._settle(query, lookup, reused):
            self.let_go(lookup)

            def covered(tokens: int) -> Entry | None:
                if tokens > reused:
                    return None
                return self.entries.find(query.digests, tokens, query.arrived_at)

            hit = lookup.hit = longest_hit(query.segments, lookup.marks, covered, query.lookback_to)
            lookup.read = 0 if hit is None else min(hit.tokens, reused)
            self.explain(query, lookup)
            if lookup.miss_reason is None and hit is None:
                lookup.miss_reason = "best_effort_evicted"
            self._lost(lookup)
        states = {Digest(bytes.fromhex(held.key)): held.state for held in report.held}
        written = [
            mark
            for mark in lookup.marks
            if states.get(query.digests.at(mark.tokens), "none") != "none"
        ]
        self._unwritten = {mark.segment for mark in lookup.marks if mark not in written}
        lookup.marks = written
        self.entries.learn(report.held)
        self._mirror(query, table)

    def lose(self, losses: Sequence[Loss]) -> None:
        """Take in what the connector lost, in its order."""
        for loss in losses:
            if loss.key.startswith(_WATCH):
                self.pool.lose(Digest(bytes.fromhex(loss.key.removeprefix(_WATCH))))
            else:
                self.entries.lose(Digest(bytes.fromhex(loss.key)), loss)

    def _idle(self, keys: Iterable[Digest]) -> list[Digest]:
        """Those of the keys that no request wants and no entry has."""
        return [key for key in keys if not self._wanted[key] and self.entries.get(key) is None]


def _want_of(entry: Entry) -> Want:
    return Want(
        key=entry.key.hex(),
        tokens=entry.tokens,
        expires_at=entry.expires_at,
        is_asked_for=entry.is_asked_for,
    )


log = structlog.get_logger()

FAILED = "the engine failed"
LOSS_SECONDS = 0.25
"""How often a running engine is asked for losses. It is also asked at every first token."""
IDLE_LOSS_SECONDS = 1.0
"""How often it is asked while no request of ours runs."""


class VllmLoop(ExternalLoop):
    """Has a task for each choice that vLLM computes.

    The `on_crash` of `start` is called for an error after which vLLM can't go on.
    `max_leased_blocks` is the whole budget of leases. A request may name its scope's share of it.
    """

    _cache: HeldCache

    def __init__(
        self,
        core: VllmCore,
        accounting: Accounting,
        cache: HeldCache,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        *,
        max_waiting: int,
        max_leased_blocks: int,
        max_context_tokens: int,
    ) -> None:
        super().__init__(accounting, cache, event_loop, supervisor, max_waiting=max_waiting)
        self._core = core
        self._max_leased_blocks = max_leased_blocks
        self._max_context_tokens = max_context_tokens
        # What each choice asked of the connector.
        self._directives: dict[SequenceState, Directive] = {}
        # The requests whose wants are not settled.
        self._wanting: dict[RequestState, Directive] = {}
        self._released: list[Digest] = []
        self._num_orders = 0

    def stop(self) -> None:
        """End our tasks, and vLLM if it is ours. Answers that run are cut off."""
        super().stop()
        self._core.shut_down()

    async def abandon(self, reason: str) -> None:
        """End our part in a vLLM that others use, because our books failed.

        Our requests fail, and vLLM's own go on. The connector gives back all that it holds, because
        nobody knows any more what it holds that for.
        """
        order_ids = [self._directives[sequence].request_id for sequence in self._serving]
        await self.fail_all(FAILED)
        aborts = (self._core.abort(order_id) for order_id in order_ids)
        await asyncio.gather(*aborts, return_exceptions=True)
        await self._core.switch_off(reason)

    def _fail(self, sequence: SequenceState, message: str, code: ErrorCode = "internal") -> None:
        try:
            super()._fail(sequence, message, code)
        except Exception as error:
            if not self._is_stopped:
                raise
            log.error("a request could not be closed", trace=trace_of(error))
            sequence.request.emit(Failed(code=code, message=message))

    # Requests.

    def _begin(self, sequence: SequenceState) -> None:
        query = sequence.request.query
        lookup = sequence.request.lookup
        # A client may use an id again, but the connector must not get one twice.
        self._num_orders += 1
        order_id = f"{sequence.request.request_id}/{self._num_orders}"
        share = query.lease_share
        lease_blocks = None if share is None else int(self._max_leased_blocks * share)
        if sequence is sequence.request.leader:
            assert lookup is not None
            directive = msgspec.structs.replace(
                self._cache.directive(order_id, query, lookup, lease_blocks),
                unix_offset=time.time() - self._clock.now(),
            )
            self._wanting[sequence.request] = directive
        else:
            # Its leader has begun, so vLLM has the prompt's full blocks.
            directive = Directive(
                request_id=order_id, scope=query.scope, wants=[], lease_blocks=lease_blocks
            )
        self._directives[sequence] = directive
        super()._begin(sequence)

    def _remove(self, sequence: SequenceState) -> None:
        """Take a choice out, and abort it in vLLM if it still runs.

        The abort comes before anything that is asked of vLLM later.
        """
        directive = self._directives.pop(sequence)
        request = sequence.request
        is_running = self._serving[sequence] is not asyncio.current_task()
        if sequence is request.leader:
            self._end_wants(request)
        super()._remove(sequence)
        if request.started_at is None:
            self._spawn(self._close_failed(request, directive.request_id))
        elif is_running:
            self._spawn(self._core.abort(directive.request_id))

    async def _close_failed(self, request: RequestState, order_id: str) -> None:
        """Close a request that ends before its first token.

        Only vLLM's scheduler knows how much of its prompt was computed. The abort comes first,
        because nothing more is computed after it.
        """
        await self._core.abort(order_id)
        report = await self._core.report(order_id)
        self.accounting.close_failed(request, 0 if report is None else report.computed_tokens)

    def _end_wants(self, request: RequestState) -> None:
        """Settle the wants of a request that began to answer, or never will."""
        directive = self._wanting.pop(request, None)
        if directive is not None:
            self._released += self._cache.let_off(directive)

    async def _generate(self, sequence: SequenceState) -> None:
        is_last = False
        directive = self._directives[sequence]
        request = sequence.request
        order_id = directive.request_id
        order = new_order(sequence, order_id, self._max_context_tokens)
        try:
            outputs = self._core.generate(order, directive)
            del order
            async for output in outputs:
                is_last = output.is_last
                if len(request.sequences) == 1:
                    request.image_prompt = None
                if request.started_at is None:
                    await self._admit(sequence, output, directive)
                self._take(sequence, output)
                if sequence not in self._serving:
                    break
        except OrderRefused as refusal:
            log.error("vLLM refused a request", why=type(refusal.__cause__).__name__)
            self._fail(sequence, "vLLM refused the request")
            self._tell()
            return
        except TurnFailed as failure:
            log.error("vLLM ended a request", why=type(failure.__cause__).__name__)
            self._fail(sequence, str(failure), failure.code)
            self._tell()
            return
        if not is_last:
            await self._core.abort(order_id)

    async def _admit(self, sequence: SequenceState, output: Output, directive: Directive) -> None:
        """Start a request at its first token.

        What vLLM reused and what the connector holds is known now.
        """
        request = sequence.request
        order_id = directive.request_id
        losses, report = await asyncio.gather(self._core.losses(), self._core.report(order_id))
        assert request.lookup is not None
        if report is None:
            raise RuntimeError("the connector has no report of a request that began to answer")
        self._cache.lose(losses)
        self._cache.admit(request.query, request.lookup, sequence.table, report)
        is_manual = isinstance(self._clock, ManualClock)
        request.began_at = request.submitted_at + (0.0 if is_manual else output.queue_seconds)
        self._started(sequence)
        self._end_wants(request)

    def _take(self, sequence: SequenceState, output: Output) -> None:
        for token in output.token_ids:
            if sequence.finish is not None:
                break
            self.accounting.token(sequence, token)
        if output.is_last and sequence.finish is None:
            sequence.finish = "failed"
        self._end_if_finished(sequence)
        self._tell()

    # Along the way.

    def _tell(self) -> None:
        """Publish what happened, and tell the connector which leases and entries ended."""
        super()._tell()
        entries = self._cache.entries
        if entries.has_changed:
            records = entries.take_records(self._clock.now(), time.time())
            self._spawn(self._core.record(records))
        unleased = [key.hex() for key in self._cache.take_unleased()]
        if unleased:
            self._spawn(self._core.unlease(unleased))
        released = self._released
        self._released = []
        keys = [key.hex() for key in (*released, *self._cache.take_released())]
        if keys:
            self._spawn(self._core.release(keys))

    def start(self, on_crash: Callable[[BaseException], None]) -> None:
        self._event_loop.call_soon_threadsafe(lambda: self._spawn(self._watch_losses()))
        super().start(on_crash)

    async def _watch_losses(self) -> None:
        """Ask for losses again and again.

        Other clients of vLLM take blocks too, whether or not a request of ours runs. An error ends
        the engine: the connector tells a loss once, and no lease may stand on lost content. Once
        the connector is off, it answers with an error.
        """
        # Asked once at the start, so that a scheduler that has changed ends the engine here.
        await self._core.stats()
        while True:
            await asyncio.sleep(LOSS_SECONDS if self._serving else IDLE_LOSS_SECONDS)
            self._cache.lose(await self._core.losses())
            self._tell()
