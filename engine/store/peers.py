"""The other members of a shared store: their journals are followed, their files are read.

One thread looks at the journals; two read files. Results wait to be taken by the engine's thread.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.cache.store_tier import BlockKey
from engine.store.block_file import MAX_TOKENS, Damaged, decode, header_bytes
from engine.store.directory import StoreDirectory, read_block
from engine.store.journal import VERSION, End, Put, Touch, decode_line
from engine.store.members import other_members
from engine.store.threads import READERS, Arrived, Missed, read_header

POLL_SECONDS = 0.2
MAX_READ_BYTES = 8 * 2**20
"""Bytes that one look reads of one journal."""
_HEAD_BYTES = header_bytes(MAX_TOKENS)


class PeerPut(NamedTuple):
    """A member's entry, whole in its files as far as their headers tell."""

    put: Put
    keys: list[BlockKey]


class PeerEnd(NamedTuple):
    """The hexadecimal key of an entry that a member has no more."""

    key: str


class PeerUnfit(NamedTuple):
    """A damaged header of a file, or line of a journal. The engine was not told of its entry."""

    reason: str


PeerResult = PeerPut | PeerEnd | PeerUnfit | Arrived | Missed


@dataclass
class _Journal:
    """How far a member's journal was read. Another `inode` is one that was written anew.

    `puts` were told to the engine, those in `before` by the journal's last text. `waiting` were
    read and not told: their files are looked at next, or again where their key is in `doubtful`.
    """

    inode: int = 0
    offset: int = 0
    puts: dict[str, PeerPut] = field(default_factory=dict)
    before: dict[str, PeerPut] = field(default_factory=dict)
    waiting: dict[str, Put] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)

    def begin_anew(self, inode: int) -> None:
        self.before |= self.puts
        self.inode, self.offset = inode, 0
        self.puts, self.waiting, self.doubtful = {}, {}, set()

    def take_gone(self) -> dict[str, PeerPut]:
        """The entries that the journal no longer has."""
        still = self.puts.keys() | self.waiting.keys()
        gone = {key: one for key, one in self.before.items() if key not in still}
        self.before = {key: one for key, one in self.before.items() if key in self.waiting}
        return gone


