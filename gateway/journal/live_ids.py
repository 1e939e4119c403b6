"""The ids of the turns that the journal holds, in a text file beside it and in two copies of that.

They are written after each commit and never synced, so they survive the process and not always the
machine. When a part of the journal is damaged or gone, they name the turns that were in it.

Lines are `+ID` for a turn that was recorded and `-ID` for one that was forgotten, each with a
checksum; damaged lines are left out. The first line is `=INSTANCE`, and `@SECONDS` tells when the
lines behind it were written, since 1970. `*NUMBER` tells how many turns had been forgotten before
the lines behind it. The journal counts them too, so that a list that lacks names is known as such.
`#SEGMENT_END` tells how far the newest segment was on disk, in bytes. Without it a segment that was
cut could not be told from one that a crash of the machine has torn.
"""

import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

MAX_BYTES = 1 << 20
FORGOTTEN_SECONDS = 86_400
"""For so long a forgotten turn is remembered, and must be in the ledger: retention leaves it there
for two days."""
_CLOCK_SECONDS = 60
_LINE = re.compile(rb"([+=@*#-])([A-Za-z0-9_]{1,64}) ([0-9a-f]{8})\n")
_END = re.compile(r"(\d{1,19})_(\d{1,19})")


@dataclass(slots=True)
class Told:
    """What one list says: `instance` is None where it is not known.

    `num_forgotten` is the number of turns ever forgotten, as far as the list has it; `base` was
    that number when the list was begun, -1 where it is not known. `gone` are the turns that were
    forgotten since. Segment `end[0]` was on disk up to byte `end[1]`, or further.
    """

    instance: str | None = None
    alive: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    forgotten: list[str] = field(default_factory=list)
    base: int = -1
    num_forgotten: int = 0
    end: tuple[int, int] = (0, 0)


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
        merged.gone |= told.gone
        merged.forgotten = list(dict.fromkeys([*merged.forgotten, *told.forgotten]))
    merged.alive -= merged.gone
    merged.end = max(told.end for told in newest)
    merged.num_forgotten = max(merged.num_forgotten, max(base, 0) + len(merged.gone))
    return merged


def _read(path: Path) -> Told:
    told, now, is_recent = Told(), time.time(), False
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
            is_recent = now - int(turn_id) < FORGOTTEN_SECONDS
        elif found[1] == b"*":
            told.base = told.num_forgotten = int(turn_id)
        elif found[1] == b"#":
            told.end = max(told.end, _end(turn_id))
        elif found[1] == b"+":
            told.alive.add(turn_id)
        else:
            told.num_forgotten += 1
            told.alive.discard(turn_id)
            told.gone.add(turn_id)
            if is_recent:
                told.forgotten.append(turn_id)
    return told


class LiveIds:
    """The lists while the journal is open; all methods are called from the journal's thread."""

    def __init__(
        self,
        paths: Sequence[Path],
        instance: str,
        alive: Iterable[str],
        num_forgotten: int,
        end: tuple[int, int],
    ) -> None:
        """`end` as in `Told`."""
        self._lists = [_List(path) for path in paths]
        self._instance = instance
        self._clock = 0
        self._end = end
        self.rewrite(alive, num_forgotten, end)

    @property
    def is_long(self) -> bool:
        return any(one.num_bytes > MAX_BYTES for one in self._lists)

    def rewrite(self, alive: Iterable[str], num_forgotten: int, end: tuple[int, int]) -> None:
        """Begin anew with what is alive."""
        content = _line(b"=", self._instance) + _line(b"*", str(num_forgotten)) + _end_line(end)
        content += b"".join(_line(b"+", each) for each in alive)
        for one in self._lists:
            one.rewrite(content)
        self._clock = 0

    def add(self, recorded: Sequence[str], forgotten: Sequence[str], end: tuple[int, int]) -> None:
        if not recorded and not forgotten and end == self._end:
            return
        self._end = end
        lines = [_line(b"+", each) for each in recorded]
        now = int(time.time())
        if forgotten and now - self._clock >= _CLOCK_SECONDS:
            self._clock = now
            lines.append(_line(b"@", str(now)))
        lines += [_line(b"-", each) for each in forgotten]
        content = b"".join([*lines, _end_line(end)])
        for one in self._lists:
            one.add(content)

    def close(self) -> None:
        for one in self._lists:
            one.close()


class _List:
    """One file. A full disk is no error: the file is a help, and the journal says so itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self.num_bytes = 0

    def rewrite(self, content: bytes) -> None:
        new = self._path.with_suffix(".new")
        with suppress(OSError):
            new.write_bytes(content)
            new.replace(self._path)
            self.close()
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self.num_bytes = len(content)

    def add(self, content: bytes) -> None:
        with suppress(OSError):
            self.num_bytes += os.write(self._file, content)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _line(mark: bytes, turn_id: str) -> bytes:
    name = turn_id.encode()
    return b"%b%b %08x\n" % (mark, name, crc32(mark + name))


def _end_line(end: tuple[int, int]) -> bytes:
    return _line(b"#", f"{end[0]}_{end[1]}")


def _end(text: str) -> tuple[int, int]:
    found = _END.fullmatch(text)
    return (int(found[1]), int(found[2])) if found is not None else (0, 0)
