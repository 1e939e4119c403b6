"""The journal's segments on disk. One thread writes them.

A group is appended by one write and one `fdatasync`. The file grows by zeros ahead of that, in
steps: a group that lies within the zeros changes no metadata of the file, which halves the time of
its sync. A disk that is full refuses the zeros, so then nothing of the group was written.

A write or a sync that fails leaves it unknown what is on disk. The kernel may even take the pages
for written afterwards, so that a second sync succeeds. So a segment is never written again after
that. The next one tells in its head how far this one counts.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from gateway.journal.state import Place

_NAME = re.compile(r"segment-(\d{10})")
_MAX_SEGMENT_BYTES = 64 << 20
_MIN_SEGMENT_BYTES = 32 << 10
_MAX_STEP_BYTES = 256 << 10
_MIN_STEP_BYTES = 8 << 10
_NUM_READERS = 4


def segment_files(directory: Path) -> dict[int, Path]:
    """The segments of a journal by number, the oldest first. Raise OSError."""
    if not directory.is_dir():
        return {}
    found = {
        int(name[1]): path
        for path in directory.iterdir()
        if (name := _NAME.fullmatch(path.name)) is not None
    }
    return dict(sorted(found.items()))


def path_of(directory: Path, number: int) -> Path:
    return directory / f"segment-{number:010}"


def sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class SegmentFiles:
    """The files of an open journal.

    `number` is the segment that is written, `tail` the end of its records, `ends` the ends of the
    earlier ones. All in bytes.
    """

    def __init__(
        self, directory: Path, max_bytes: int, ends: dict[int, int], number: int = 0
    ) -> None:
        """`max_bytes` is the bound of the journal, of which a segment is a small part.

        `number` is a segment that there was. It is not begun again, although it may be gone.
        """
        self._directory = directory
        self.segment_bytes = min(_MAX_SEGMENT_BYTES, max(_MIN_SEGMENT_BYTES, max_bytes // 256))
        self._step = min(_MAX_STEP_BYTES, max(_MIN_STEP_BYTES, self.segment_bytes // 8))
        self.ends = dict(ends)
        self._sizes = {
            number: path.stat().st_size for number, path in segment_files(directory).items()
        }
        self.number = max(number, *self._sizes, 0)
        self.tail = 0
        self._file = -1
        self._has_failed = True
        self._readers: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Of all segments, with zeros."""
        return sum(self._sizes.values())

    @property
    def oldest(self) -> int:
        return next(iter(self._sizes), self.number)

    @property
    def is_full(self) -> bool:
        """Whether the next group belongs into a new segment."""
        return self._has_failed or self.tail >= self.segment_bytes

    def start(self) -> None:
        """Begin a new segment. Raise OSError where that can't be."""
        number = self.number + 1
        path = path_of(self._directory, number)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._leave()
        self._file, self.number, self.tail = file, number, 0
        self._sizes[number] = 0
        self._has_failed = False

    def append(self, content: bytes) -> None:
        """Write and sync a group. Raise OSError: then it does not count.

        Errors of a disk that is full leave the segment as it was.
        """
        is_first = self.tail == 0
        self._grow(self.tail + len(content))
        self._has_failed = True
        try:
            self._write(content, self.tail)
            os.fdatasync(self._file)
            if is_first:
                sync_directory(self._directory)
        except OSError:
            # So that a kill before the next segment begins does not bring the group back.
            with suppress(OSError):
                self._write(bytes(len(content)), self.tail)
            raise
        self._has_failed = False
        self.tail += len(content)

    def read(self, place: Place) -> bytes:
        """The bytes of a record; fewer where the file is shorter, or gone. Raise OSError."""
        if place.segment == self.number:
            return os.pread(self._file, place.length, place.offset)
        file = self._readers.get(place.segment)
        if file is None:
            path = path_of(self._directory, place.segment)
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
            if len(self._readers) >= _NUM_READERS:
                os.close(self._readers.pop(next(iter(self._readers))))
            self._readers[place.segment] = file
        return os.pread(file, place.length, place.offset)

    def delete_oldest(self) -> None:
        """Raise OSError. A segment that is gone already is no error."""
        number = self.oldest
        path_of(self._directory, number).unlink(missing_ok=True)
        self.moved(number)

    def moved(self, number: int) -> None:
        """A segment is not part of the journal any more."""
        if (reader := self._readers.pop(number, None)) is not None:
            os.close(reader)
        self._sizes.pop(number, None)
        self.ends.pop(number, None)

    def close(self) -> None:
        for file in self._readers.values():
            os.close(file)
        self._readers.clear()
        self._leave()

    def _write(self, content: bytes, offset: int) -> None:
        written = 0
        while written < len(content):
            written += os.pwrite(self._file, content[written:], offset + written)

    def _leave(self) -> None:
        """Leave the segment that was written. One without a record is deleted."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        self.ends[self.number] = self.tail
        if self.tail == 0:
            with suppress(OSError):
                path_of(self._directory, self.number).unlink(missing_ok=True)
                del self._sizes[self.number], self.ends[self.number]

    def _grow(self, size: int) -> None:
        """Write zeros up to `size` bytes at least. Raise OSError, the file being as before."""
        before = self._sizes[self.number]
        if size <= before:
            return
        try:
            self._fill(before, -(-size // self._step) * self._step)
        except OSError:
            self._fill(before, size)  # the last bytes of a disk are for closes

    def _fill(self, before: int, size: int) -> None:
        try:
            self._write(bytes(size - before), before)
        except OSError:
            os.ftruncate(self._file, before)
            raise
        self._sizes[self.number] = size
