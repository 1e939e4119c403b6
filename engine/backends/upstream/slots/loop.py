"""Brings a request into a slot: restore, compute to each mark, save, answer.

The slot is the request's alone from the first of these to the last. A mark's prefix is computed by
a request of its own, so that the slot has exactly its tokens when it is saved. So a write is what
the server said it saved, and a read what it said it reused.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import structlog

from engine.backends.external import Order, new_order
from engine.backends.upstream.loop import UpstreamLoop
from engine.backends.upstream.server import (
    Facts,
    Place,
    UpstreamError,
    UpstreamGone,
    UpstreamRejected,
)
from engine.backends.upstream.servers import Piece
from engine.backends.upstream.slots.books import FileSizes, Freed, Saved, SlotCache
from engine.backends.upstream.slots.files import SlotFiles, new_part
from engine.backends.upstream.slots.places import Slot, SlotBook
from engine.backends.upstream.slots.server import SlotServer, SlotState
from engine.cache.block import Entry
from engine.cache.digests import TOKEN_BYTES
from engine.cache.ids import Digest
from engine.protocol import BestEffortReason
from engine.schedule.accounting import Accounting
from engine.schedule.request import SequenceState
from engine.store.journal import SavedFile
from engine.supervisor import Supervisor

log = structlog.get_logger()

RETRY_SECONDS = 30.0
"""Seconds without a save after one that failed."""
SETTLE_SECONDS = 0.05
"""Between two questions whether a slot has come to rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """What was found out of a server that keeps leases."""

    # How much a file takes.
    sizes: FileSizes
    # What all files may take, in bytes.
    max_bytes: int
    # A longer file or slot may be cut down to a prefix. Else only exact prefixes are read.
    may_trim: bool


@dataclass(slots=True)
class _Way:
    """A request's way to its answer."""

    order: Order
    files: dict[Digest, SavedFile] = field(default_factory=dict)
    refused: dict[Digest, BestEffortReason] = field(default_factory=dict)
    is_restored: bool = False
    # The tokens that its first computation reused.
    reused: int | None = None