class Peers:
    """`wake`, once set, is called after each result; it must not block.

    `num_rounds`: how often all journals were looked at.
    """

    def __init__(self, own: StoreDirectory, model: bytes, payload_bytes: int) -> None:
        self._own = own
        self._model = model
        self._payload_bytes = payload_bytes
        self.wake: Callable[[], None] = lambda: None
        self._results: queue.SimpleQueue[PeerResult] = queue.SimpleQueue()
        self._journals: dict[Path, _Journal] = {}
        self._members: list[Path] = []
        self.num_rounds = 0
        self._is_closed = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="peer-reader")
        self._thread = threading.Thread(target=self._run, name="peer-journals", daemon=True)
        self._thread.start()

    def take_results(self) -> list[PeerResult]:
        results: list[PeerResult] = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except queue.Empty:
                return results

    def read(self, key: BlockKey) -> None:
        self._readers.submit(self._read, key)

    def close(self) -> None:
        self._is_closed.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    # Inside.

    def _say(self, result: PeerResult) -> None:
        self._results.put(result)
        self.wake()

    def _run(self) -> None:
        while not self._is_closed.wait(POLL_SECONDS):
            members = self._members = other_members(self._own, self._model)
            for path in members:
                self._follow(path, self._journals.setdefault(path, _Journal()))
            for path in self._journals.keys() - set(members):
                journal = self._journals.pop(path)
                self._end_all(journal.puts | journal.before)
            self.num_rounds += 1

    def _follow(self, path: Path, journal: _Journal) -> None:
        """Read what a journal has behind what was read. A line without its end waits.

        Files are looked at when the journal was read to its end: a file of an entry that a later
        line ends may be gone.
        """
        try:
            with open(path / "journal", "rb") as file:
                told = os.fstat(file.fileno())
                if told.st_ino != journal.inode or told.st_size < journal.offset:
                    journal.begin_anew(told.st_ino)
                file.seek(journal.offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return  # it is not there yet, or no more
        whole = data[: data.rfind(b"\n") + 1]
        journal.offset += len(whole)
        for line in whole.splitlines():
            self._take(journal, line)
        if len(data) < MAX_READ_BYTES:
            self._look(path, journal)
            self._end_all(journal.take_gone())

    def _take(self, journal: _Journal, line: bytes) -> None:
        if not line:
            return
        match decode_line(line, self._own.keys):
            case None:
                self._say(PeerUnfit("journal_checksum"))
            case Put() as put if put.version != VERSION:
                self._say(PeerUnfit("journal_version"))
            case Put() as put if put.model != self._model.hex():
                self._say(PeerUnfit("journal_other_model"))
            case Put() as put:
                journal.waiting[put.key] = put
            case Touch() as touch if touch.key in journal.waiting:
                known = journal.waiting[touch.key]
                journal.waiting[touch.key] = msgspec.structs.replace(known, times=touch.times)
            case Touch() as touch if touch.key in journal.puts:
                told = journal.puts[touch.key]
                put = msgspec.structs.replace(told.put, times=touch.times)
                self._put(journal, put, told.keys)
            case End() as end:
                journal.waiting.pop(end.key, None)
                if journal.puts.pop(end.key, None) is not None:
                    self._say(PeerEnd(end.key))

    def _look(self, path: Path, journal: _Journal) -> None:
        """Look at the files of what was read. Each is looked at once, and a miss is told once.

        A file that is gone is looked for again after the next read of the journal, since a member
        tells the end of an entry before it deletes the files.
        """
        heads: dict[str, BlockKey | Missed] = {}
        unfit: dict[str, PeerUnfit] = {}
        for key, put in list(journal.waiting.items()):
            found = self._heads(path, put, heads)
            if isinstance(found, Missed) and found.reason == "missing":
                if key not in journal.doubtful:
                    journal.doubtful.add(key)
                    continue
            del journal.waiting[key]
            journal.doubtful.discard(key)
            if isinstance(found, list):
                self._put(journal, put, found)
                continue
            if isinstance(found, Missed):
                unfit[found.name] = PeerUnfit(found.reason)
            if journal.puts.pop(key, None) is not None:
                self._say(PeerEnd(key))
        for one in unfit.values():
            self._say(one)

    def _put(self, journal: _Journal, put: Put, keys: list[BlockKey]) -> None:
        journal.puts[put.key] = found = PeerPut(put, keys)
        self._say(found)

    def _end_all(self, puts: dict[str, PeerPut]) -> None:
        for key in puts:
            self._say(PeerEnd(key))

    def _heads(
        self, path: Path, put: Put, heads: dict[str, BlockKey | Missed]
    ) -> list[BlockKey] | Missed | None:
        """What the headers of an entry's files say, or the first that says nothing.

        None where the record names no files.
        """
        keys: list[BlockKey] = []
        for digest in put.blocks:
            try:
                name = self._own.keys.name_of(bytes.fromhex(digest))
            except ValueError:
                return None
            found = heads.get(name)
            if found is None:
                found = heads[name] = self._head(path, name)
            if isinstance(found, Missed):
                return found
            keys.append(found)
        return keys

    def _head(self, path: Path, name: str) -> BlockKey | Missed:
        read = partial(read_block, path / "blocks")
        return read_header(read, name, self._model, self._own.keys)

    def _read(self, key: BlockKey) -> None:
        """Read a file from any member that has it whole."""
        missed = Missed(key.name, "missing")
        for path in self._members:
            found = self._read_at(path, key)
            if isinstance(found, Arrived):
                self._say(found)
                return
            if found.reason != "missing":
                missed = found
        self._say(missed)

    def _read_at(self, path: Path, key: BlockKey) -> Arrived | Missed:
        limit = self._payload_bytes + _HEAD_BYTES
        try:
            data, size = read_block(path / "blocks", key.name, limit)
            if size > limit:
                raise Damaged("short")
            payload = decode(data, key, self._model, self._own.keys)
            if len(payload) != self._payload_bytes:
                raise Damaged("short")
        except FileNotFoundError:
            return Missed(key.name, "missing")
        except OSError:
            return Missed(key.name, "unreadable")
        except Damaged as damaged:
            return Missed(key.name, damaged.reason)
        return Arrived(key.name, payload)
