"""Slot files on the disk, and their manifest: checked, never trusted.

    manifest/       the engine's own: lock, secret, and a journal that tells of each lease's file
    hf-….bin        a whole prefix, as llama.cpp saved it
    hf-….part       one that is being saved

llama.cpp aborts on a truncated file, and answers from one with a flipped bit as if it were whole.
So a file counts only once its size and SHA-256 are in the manifest, and both are compared before
every restore. Names are random and tell nothing of content. The directory is the owner's alone.
"""

import asyncio
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import structlog

from engine.backends.upstream.server import UpstreamError
from engine.cache.block import Entry
from engine.cache.digests import ChainHasher
from engine.cache.store_tier import BlockKey
from engine.store.files import BlockReader, Damage, Missed, StoreDirectory, StoreRefused
from engine.store.journal import (
    End,
    JournalContent,
    Put,
    Record,
    Restored,
    SavedFile,
    replay,
    restore,
)
from engine.store.store import Appended, Failed, StoreThreads

T = TypeVar("T")
log = structlog.get_logger()

MANIFEST = "manifest"
CLOSE_SECONDS = 5.0
_OURS = re.compile(r"hf-[0-9a-f]{32}\.(bin|part)")


def new_part() -> str:
    """The name of a file that is to be saved."""
    return f"hf-{uuid4().hex}.part"


def take_directory(path: Path) -> StoreDirectory:
    """The manifest of slot files in `path`, which this process alone has until it is closed.

    Raises StoreRefused. The reason is `in_use` where another engine has it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        return StoreDirectory(path / MANIFEST)
    except OSError as error:
        message = f"ENGINE_UPSTREAM_SLOTS: {path}: {error.strerror}"
        raise StoreRefused("unusable", message) from None


class SlotFiles:
    """The files of one server's slots. It is used on one event loop. Threads wait for the disk.

    `manifest` comes from `take_directory`. `model` is the fingerprint of all that a file's content
    depends on besides its tokens.
    """

    def __init__(self, manifest: StoreDirectory, model: bytes) -> None:
        self.path = manifest.path.parent
        self._directory = manifest
        self.chain_key = manifest.keys.chain
        self._threads = StoreThreads(manifest, BlockReader(model, 0, manifest.keys))
        # Why the manifest can't be written. None: it can.
        self.problem: str | None = None
        self.num_failed = 0
        # Hashing a file must not keep the journal waiting.
        self._hashers = ThreadPoolExecutor(2, thread_name_prefix="slot-files")

    # Around a save and a restore.

    async def keep(self, part: str, num_tokens: int, num_bytes: int) -> SavedFile:
        """Hash, sync and rename a file that the server has saved. From then on it counts.

        Raises UpstreamError if the file has another size than the server told, and OSError.
        """
        return await self._hash(lambda: _keep(self.path, part, num_tokens, num_bytes))

    async def is_whole(self, file: SavedFile) -> bool:
        """Whether the file's size and SHA-256 are those of the manifest."""
        return await self._hash(lambda: _is_whole(self.path / file.name, file))

    async def missing(self, files: Sequence[SavedFile]) -> set[str]:
        """The names of the files that are gone or have another size. No content is read."""
        # The threads that hash are not used, so that no request waits for others' files.
        return await asyncio.to_thread(_missing, self.path, files)

    def discard(self, *names: str) -> None:
        """Delete files, once everything that the journal was told before is written."""
        for name in names:
            self._threads.run(partial(_unlink, self.path / name))

    # The manifest.

    def record(self, records: Sequence[Record]) -> None:
        if records:
            self._threads.append(records, {})

    def compact(self) -> None:
        """Write the journal anew, with the entries that have not ended."""
        self._threads.compact()

    async def flush(self) -> None:
        """Wait until everything that was asked for so far is on the disk."""
        await asyncio.wrap_future(self._threads.run())

    def look(self) -> None:
        """Take in what became of the manifest since the last call."""
        for result in self._threads.results.take():
            if isinstance(result, Failed):
                self.num_failed += 1
                if self.problem is None:
                    log.error("the manifest of slot files can't be written", why=result.error)
                self.problem = result.error
            elif isinstance(result, Appended):
                self.problem = None

    def write_again(self) -> None:
        """Try again to write the records that could not be written."""
        self._threads.append([], {})

    def restore(
        self,
        hasher: ChainHasher,
        take_back: Callable[[Entry, Put, SavedFile], bool],
        now: float,
        wall: float,
    ) -> Restored:
        """Take back the leases of an earlier epoch whose files are there, each of its size.

        `now` is the engine's clock, `wall` the same moment in seconds since 1970. `take_back`
        returns False where an entry has no room. Files that nothing stands on are deleted.
        """
        lines: list[bytes] = []
        try:
            lines = self._directory.journal_lines()
        except OSError as error:
            log.error("the manifest of slot files can't be read", reason=error.strerror)
        journal = replay(lines, self._threads.reader.model.hex(), self._threads.reader.keys)
        files = _files_of(journal)

        def keys_of(put: Put) -> list[BlockKey] | None:
            file = put.slot_file
            keys = put.keys(hasher, self._directory.keys)
            if file is None or keys is None:
                return None
            return [keys[-1]._replace(name=file.name)]

        def miss_of(key: BlockKey) -> Missed | None:
            lack = _lack_of(self.path, files[key.name])
            return None if lack is None else Missed(key.name, lack)

        def take(entry: Entry, keys: Sequence[BlockKey]) -> bool:
            put = journal.entries[entry.key.hex()]
            is_taken = take_back(entry, put, files[keys[0].name])
            if is_taken:
                known.add(keys[0].name)
            return is_taken

        known = set[str]()
        restored = restore(journal, take, keys_of, miss_of, now, wall)
        self.record([End(key=key) for key in restored.dead])
        self.compact()
        self.discard(*(name for name in self._names() if name not in known))
        return restored

    def close(self) -> None:
        """Finish the work that was asked for. The manifest stays open."""
        self._hashers.shutdown(wait=False, cancel_futures=True)
        if not self._threads.close(CLOSE_SECONDS):
            log.warning("the manifest of slot files is not written to its end")

    def _names(self) -> Iterable[str]:
        """The names of our files that are there. Other files are left alone."""
        return [name for name in os.listdir(self.path) if _OURS.fullmatch(name)]

    async def _hash(self, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._hashers, task)


