"""The ids of the turns that the journal holds, in a text file beside it and in two copies of that.

They are written after each commit and never synced, so they survive the process and not always the
machine. When a part of the journal is damaged or gone, they name the turns that were in it.

Lines are `+ID` for a turn that was recorded, `!ID` for one that was set aside and `-ID` for one
that was forgotten, each with a checksum; damaged lines are left out. The first line is `=INSTANCE`,
and `@SECONDS` tells when the turns behind it were forgotten, since 1970. `*NUMBER` tells how many
turns had been forgotten before the lines behind it. The journal counts them too, so that a list
that lacks names is known as such. The last forgotten names stay when the lists are begun anew, so a
start that is killed, or finds no ledger, takes none of them.
`#SEGMENT_END` tells how far the newest segment was on disk, in bytes. Without it a segment that was
cut could not be told from one that a crash of the machine has torn.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

MAX_BYTES = 1 << 20
"""A list is begun anew when it is longer, and twice as long as it was when it was begun."""
MAX_FORGOTTEN = 8000
"""So many forgotten names stay when a list is begun anew: 400 KB."""
FORGOTTEN_SECONDS = 86_400
"""For so long a forgotten turn is remembered, and must be in the ledger: retention leaves it there
for two days."""
_CLOCK_SECONDS = 60
_RETRY_SECONDS = 1.0
_LINE = re.compile(rb"([+!=@*#-])([A-Za-z0-9_]{1,64}) ([0-9a-f]{8})\n")
_END = re.compile(r"(\d{1,19})_(\d{1,19})")


@dataclass(slots=True)
class Told:
    """What one list says: `instance` is None where it is not known.

    `num_forgotten` is the number of turns ever forgotten, as far as the list has it; `base` was
    that number when the list was begun, -1 where it is not known. `gone` are the turns that were
    forgotten since; `forgotten` are those of the last day, with the seconds since 1970. Segment
    `end[0]` was on disk up to byte `end[1]`, or further.
    """

    instance: str | None = None
    alive: set[str] = field(default_factory=set)
    aside: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    forgotten: dict[str, int] = field(default_factory=dict)
    base: int = -1
    num_forgotten: int = 0
    end: tuple[int, int] = (0, 0)

    def forget(self, turn_ids: Iterable[str], at: int | None) -> None:
        """These turns were forgotten at `at`, in seconds since 1970; None: long ago."""
        for turn_id in turn_ids:
            self.num_forgotten += 1
            self.alive.discard(turn_id)
            self.gone.add(turn_id)
            if at is not None:
                self.forgotten[turn_id] = at


def names_of(directory: Path) -> list[Path]:
    """The list and its copies: whatever damages two files of a journal leaves one of them."""
    return [directory / name for name in ("turns.log", "turns-copy.log", "turns-copy-2.log")]


def read(paths: Sequence[Path]) -> Told:
    """What the lists say together. One that was begun earlier than another says nothing."""
    found = [_read(path) for path in paths]
    base = max(told.base for told in found)
    newest = [told for told in found if told.base == base and told.instance is not None]
    if not newest:
        return max(found, key=lambda told: len(told.alive))
    merged = max(newest, key=lambda told: (told.num_forgotten, len(told.alive)))
    for told in newest:
        merged.alive |= told.alive
        merged.aside |= told.aside
        merged.gone |= told.gone
        merged.forgotten |= told.forgotten
    merged.alive -= merged.gone | merged.aside
    merged.end = max(told.end for told in newest)
    merged.num_forgotten = max(merged.num_forgotten, max(base, 0) + len(merged.gone))
    return merged


def _read(path: Path) -> Told:
    told, now, at = Told(), time.time(), None
    try:
        content = path.read_bytes()
    except OSError:
        return told
    for line in content.splitlines(keepends=True):
        found = _LINE.fullmatch(line)
        if found is None or crc32(found[1] + found[2]) != int(found[3], 16):
            continue
        turn_id = found[2].decode()
        if found[1] == b"=":
            told.instance = turn_id
        elif found[1] == b"@":
            at = int(turn_id) if now - int(turn_id) < FORGOTTEN_SECONDS else None
        elif found[1] == b"*":
            told.base = told.num_forgotten = int(turn_id)
        elif found[1] == b"#":
            told.end = max(told.end, _end(turn_id))
        elif found[1] == b"+":
            told.alive.add(turn_id)
        elif found[1] == b"!":
            told.alive.discard(turn_id)
            told.aside.add(turn_id)
        else:
            told.forget([turn_id], at)
    return told


class Held(NamedTuple):
    """What the journal holds: open and closed turns, those set aside; the others as in `Told`."""

    alive: Iterable[str]
    aside: Iterable[str]
    num_forgotten: int
    end: tuple[int, int]


class LiveIds:
    """The lists while the journal is open; all methods are called from the journal's thread."""

    def __init__(
        self, paths: Sequence[Path], instance: str, forgotten: Mapping[str, int], held: Held
    ) -> None:
        """`forgotten` as in `Told`."""
        self._lists = [_List(path) for path in paths]
        self._instance = instance
        self._forgotten = dict(forgotten)
        self._clock = 0
        self._end = held.end
        self._rewritten_at = 0.0
        self.rewrite(held)

    @property
    def is_due(self) -> bool:
        """Whether the lists should be begun anew: one is long, or lacks lines that a disk refused.

        That is tried once a second.
        """
        has_waited = time.monotonic() - self._rewritten_at >= _RETRY_SECONDS
        return any(one.is_long or (has_waited and not one.is_whole) for one in self._lists)

    def rewrite(self, held: Held) -> None:
        """Begin anew with what the journal holds, and what it has forgotten lately."""
        base = max(held.num_forgotten - len(self._forgotten), 0)
        lines = [_line(b"=", self._instance), _line(b"*", str(base)), _end_line(held.end)]
        for at, names in groupby(self._forgotten, self._forgotten.__getitem__):
            lines += [_line(b"@", str(at)), *_lines(b"-", names)]
        lines += [*_lines(b"+", held.alive), *_lines(b"!", held.aside)]
        content = b"".join(lines)
        for one in self._lists:
            one.rewrite(content)
        self._clock = 0
        self._rewritten_at = time.monotonic()

    def add(
        self,
        recorded: Sequence[str],
        forgotten: Sequence[str],
        aside: Sequence[str],
        end: tuple[int, int],
    ) -> None:
        if not recorded and not forgotten and not aside and end == self._end:
            return
        self._end = end
        lines = [*_lines(b"+", recorded), *_lines(b"!", aside)]
        now = int(time.time())
        if forgotten and abs(now - self._clock) >= _CLOCK_SECONDS:
            self._clock = now
            lines.append(_line(b"@", str(now)))
        lines += _lines(b"-", forgotten)
        self._remember(forgotten)
        content = b"".join([*lines, _end_line(end)])
        for one in self._lists:
            one.add(content)

    def _remember(self, forgotten: Sequence[str]) -> None:
        for turn_id in forgotten:
            self._forgotten[turn_id] = self._clock
        num_over = max(len(self._forgotten) - MAX_FORGOTTEN, 0)
        for turn_id in list(islice(self._forgotten, num_over)):
            del self._forgotten[turn_id]

    def close(self) -> None:
        for one in self._lists:
            one.close()


