"""The journal: this gateway's durable record of turns, until the ledger has them."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.base.logs import get_logger
from gateway.base.record import TurnRecord
from gateway.base.settings import JOURNAL_MAX_BYTES
from gateway.journal.book import Book
from gateway.journal.pending import FAILURES, Deadlines, PendingOpen
from gateway.journal.state import BROKEN
from gateway.journal.store import Guard, Kind, Store, Work, unguarded

_DEADLINE_SECONDS = 5.0

Result = TypeVar("Result")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TurnRecord).decode


class Journal:
    """Opens and closes turns durably. Every method that awaits raises JournalUnavailable after 5 s.

    `instance` (8 hex digits) is this journal's own id, with which its turns' ids begin.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int = JOURNAL_MAX_BYTES,
        guard: Guard = unguarded,
    ) -> None:
        self._store = Store(directory, max_bytes, guard)
        self._deadlines = Deadlines(_DEADLINE_SECONDS)
        self.instance = self._store.instance
        self.instances = (self.instance, *self._store.former)
        """This instance, and those of the same journal before it lost something."""

    @property
    def backlog(self) -> int:
        """The number of turns that the ledger does not have yet, including open ones."""
        return self._store.num_turns

    @property
    def num_closed(self) -> int:
        """The number of closed turns that the ledger does not have yet, as of the last group."""
        return self._store.num_turns - self._store.num_open

    @property
    def num_set_aside(self) -> int:
        """Turns that are not in the ledger and can't be drained; the CLI lists them."""
        return self._store.num_set_aside

    @property
    def forgotten(self) -> list[str]:
        """Turns that were drained within a day before this start, the oldest first."""
        return self._store.forgotten

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    @property
    def max_bytes(self) -> int:
        return self._store.max_bytes

    @property
    def has_room(self) -> bool:
        """Whether a turn may be opened: below the bound, and with the reserve to close all."""
        return self._store.has_room

    async def open(self, record: TurnRecord) -> None:
        """Raise JournalFull where there is no room for new turns."""
        await self.begin(record).wait()

    def begin(self, record: TurnRecord) -> PendingOpen:
        """Hand over the opening of a turn. Raise JournalFull where there is no room for it.

        Whatever is handed over later is done later.
        """
        if not self._store.has_room:
            raise JournalFull
        content = _encode(record)

        def work(book: Book) -> int:
            return book.open(record.id, content)

        pending = PendingOpen(lambda: self._store.has_room)
        self._store.submit(work, "open", (record.id,), pending)
        self._deadlines.watch(pending)
        return pending

    async def rewrite(self, record: TurnRecord) -> None:
        """Replace the record of an open turn: it goes on at another engine."""
        content = _encode(record)
        await self._wait(lambda book: book.rewrite(record.id, content))

    async def close(self, record: TurnRecord) -> None:
        """Close a turn. A second close changes nothing.

        A close that fails is tried again until it works, also after the caller got the error.
        """
        await self._wait(self._closing(record), "close")

    def close_soon(self, record: TurnRecord) -> None:
        """Hand a close over without waiting. This is safe while a stream is being cancelled."""
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._store.submit(self._closing(record), "close", (), future)

    async def open_turns(self) -> list[TurnRecord]:
        """In the order in which they were opened."""
        return await self._records(lambda book: list(book.state.open))

    async def closed_turns(self, limit: int) -> list[TurnRecord]:
        """The first of them, in the order in which they were closed."""
        return await self._records(lambda book: list(islice(book.state.closed, limit)))

    async def unknown(self, turn_ids: Sequence[str]) -> list[str]:
        """Those of these turns that the journal does not have, or no longer has."""
        return await self._wait(lambda book: [i for i in turn_ids if i not in book.state])

    async def forget(self, turn_ids: Sequence[str]) -> None:
        """Remove turns that the ledger has."""
        await self._wait(lambda book: book.forget(turn_ids), "forget", turn_ids)

    async def set_aside(self, turn_ids: Sequence[str], reason: str) -> None:
        """Keep turns that can't be drained, with their bytes, apart from the others."""
        await self._wait(lambda book: book.set_aside(turn_ids, reason), "aside", turn_ids)

    async def lost_turns(self) -> list[str]:
        """The names of turns that the journal had and of which no record is left."""
        return await self._wait(lambda book: book.lost())

    async def set_aside_turns(self) -> list[str]:
        """All that were set aside, the lost ones among them, by id."""
        return await self._wait(lambda book: sorted(book.state.aside))

    async def lost_later(self, turn_ids: Sequence[str], reason: str) -> None:
        """Set aside turns that are neither here nor in the ledger, by name.

        What was set aside before stays as it was, with its bytes.
        """
        await self._wait(lambda book: book.lose(turn_ids, reason), "lost", turn_ids)

    async def found(self, turn_ids: Sequence[str]) -> None:
        """Turns that were set aside, and that the ledger has after all."""
        await self._wait(lambda book: book.found(turn_ids), "found")

    async def stop(self) -> None:
        self._store.hand_over()
        await asyncio.to_thread(self._store.stop)

    @staticmethod
    def _closing(record: TurnRecord) -> Work:
        content = _encode(record)
        return lambda book: book.close(record.id, content)

    async def _records(self, which: Callable[[Book], list[str]]) -> list[TurnRecord]:
        """Turns that can be read; the others are set aside."""
        rows = await self._wait(lambda book: book.turns(which(book)))
        records: list[TurnRecord] = []
        broken: list[str] = []
        for turn_id, content in rows:
            try:
                if content is None:
                    broken.append(turn_id)
                else:
                    records.append(_decode(content))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                broken.append(turn_id)
        if broken:
            get_logger("journal").error("turns_set_aside", turns=broken, reason=BROKEN)
            await self.set_aside(broken, BROKEN)
        return records

    async def _wait(
        self,
        work: Callable[[Book], Result],
        kind: Kind = "other",
        turn_ids: Sequence[str] = (),
    ) -> Result:
        try:
            future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
            self._store.submit(work, kind, turn_ids, future)
            self._deadlines.watch(future)
            return await future
        except FAILURES:
            raise JournalUnavailable from None