def _files_of(journal: JournalContent) -> dict[str, SavedFile]:
    files = (put.slot_file for put in journal.entries.values())
    return {file.name: file for file in files if file is not None and _OURS.fullmatch(file.name)}


def _keep(root: Path, part: str, num_tokens: int, num_bytes: int) -> SavedFile:
    place = root / part
    descriptor = os.open(place, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != num_bytes:
            raise UpstreamError(f"a slot file has {size} bytes, and the server told {num_bytes}")
        os.fchmod(file.fileno(), 0o600)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    name = part.removesuffix(".part") + ".bin"
    os.rename(place, root / name)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return SavedFile(name=name, num_tokens=num_tokens, num_bytes=num_bytes, sha256=digest)


def _lack_of(root: Path, file: SavedFile) -> Damage | None:
    """What is wrong with a file, as far as its size shows. None: nothing."""
    try:
        place = (root / file.name).lstat()
    except OSError:
        return "missing"
    is_right = stat.S_ISREG(place.st_mode) and place.st_size == file.num_bytes
    return None if is_right else "short"


def _missing(root: Path, files: Sequence[SavedFile]) -> set[str]:
    return {file.name for file in files if _lack_of(root, file) is not None}


def _is_whole(place: Path, expected: SavedFile) -> bool:
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(file.fileno()).st_size != expected.num_bytes:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == expected.sha256
    except OSError:
        return False


def _unlink(place: Path) -> None:
    try:
        place.unlink(missing_ok=True)
    except OSError as error:
        log.error("a slot file can't be deleted", reason=error.strerror)