class SlotLoop(UpstreamLoop):
    _cache: SlotCache
    _server: SlotServer

    def __init__(
        self,
        server: SlotServer,
        facts: Facts,
        accounting: Accounting,
        cache: SlotCache,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        suspect: Callable[[], None],
        *,
        max_waiting: int,
        files: SlotFiles,
        plan: SlotPlan,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(
            server,
            facts,
            accounting,
            cache,
            event_loop,
            supervisor,
            suspect,
            max_waiting=max_waiting,
        )
        self._files = files
        self._plan = plan
        self._wall = wall
        self._book = SlotBook(facts.max_running)
        self._ways: dict[SequenceState, _Way] = {}
        # A save stalls all slots, and what it writes comes before what makes way goes: one at a
        # time bounds both.
        self._saving = asyncio.Lock()
        # Nothing is saved before this, by the clock of leases.
        self._pace_until = -math.inf
        self._is_cleaning = False

    @property
    def num_sent(self) -> int:
        return self._book.num_taken

    async def settle(self) -> None:
        """Make all slots empty before the first request. Raises UpstreamError."""
        for slot in self._book.slots:
            await self._wait_for_rest(slot)
            await self._server.erase(slot.number)
            slot.content = b""

    @property
    def num_files(self) -> int:
        return len(self._cache.entries.files)

    def forget(self, owner: str | None) -> None:
        """Erase all that slots have of a workspace, or with None of all; the manifest too. Its
        entries have ended."""
        self._book.condemn(owner, b"")
        self._sync()
        self._files.compact()

    async def sweep(self, seconds: float) -> None:
        """Wait, no longer than this, until files are deleted, and slots that are free erased."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._files.flush()
                while self._is_cleaning:
                    await asyncio.sleep(SETTLE_SECONDS)

    # A request.

    async def _generate(self, sequence: SequenceState) -> None:
        request = sequence.request
        order = new_order(sequence, request.request_id, self._max_context)
        slot = await self._book.take(order.cache_salt, request.query.digests.packed)
        # A request that is cut off before the server has read it would come into a slot that is
        # somebody else's by then. So what is in a slot goes on to the next word of the server.
        work = self._spawn(self._work(sequence, slot, order))
        await asyncio.shield(work)

    async def _work(self, sequence: SequenceState, slot: Slot, order: Order) -> None:
        try:
            if sequence in self._serving:
                await self._serve(sequence, slot, order)
        except UpstreamError as error:
            self._failed(sequence, error)
            slot.content = None
        finally:
            way = self._ways.pop(sequence, None)
            if way is not None:  # saved for an answer that never began
                self._files.discard(*(file.name for file in way.files.values()))
        self._tell()
        try:
            await self._leave(slot)
        except UpstreamError as error:
            # The watch finds out whether the server is gone. The slot's content is not known.
            log.warning("a slot did not come to rest", slot=slot.number, why=str(error))
            self._suspect()
        self._book.give(slot)
        self._tell()

    async def _serve(self, sequence: SequenceState, slot: Slot, order: Order) -> None:
        request = sequence.request
        query = request.query
        packed = query.digests.packed
        if request.began_at is None:
            request.began_at = self._clock.now()
        way = self._ways[sequence] = _Way(order)
        is_first = request.started_at is None and sequence is request.leader
        await self._fill(sequence, slot, way, is_first=is_first)
        if is_first:
            await self._save_marks(sequence, slot, way)
        if sequence not in self._serving:
            return
        place = Place(slot.number, bool(slot.content))
        # What an answer adds is not known to the token, so only a model that can be cut back goes
        # on from there.
        slot.content = None
        async with aclosing(self._server.generate(order, place)) as pieces:
            async for piece in pieces:
                is_answer = piece.token_ids or piece.is_last
                if is_answer and self._plan.may_trim:
                    slot.content = packed
                if request.started_at is None and is_answer:
                    self._admit(sequence, piece)
                self._take(sequence, piece)
                if sequence not in self._serving:
                    return

    def _admit(self, sequence: SequenceState, piece: Piece) -> None:
        way = self._ways[sequence]
        reused = piece.cached_tokens if way.reused is None else way.reused
        self._cache.take_saved(
            sequence.request.query, Saved(way.files, way.refused, way.is_restored)
        )
        way.files = {}
        super()._admit(sequence, replace(piece, cached_tokens=reused))
        self._sync()

    # A slot's content.

    async def _fill(
        self, sequence: SequenceState, slot: Slot, way: _Way, *, is_first: bool
    ) -> None:
        """Bring the slot to what the prompt can go on from: what it has, a file's, or nothing."""
        request = sequence.request
        query = request.query
        scope = way.order.cache_salt
        packed = query.digests.packed
        lookup = request.lookup
        await self._enter(slot)
        entry = lookup.hit if is_first and lookup is not None else None
        if not is_first:
            entry = self._cache.held(query, self._clock.now())
        while True:
            num_common = slot.common(scope, packed)
            is_exact = self._plan.may_trim or num_common * TOKEN_BYTES == len(slot.content or b"")
            least = 0 if entry is None else min(entry.tokens, len(query.tokens) - 1)
            if num_common and is_exact and num_common >= least:
                return
            file = self._cache.file_of(entry)
            if entry is None or file is None:
                break
            if await self._restore(slot, scope, entry, file, packed):
                way.is_restored = True
                request.brought_at = self._clock.now()
                return
            if not is_first or lookup is None:
                self._cache.entries.damaged_file(entry)
                self._sync()
                break
            entry = self._cache.next_hit(query, lookup)
            self._sync()
        num_common = slot.common(scope, packed)
        if not num_common or not self._plan.may_trim:
            await self._erase(slot)
        slot.scope = scope
        slot.owner = query.scope

    async def _restore(
        self, slot: Slot, scope: str, entry: Entry, file: SavedFile, packed: bytes
    ) -> bool:
        """Fill the slot from an entry's file. False: the file is none, and the slot is empty."""
        if not await self._files.is_whole(file):
            log.error("a slot file is damaged or gone: its lease is lost", tokens=entry.tokens)
            return False
        if self._cache.file_of(entry) is not file:
            return False  # it expired meanwhile
        slot.content = None
        try:
            num_restored = await self._server.restore(slot.number, file.name)
        except UpstreamRejected as error:
            log.error("the server took no slot file: its lease is lost", why=str(error))
            return False
        if num_restored != entry.tokens:
            log.error("a slot file gave other tokens", told=num_restored, tokens=entry.tokens)
            return False
        slot.scope = scope
        slot.owner = entry.scope
        slot.is_condemned = False
        slot.content = packed[: entry.tokens * TOKEN_BYTES]
        return True

    async def _erase(self, slot: Slot) -> None:
        slot.content = None
        await self._server.erase(slot.number)
        slot.content = b""
        slot.scope = ""
        slot.is_condemned = False

    async def _enter(self, slot: Slot) -> None:
        """See whether the slot has what it had when it was left, and erase what is over."""
        state = await self._state(slot)
        if state.is_processing or state.id_task != slot.last_task:
            log.error("a slot was used by somebody else, or the server was started anew")
            slot.content = None
            await self._wait_for_rest(slot)
        if slot.is_condemned:
            await self._erase(slot)

    async def _leave(self, slot: Slot) -> None:
        """Wait until nothing runs in the slot, and erase what is over."""
        await self._wait_for_rest(slot)
        if slot.is_condemned:
            await self._erase(slot)

    async def _wait_for_rest(self, slot: Slot) -> None:
        while (state := await self._state(slot)).is_processing:
            await asyncio.sleep(SETTLE_SECONDS)
        slot.last_task = state.id_task

    async def _state(self, slot: Slot) -> SlotState:
        for state in await self._server.states():
            if state.id == slot.number:
                return state
        raise UpstreamError(f"GET /slots does not tell of slot {slot.number}")

    # Marks.

    async def _save_marks(self, sequence: SequenceState, slot: Slot, way: _Way) -> None:
        """Compute the prompt to each mark that asks for a lease, and save it there."""
        request = sequence.request
        query = request.query
        lookup = request.lookup
        assert lookup is not None
        hit = lookup.hit
        behind = 0
        if hit is not None:
            # An entry that nothing holds is saved now, where the slot can be cut back to it.
            behind = hit.tokens - (self._cache.file_of(hit) is None and self._plan.may_trim)
        for mark in self._cache.marks_to_save(query, lookup, behind):
            key = query.digests.at(mark.tokens)
            reason = self._why_not(query.scope, mark.tokens, way)
            if reason is not None:
                way.refused[key] = reason
                continue
            order = replace(way.order, token_ids=query.tokens[: mark.tokens], max_tokens=1)
            if not await self._compute(sequence, slot, way, order):
                return
            slot.content = query.digests.packed[: mark.tokens * TOKEN_BYTES]
            file = await self._save(slot, mark.tokens)
            if file is None:
                way.refused[key] = "no_hold"
            else:
                way.files[key] = file
            if sequence not in self._serving:
                return

    def _why_not(self, scope: str, num_tokens: int, way: _Way) -> BestEffortReason | None:
        """Why nothing is saved for a mark. None: it is."""
        sizes = [(file.num_tokens, file.num_bytes) for file in way.files.values()]
        sizes.append((num_tokens, self._plan.sizes.of(num_tokens)))
        if not self._cache.has_room(scope, sizes):
            return "over_budget"
        return "no_hold" if self._clock.now() < self._pace_until else None

    async def _compute(self, sequence: SequenceState, slot: Slot, way: _Way, order: Order) -> bool:
        """Compute a prompt that ends at a mark. False: nobody waits for it any more."""
        place = Place(slot.number, bool(slot.content))
        slot.content = None
        async with aclosing(self._server.generate(order, place)) as pieces:
            async for piece in pieces:
                if way.reused is None and piece.cached_tokens is not None:
                    way.reused = piece.cached_tokens
                if sequence not in self._serving:
                    return False
        return True

    async def _save(self, slot: Slot, num_tokens: int) -> SavedFile | None:
        """Save what the slot has. None where it can't be, which is told."""
        num_bytes = self._plan.sizes.of(num_tokens)
        async with self._saving:
            self._cache.entries.make_way(num_bytes, self._plan.max_bytes)
            self._sync()
            part = new_part()
            try:
                num_saved, num_written = await self._server.save(slot.number, part)
                if num_saved != num_tokens:
                    raise UpstreamError(f"a slot had {num_saved} tokens instead of {num_tokens}")
                return await self._files.keep(part, num_tokens, num_written)
            except UpstreamGone:
                self._files.discard(part)
                raise
            except (UpstreamError, OSError) as error:
                self._files.discard(part)
                self._pace_until = self._clock.now() + RETRY_SECONDS
                why = error.strerror if isinstance(error, OSError) else str(error)
                log.error("no slot file could be saved", why=why, retry_seconds=RETRY_SECONDS)
                return None

    # The manifest.

    def _tell(self) -> None:
        super()._tell()
        self._sync()

    def _sync(self) -> None:
        """Tell the manifest what has changed, delete files, and have slots erased."""
        records, freed = self._cache.entries.take_changes(self._clock.now(), self._wall())
        self._files.record(records)
        for file in freed:
            self._free(file)
        for problem in self._files.problems():
            log.error("the manifest of slot files can't be written", why=problem)
        if any(slot.is_condemned and not slot.is_busy for slot in self._book.slots):
            self._clean_soon()

    def _free(self, freed: Freed) -> None:
        self._files.discard(freed.file.name)
        if freed.is_over and freed.entry is not None:
            packed = b"".join(bytes(block.tokens) for block in freed.entry.blocks)
            self._book.condemn(freed.entry.scope, packed)

    def _clean_soon(self) -> None:
        if not self._is_cleaning and not self._is_stopped:
            self._is_cleaning = True
            self._spawn(self._clean())

    async def _clean(self) -> None:
        """Erase free slots whose content is over."""
        try:
            while (slot := await self._book.take_condemned()) is not None:
                try:
                    await self._leave(slot)
                finally:
                    self._book.give(slot)
        except UpstreamError as error:
            log.warning("a slot can't be erased now", why=str(error))
            self._suspect()
        finally:
            self._is_cleaning = False
