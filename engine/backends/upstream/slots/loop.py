"""Runs requests in a server's slots: restore, compute to each mark, save, answer.

A request has its slot alone from the first of these steps to the last. Each mark's prefix is sent
to the server as a request by itself, so that the slot has exactly the prefix's tokens when it is
saved. So the tokens that the server says it saved are counted as written, and those that it says it
reused as read.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import structlog

from engine.backends.external import Order, new_order
from engine.backends.upstream.loop import UpstreamLoop
from engine.backends.upstream.server import (
    Facts,
    Place,
    UpstreamBusy,
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
from engine.protocol.reports import StoreStats
from engine.schedule.accounting import Accounting
from engine.schedule.request import SequenceState
from engine.store.journal import Restored, SavedFile
from engine.supervisor import Supervisor

log = structlog.get_logger()

RETRY_SECONDS = 30.0
"""How long nothing is saved after a save that failed."""
WATCH_SECONDS = 10.0
"""The pause between two looks whether the files of all leases are there."""
MAX_WATCHED = 256
"""How many files are looked at in one go."""
FIRST_LOOK_SECONDS = 0.05
"""The first pause between two looks whether a slot has come to rest. Each pause is twice the
last."""
MAX_LOOK_SECONDS = 1.0
"""The longest of these pauses."""
REST_SECONDS = 60.0
"""How long a slot may take to come to rest, and how long requests wait while there is no slot.

