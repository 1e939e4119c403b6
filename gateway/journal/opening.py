"""Opens the journal, whatever has happened to its files.

What can be read is kept. A turn whose newest record is broken is *set aside* with its bytes. A
segment that is damaged is moved to a folder of its own, once its sound records are copied. A
journal of before, which was a database of SQLite, is taken over in the same way (`old_file.py`).

Turns whose record is gone are set aside by name, as *lost*. If the lists of names are shorter than
the journal's own count, that is reported: the ledger may have lost some of those turns, and they
can't be named. A journal that has lost something gets a new instance. `recover --instance` can then
make rows from what engines counted for the old instance. A turn that was open before what is lost
may have been closed in it: it is named too, and then settled as any open turn.

Each start begins a new segment. Nothing is written behind what a crash left.
"""

import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gateway.base.logs import get_logger
from gateway.journal import live_ids
from gateway.journal.book import Book
from gateway.journal.files import SegmentFiles, path_of, segment_files, sync_directory
from gateway.journal.old_file import OldJournal, delete_old, read_old
from gateway.journal.reading import Found, read_journal
from gateway.journal.state import BROKEN, LOST

_TAKEN_TOGETHER = 500
_MADE_BY = re.compile("msg_([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class Opened:
    """`forgotten` turns were drained lately, so that the ledger must have them."""

    book: Book
    ids: live_ids.LiveIds
    forgotten: list[str]


def open_journal(directory: Path, max_bytes: int) -> Opened:
    """Raise OSError or sqlite3.Error where the journal can't be opened in any way."""
    lists = live_ids.names_of(directory)
    told = live_ids.read(lists)
    found, old = read_journal(directory, told), read_old(directory)
    # A kill may come between the record that forgets turns and the lists.
    told.forget(sorted(told.alive & found.forgotten), int(time.time()))
    book = _book(directory, max_bytes, found, old, told)
    _tell_of_damage(found, told)
    try:
        _bring_over(book, found, old, told)
        if found.damaged:
            _move(directory, book, list(found.damaged))
        delete_old(directory)
    except OSError:
        book.files.close()
        raise
    state = book.state
    if told.num_forgotten < state.num_forgotten:
        number = state.num_forgotten - told.num_forgotten
        get_logger("journal").error("names_missing", file=str(lists[0]), number=number)
    forgotten = {i: at for i, at in told.forgotten.items() if i not in state.aside}
    ids = live_ids.LiveIds(lists, book.instance, forgotten, book.held)
    return Opened(book, ids, list(forgotten))


def _bring_over(book: Book, found: Found, old: OldJournal | None, told: live_ids.Told) -> None:
    """Write the head of a new segment, and behind it all that must not stay where it is."""
    book.begin()
    if found.torn is not None:
        book.copy_from(found.torn)  # in the group of the head, which tells where that one ends
    for number in found.damaged:
        book.copy_from(number)
        book.commit()
    if old is not None:
        _take_over(book, old)
    for turn_id, (_, left) in found.broken.items():
        _set_aside(book, turn_id, BROKEN, left)
    for turn_id in sorted((told.alive | told.aside) - book.state.ids):
        _set_aside(book, turn_id, LOST, None)
    book.commit()


def _book(
    directory: Path, max_bytes: int, found: Found, old: OldJournal | None, told: live_ids.Told
) -> Book:
    """The book, with the instance under which it goes on."""
    state, head = found.state, found.head
    instance = head.instance if head is not None else old.instance if old is not None else None
    former = set(head.former) if head is not None else set()
    if old is not None:
        former |= set(old.former)
        state.num_forgotten = max(state.num_forgotten, old.num_forgotten)
        state.keep()
    known = state.ids | set(found.broken) | (old.ids if old is not None else set())
    missing = (told.alive | told.aside) - known
    is_hurt = bool(found.damaged or found.missing or missing)
    is_hurt |= head is None and any(found.ends.values())
    is_hurt |= old is not None and (old.is_damaged or old.instance is None)
    # A start that was killed may have changed the instance before it began the lists anew.
    if is_hurt or told.instance not in (None, instance, *former):
        earlier = {each for each in (told.instance, instance) if each is not None}
        new = secrets.token_hex(4)
        former |= earlier | _instances_of(known)
        get_logger("journal").error(
            "journal_lost_turns",
            number=len(missing),
            instance=told.instance or instance,
            new_instance=new,
        )
        instance = new
    kept = {n: end for n, end in found.ends.items() if n not in found.damaged}
    files = SegmentFiles(directory, max_bytes, kept, told.end[0])
    return Book(files, state, instance or secrets.token_hex(4), sorted(former), found.group + 1)


def _take_over(book: Book, old: OldJournal) -> None:
    """Bring over a journal of before. What a start before this one brought over stays as it is."""
    for number, (turn_id, is_closed, record) in enumerate(old.turns):
        if turn_id in book.state:
            continue
        if number % _TAKEN_TOGETHER == 0:
            book.commit()
        if is_closed:
            book.put_closed(turn_id, record)
        else:
            book.open(turn_id, record)
    for turn_id, at, reason, content in old.aside:
        if turn_id not in book.state:
            book.put_aside(turn_id, reason, content, at)


def _set_aside(book: Book, turn_id: str, reason: str, content: bytes | None) -> None:
    get_logger("journal").error("turn_set_aside", turn=turn_id, reason=reason)
    book.put_aside(turn_id, reason, content)


def _tell_of_damage(found: Found, told: live_ids.Told) -> None:
    for number, damage in found.damaged.items():
        name = path_of(Path(), number).name
        get_logger("journal").error("journal_damaged", file=name, error=damage)
    for number in found.missing:
        name = path_of(Path(), number).name
        get_logger("journal").error("journal_damaged", file=name, error="it is gone")
    for turn_id in found.unsure:
        if turn_id not in told.gone:
            get_logger("journal").error("turn_unsure", turn=turn_id, reason="its close may be lost")


def _move(directory: Path, book: Book, numbers: list[int]) -> None:
    """Put damaged segments into a folder of their own."""
    kept = directory / f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    kept.mkdir()
    there = segment_files(directory)
    for number in numbers:
        there[number].rename(kept / there[number].name)
        book.files.moved(number)
    sync_directory(directory)
    get_logger("journal").error("journal_files_kept", kept=str(kept))


def _instances_of(turn_ids: Iterable[str]) -> set[str]:
    """The instances that made these ids (`TurnService.new_id`)."""
    return {found[1] for found in map(_MADE_BY.match, turn_ids) if found is not None}
