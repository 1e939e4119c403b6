"""The store's directory: who may use it, its secret, its files. Raises OSError as files do.

    secret     32 random bytes, made once
    lock       held by the engine that uses the directory
    format     the version of all of it
    journal    the entries (`journal.py`)
    blocks/xx/ one file a block, by name (`block_file.py`)
    new/       files that are being written

Directories have mode 0700, files 0600. A file is written under another name and renamed, so a name
never stands for a part of a file while the machine runs.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.cache.store_tier import Payload
from engine.protocol import StoreRefusal
from engine.store.keys import SECRET_BYTES, StoreKeys

_NAME_DIGITS = 32
FORMAT = 2
"""The version of a directory. An engine that knows only lower versions leaves it alone."""
_OWN = {"secret", "lock", "format", "journal", "blocks", "new", "lost+found"}
MAX_JOURNAL_BYTES = 2**30


class StoreRefused(Exception):
    """The directory can't be this engine's store."""

    def __init__(self, reason: StoreRefusal, message: str) -> None:
        super().__init__(message)
        self.reason: StoreRefusal = reason


class StoreDirectory:
    """A directory that this process alone uses until `close`."""

    def __init__(self, path: Path, *, secret: bytes | None = None) -> None:
        """`secret`: that of all members of a shared store, in place of one of its own.

        Raises StoreRefused, and OSError where rights or room are missing.
        """
        self.path = path
        self._shared_secret = secret
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        strangers = sorted(set(os.listdir(path)) - _OWN)
        if strangers:
            message = f"{path} has files that are not a store's: {strangers[0]}"
            raise StoreRefused("strangers", message)
        path.chmod(0o700)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise StoreRefused("in_use", f"{path} is in use by another engine") from None
        try:
            self._open()
        except (OSError, StoreRefused):
            self.close()
            raise

    def _open(self) -> None:
        path = self.path
        self._check_format()
        self._blocks = path / "blocks"
        self._blocks.mkdir(mode=0o700, exist_ok=True)
        self._new = path / "new"
        self._new.mkdir(mode=0o700, exist_ok=True)
        for left in self._new.iterdir():
            left.unlink()
        self.keys = StoreKeys(self._shared_secret or self._secret())
        self.lacks_journal = not (path / "journal").exists() and any(self.names())

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock)

    # Blocks.

    def names(self) -> Iterator[str]:
        """The names of all block files. What else is there is deleted."""
        for folder in sorted(os.listdir(self._blocks)):
            inside = self._blocks / folder
            if inside.is_symlink() or not inside.is_dir():
                inside.unlink()
                continue
            for name in sorted(os.listdir(inside)):
                is_name = len(name) == _NAME_DIGITS and set(name) <= set("0123456789abcdef")
                if is_name and name[:2] == folder:
                    yield name
                elif not (inside / name).is_dir():
                    (inside / name).unlink()

    def read(self, name: str, max_bytes: int) -> tuple[bytes, int]:
        """The first `max_bytes` of a file, and its size."""
        return read_block(self._blocks, name, max_bytes)

    def write(self, name: str, *parts: Payload) -> None:
        """Make a file of these parts, whole or not at all."""
        self._write_new(self._place(name), *parts, is_synced=False)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._place(name).unlink()

    # The journal.

    def journal_lines(self) -> list[bytes]:
        """All lines, the oldest first. The last one may be torn."""
        try:
            with open(self.path / "journal", "rb") as file:
                return file.read(MAX_JOURNAL_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return []

    def append_journal(self, lines: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self.path / "journal", flags, 0o600)
        with os.fdopen(file, "wb", buffering=0) as stream:
            _write_all(stream.fileno(), lines)

    def rewrite_journal(self, lines: bytes) -> None:
        self._write_new(self.path / "journal", lines, is_synced=True)

    # Inside.

    def _place(self, name: str) -> Path:
        return _place_of(self._blocks, name)

    def _check_format(self) -> None:
        """Refuse what a newer version made. Raises StoreRefused."""
        place = self.path / "format"
        try:
            found = place.read_bytes()
        except FileNotFoundError:
            found = b""
        if found.strip().isdigit() and int(found) > FORMAT:
            message = f"{self.path} is of the newer version {int(found)}"
            raise StoreRefused("newer", message)
        if found != b"%d\n" % FORMAT:
            (self.path / "new").mkdir(mode=0o700, exist_ok=True)
            self._new = self.path / "new"
            self._write_new(place, b"%d\n" % FORMAT, is_synced=True)

    def _secret(self) -> bytes:
        """The installation's secret. One that is not whole is made anew, which ends all content."""
        place = self.path / "secret"
        try:
            found = place.read_bytes()
        except FileNotFoundError:
            found = b""
        if len(found) == SECRET_BYTES:
            place.chmod(0o600)
            return found
        secret = secrets.token_bytes(SECRET_BYTES)
        self._write_new(place, secret, is_synced=True)
        return secret

    def _write_new(self, place: Path, *parts: Payload, is_synced: bool) -> None:
        new = self._new / place.name
        try:
            with _created(new) as file:
                _write_all(file, *parts)
                if is_synced:
                    os.fsync(file)
            try:
                os.replace(new, place)
            except FileNotFoundError:  # the first file of its folder
                place.parent.mkdir(mode=0o700, exist_ok=True)
                os.replace(new, place)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise


def read_block(blocks: Path, name: str, max_bytes: int) -> tuple[bytes, int]:
    """The first `max_bytes` of a block's file below `blocks`, and its size. Raises OSError.

    A whole file that was read is not kept in the page cache: it goes into the engine's memory.
    """
    file = os.open(_place_of(blocks, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        data = _read_all(file, min(max_bytes, size))
        if len(data) == size:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return data, size
    finally:
        os.close(file)


def _place_of(blocks: Path, name: str) -> Path:
    return blocks / name[:2] / name


@contextmanager
def _created(place: Path) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(place, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _write_all(file: int, *parts: Payload) -> None:
    """In one call, unless the system takes less than all."""
    left = sum(map(len, parts)) - os.writev(file, parts)
    if left:
        view = memoryview(b"".join(parts))[-left:]
        while view:
            view = view[os.write(file, view) :]


def _read_all(file: int, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    while num_bytes > 0 and (part := os.read(file, num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