class _List:
    """One file. A full disk is no error: the file is a help, and the journal says so itself.

    `is_whole`: no line is missing in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._num_bytes = 0
        self._num_begun = 0
        self.is_whole = False

    @property
    def is_long(self) -> bool:
        """Lists of many turns are as long as they must be when they are begun."""
        return self._num_bytes > max(MAX_BYTES, 2 * self._num_begun)

    def rewrite(self, content: bytes) -> None:
        new = self._path.with_suffix(".new")
        try:
            new.write_bytes(content)
            new.replace(self._path)
            self.close()
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            self.is_whole = False
        else:
            self._num_bytes = self._num_begun = len(content)
            self.is_whole = True

    def add(self, content: bytes) -> None:
        try:
            written = os.write(self._file, content) if self._file >= 0 else 0
        except OSError:
            written = 0
        self._num_bytes += written
        self.is_whole &= written == len(content)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _lines(mark: bytes, turn_ids: Iterable[str]) -> Iterator[bytes]:
    return (_line(mark, each) for each in turn_ids)


def _line(mark: bytes, turn_id: str) -> bytes:
    name = turn_id.encode()
    return b"%b%b %08x\n" % (mark, name, crc32(mark + name))


def _end_line(end: tuple[int, int]) -> bytes:
    return _line(b"#", f"{end[0]}_{end[1]}")


def _end(text: str) -> tuple[int, int]:
    found = _END.fullmatch(text)
    return (int(found[1]), int(found[2])) if found is not None else (0, 0)