A server notices only between two batches of tokens that a request is no longer wanted.
"""
_NO_SLOT = "all slots of the server are used by somebody else"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """What is known of a server that keeps leases."""

    # The bytes of a file, by its tokens.
    sizes: FileSizes
    # The most bytes of all files together.
    max_bytes: int
    # Whether the server can cut a slot back to a prefix. Else only whole contents are read.
    may_trim: bool


@dataclass(slots=True)
class _SlotRequest:
    """A request that has a slot, until its answer begins."""

    order: Order
    # The files saved for its marks, by the mark's digest.
    files: dict[Digest, SavedFile] = field(default_factory=dict)
    # Why a mark was not saved, by the mark's digest.
    refused: dict[Digest, BestEffortReason] = field(default_factory=dict)
    # Whether the slot was filled from a file.
    is_restored: bool = False
    # The tokens that its first computation reused; None: not known yet.
    reused: int | None = None


class SlotLoop(UpstreamLoop):
    """Sends requests to a llama.cpp server whose slots are saved in files."""

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
        restored: Restored,
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
        self._restored = restored
        self._wall = wall
        self._book = SlotBook(facts.max_running)
        # The slots may still have content of an earlier process.
        self._book.condemn(None, b"")
        self._slot_requests: dict[SequenceState, _SlotRequest] = {}
        # A save stalls all slots, and a file is written before another one is deleted for it. With
        # one save at a time both are bounded.
        self._saving = asyncio.Lock()
        # The moment before which nothing is saved, by the clock of leases.
        self._pace_until = -math.inf
        # Why the last save failed; None: it did not.
        self._save_problem: str | None = None
        self._num_failed_saves = 0
        # The moment before which the manifest is not written anew, by the event loop's clock.
        self._written_again_at = -math.inf
        # Free slots that are being erased because their entries have ended.
        self._erasing = set[Slot]()
        # Since when no slot takes requests, by the event loop's clock; None: one does.
        self._none_since: float | None = None

    @property
    def num_sent(self) -> int:
        return self._book.num_taken

    @property
    def num_away(self) -> int:
        """Slots that somebody else uses, or that don't come to rest."""
        return self._book.num_away

    @property
    def num_files(self) -> int:
        return len(self._cache.entries.files)

    def store_stats(self) -> StoreStats:
        """The counts of the slot files. Their blocks are those of the engine's pool."""
        entries = self._cache.entries
        problem = self._save_problem or self._files.problem
        return StoreStats(
            is_up=problem is None,
            max_bytes=self._plan.max_bytes,
            used_bytes=entries.num_bytes,
            entries=self.num_files,
            leases=sum(entry.is_leased for entry in entries.files),
            restored_entries=self._restored.num_entries,
            restored_leases=self._restored.num_leases,
            lost_leases=self._restored.num_lost,
            failed_writes=self._num_failed_saves + self._files.num_failed,
            misses=dict(self._restored.misses),
            problem=problem,
        )

    def forget(self, owner: str | None) -> None:
        """Erase a workspace's content from all slots and from the manifest; None: everybody's.

        The entries must have ended.
        """
        self._book.condemn(owner, b"")
        self._sync()
        self._files.compact()

    def num_unerased(self, owner: str | None) -> int:
        """How many slots in use may still have what `forget` was told of."""
        return self._book.num_condemned(owner)

    async def sweep(self, seconds: float) -> None:
        """Wait until files are deleted and free slots are erased, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._files.flush()
                while any(not slot.is_away for slot in self._erasing):
                    await asyncio.sleep(FIRST_LOOK_SECONDS)

    # The engine's calls.

    def start(self, on_crash: Callable[[BaseException], None]) -> None:
        super().start(on_crash)
        start = self._supervisor.start
        self._event_loop.call_soon_threadsafe(start, "slot_files", self._watch_files)

    # A request.

    async def _generate(self, sequence: SequenceState) -> None:
        request = sequence.request
        order = new_order(sequence, request.request_id, self._max_context)
        if self._seconds_without() >= REST_SECONDS:
            self._failed(sequence, UpstreamBusy(_NO_SLOT))
            self._tell()
            return
        slot = await self._book.take(order.cache_salt, request.query.digests.packed)
        # The server may read a cancelled request late, when somebody else has the slot. So a
        # request that has a slot is never cancelled here. It goes on until the server answers.
        work = self._spawn(self._work(sequence, slot, order))
        await asyncio.shield(work)

    async def _work(self, sequence: SequenceState, slot: Slot, order: Order) -> None:
        try:
            while sequence in self._serving and not await self._enter(slot):
                log.error("a slot is used by somebody else: it gets no requests", slot=slot.number)
                self._put_away(slot)
                self._spawn(self._leave(slot))
                slot = await self._book.take(
                    order.cache_salt, sequence.request.query.digests.packed
                )
            if sequence in self._serving:
                await self._serve(sequence, slot, order)
        except UpstreamError as error:
            self._failed(sequence, error)
            slot.content = None
        finally:
            slot_request = self._slot_requests.pop(sequence, None)
            if slot_request is not None:  # saved for an answer that never began
                self._files.discard(*(file.name for file in slot_request.files.values()))
        self._tell()
        await self._leave(slot)

    async def _serve(self, sequence: SequenceState, slot: Slot, order: Order) -> None:
        request = sequence.request
        query = request.query
        packed = query.digests.packed
        if request.began_at is None:
            request.began_at = self._clock.now()
        slot_request = self._slot_requests[sequence] = _SlotRequest(order)
        is_first = request.started_at is None and sequence is request.leader
        if is_first:
            await self._end_lost(sequence)
        await self._fill(sequence, slot, slot_request, is_first=is_first)
        if is_first:
            await self._save_marks(sequence, slot, slot_request)
        if sequence not in self._serving:
            return
        place = Place(slot.number, bool(slot.content))
        # The tokens that the answer adds to the slot are not known exactly. So the slot is used
        # again only if it can be cut back.
        slot.content = None
        async with aclosing(self._server.generate(order, place)) as pieces:
            async for piece in pieces:
                if piece.is_answer and self._plan.may_trim:
                    slot.content = packed
                if sequence not in self._serving:
                    return  # its client has left: its counts are final
                if request.started_at is None and piece.is_answer:
                    self._admit(sequence, piece)
                self._take(sequence, piece)
                if sequence not in self._serving:
                    return

    def _admit(self, sequence: SequenceState, piece: Piece) -> None:
        slot_request = self._slot_requests[sequence]
        reused = piece.cached_tokens if slot_request.reused is None else slot_request.reused
        self._cache.take_saved(
            sequence.request.query,
            Saved(slot_request.files, slot_request.refused, slot_request.is_restored),
        )
        slot_request.files = {}
        super()._admit(sequence, replace(piece, cached_tokens=reused))
        self._sync()

    # A slot's content.

    async def _end_lost(self, sequence: SequenceState) -> None:
        """End the hit and the entries at marks whose files somebody removed.

        A slot that still has the tokens would read them, and the answer would call them leased.
        """
        query = sequence.request.query
        lookup = sequence.request.lookup
        assert lookup is not None
        hit = lookup.hit
        # A hit that was found lost after the look-up has already ended, and is marked broken.
        while hit is not None and (hit.is_broken or await self._lost([hit])):
            hit = self._cache.next_hit(query, lookup)
        for entry in await self._lost(self._cache.marked(query, lookup)):
            self._cache.entries.damaged_file(entry)
        self._sync()

    async def _watch_files(self, _stopping: asyncio.Event) -> None:
        while not self._is_stopped:
            await self._end_unread()
            await asyncio.sleep(WATCH_SECONDS)

    async def _end_unread(self) -> None:
        """End all leases whose files somebody removed, also if nobody reads them."""
        leased = [entry for entry in self._cache.entries.files if entry.is_leased]
        for start in range(0, len(leased), MAX_WATCHED):
            lost = await self._lost(leased[start : start + MAX_WATCHED])
            if self._is_stopped:
                return
            for entry in lost:
                self._cache.entries.damaged_file(entry)
            self._tell()

    async def _lost(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries whose files somebody removed or cut short."""
        files = dict[Entry, SavedFile]()
        for entry in entries:
            file = self._cache.file_of(entry)
            if file is not None:
                files[entry] = file
        if not files:
            return []
        missing = await self._files.missing(list(files.values()))
        lost = list[Entry]()
        for entry, file in files.items():
            has_file = self._cache.file_of(entry) is file  # else it expired meanwhile
            if has_file and file.name in missing:
                lost.append(entry)
        if lost:
            log.error("slot files are gone: their leases are lost", leases=len(lost))
        return lost

    async def _fill(
        self, sequence: SequenceState, slot: Slot, slot_request: _SlotRequest, *, is_first: bool
    ) -> None:
        """Bring the slot to a prefix of the prompt: the one it has, one from a file, or none."""
        request = sequence.request
        query = request.query
        scope = slot_request.order.cache_salt
        packed = query.digests.packed
        lookup = request.lookup
        entry = lookup.hit if is_first and lookup is not None else None
        if not is_first:
            entry = self._cache.held(query, self._clock.now())
        while True:
            num_common = slot.common(scope, packed)
            is_exact = self._plan.may_trim or num_common * TOKEN_BYTES == len(slot.content or b"")
            num_ready = num_common if is_exact else 0
            least = 0 if entry is None else min(entry.tokens, len(query.tokens) - 1)
            if num_ready and num_ready >= least:
                return
            file = self._cache.file_of(entry)
            if entry is None:
                break
            if file is None:
                # The part of the hit that the slot has is read, unless a lease has more of it.
                if not is_first or lookup is None:
                    break
                if self._cache.most_held(query, lookup) <= num_ready:
                    break
            elif await self._restore(slot, scope, entry, file, packed):
                slot_request.is_restored = True
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
        """Fill the slot from an entry's file. False: the file is damaged, gone or not taken."""
        if not await self._files.is_whole(file):
            log.error("a slot file is damaged or gone: its lease is lost", tokens=entry.tokens)
            return False
        if self._cache.file_of(entry) is not file:
            return False  # it expired meanwhile
        slot.content = None
        try:
            num_restored = await self._server.restore(slot.number, file.name, file.num_bytes)
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

    # A slot that is not at rest.

    async def _enter(self, slot: Slot) -> bool:
        """Check that nobody used the slot since it was left, and erase it if its content is over.

        False: something runs in it. Raises UpstreamError.
        """
        state = await self._state(slot)
        if state.is_processing:
            return False
        if slot.is_condemned:
            await self._erase(slot)
        elif state.id_task != slot.last_task:
            log.error("a slot was used by somebody else, or the server was started anew")
            slot.content = None
        return True

    async def _leave(self, slot: Slot) -> None:
        """Wait until nothing runs in the slot, erase ended content, and give the slot back."""
        slot.is_leaving = not slot.is_away
        since = self._event_loop.time()
        pause = FIRST_LOOK_SECONDS
        while (lack := await self._why_not_left(slot)) is not None:
            if self._event_loop.time() - since >= REST_SECONDS and not slot.is_away:
                log.error("a slot gets no requests", slot=slot.number, why=lack)
                self._put_away(slot)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_LOOK_SECONDS)
        if slot.is_away:
            log.info("a slot gets requests again", slot=slot.number)
        self._erasing.discard(slot)
        self._none_since = None
        self._book.give(slot)
        self._tell()

    async def _why_not_left(self, slot: Slot) -> str | None:
        """Why a slot can't be given back now; None: it is at rest and has no ended content."""
        try:
            state = await self._state(slot)
            if state.is_processing:
                return "it does not come to rest"
            slot.last_task = state.id_task
            if slot.is_condemned:
                await self._erase(slot)
        except UpstreamError as error:
            # The watch on the server finds out whether it is gone.
            slot.content = None
            self._suspect()
            return str(error)
        return None

    def _put_away(self, slot: Slot) -> None:
        """Give this slot to no request until it has come to rest."""
        self._book.put_away(slot)
        self._suspect()
        if self._book.num_away == len(self._book.slots) and self._none_since is None:
            self._none_since = self._event_loop.time()
            self._spawn(self._refuse_waiting())

    async def _refuse_waiting(self) -> None:
        """Refuse the requests that wait for a slot, when there was none for REST_SECONDS."""
        while self._none_since is not None:
            seconds_left = REST_SECONDS - self._seconds_without()
            if seconds_left <= 0.0:
                waiting = [
                    sequence for sequence in self._serving if sequence not in self._slot_requests
                ]
                for sequence in waiting:
                    self._failed(sequence, UpstreamBusy(_NO_SLOT))
                self._tell()
                return
            await asyncio.sleep(min(seconds_left, MAX_LOOK_SECONDS))

    def _seconds_without(self) -> float:
        """How long no slot has taken requests; 0 if one does."""
        return 0.0 if self._none_since is None else self._event_loop.time() - self._none_since

    async def _state(self, slot: Slot) -> SlotState:
        for state in await self._server.states():
            if state.id == slot.number:
                return state
        raise UpstreamError(f"GET /slots does not tell of slot {slot.number}")

    # Marks.

    async def _save_marks(
        self, sequence: SequenceState, slot: Slot, slot_request: _SlotRequest
    ) -> None:
        """Compute the prompt up to each mark that asks for a lease, and save the slot there."""
        request = sequence.request
        query = request.query
        lookup = request.lookup
        assert lookup is not None
        hit = lookup.hit
        behind = 0
        if hit is not None:
            behind = hit.tokens
            if self._cache.file_of(hit) is None and self._plan.may_trim:
                # The hit has no file. It is saved now, because the slot can be cut back to it.
                behind -= 1
        for mark in self._cache.marks_to_save(query, lookup, behind):
            key = query.digests.at(mark.tokens)
            reason = self._why_not(query.scope, mark.tokens, slot_request)
            if reason is not None:
                slot_request.refused[key] = reason
                continue
            order = replace(slot_request.order, token_ids=query.tokens[: mark.tokens], max_tokens=1)
            if not await self._compute(sequence, slot, slot_request, order):
                return
            slot.content = query.digests.packed[: mark.tokens * TOKEN_BYTES]
            file = await self._save(slot, mark.tokens)
            if file is None:
                slot_request.refused[key] = "no_hold"
            else:
                slot_request.files[key] = file
            if sequence not in self._serving:
                return

    def _why_not(
        self, scope: str, num_tokens: int, slot_request: _SlotRequest
    ) -> BestEffortReason | None:
        """Why nothing is saved for a mark of `num_tokens`; None: it can be saved."""
        sizes = [(file.num_tokens, file.num_bytes) for file in slot_request.files.values()]
        sizes.append((num_tokens, self._plan.sizes.of(num_tokens)))
        if not self._cache.has_room(scope, sizes):
            return "over_budget"
        return "no_hold" if self._clock.now() < self._pace_until else None

    async def _compute(
        self, sequence: SequenceState, slot: Slot, slot_request: _SlotRequest, order: Order
    ) -> bool:
        """Compute a prompt that ends at a mark. False: nobody waits for the answer any more."""
        place = Place(slot.number, bool(slot.content))
        slot.content = None
        async with aclosing(self._server.generate(order, place)) as pieces:
            async for piece in pieces:
                if slot_request.reused is None and piece.cached_tokens is not None:
                    slot_request.reused = piece.cached_tokens
                if sequence not in self._serving:
                    return False
        return True

    async def _save(self, slot: Slot, num_tokens: int) -> SavedFile | None:
        """Save the slot's content in a file. None: it failed, which is logged.

        Raises UpstreamGone.
        """
        num_bytes = self._plan.sizes.of(num_tokens)
        async with self._saving:
            self._cache.entries.make_way(num_bytes, self._plan.max_bytes)
            self._sync()
            part = new_part()
            try:
                num_saved, num_written = await self._server.save(slot.number, part, num_bytes)
                if num_saved != num_tokens:
                    raise UpstreamError(f"a slot had {num_saved} tokens instead of {num_tokens}")
                file = await self._files.keep(part, num_tokens, num_written)
                self._save_problem = None
                return file
            except UpstreamGone:
                self._files.discard(part)
                raise
            except (UpstreamError, OSError) as error:
                self._files.discard(part)
                self._pace_until = self._clock.now() + RETRY_SECONDS
                why = (error.strerror if isinstance(error, OSError) else None) or str(error)
                self._save_problem = why
                self._num_failed_saves += 1
                log.error("no slot file could be saved", why=why, retry_seconds=RETRY_SECONDS)
                return None

    # The manifest.

    def _tell(self) -> None:
        super()._tell()
        self._sync()

    def _sync(self) -> None:
        """Write changes to the manifest, delete files of ended entries, and erase their slots."""
        records, freed = self._cache.entries.take_changes(self._clock.now(), self._wall())
        self._files.record(records)
        for file in freed:
            self._free(file)
        self._files.look()
        if self._files.problem is not None and self._event_loop.time() >= self._written_again_at:
            self._written_again_at = self._event_loop.time() + RETRY_SECONDS
            self._files.write_again()
        if not self._is_stopped:
            self._erase_condemned()

    def _free(self, freed: Freed) -> None:
        self._files.discard(freed.file.name)
        if freed.is_over and freed.entry is not None:
            packed = b"".join(bytes(block.tokens) for block in freed.entry.blocks)
            self._book.condemn(freed.entry.scope, packed)

    def _erase_condemned(self) -> None:
        """Begin to erase free slots whose entries have ended."""
        while (slot := self._book.take_condemned()) is not None:
            self._erasing.add(slot)
            self._spawn(self._leave(slot))
