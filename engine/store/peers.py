"""The other members of a shared store: their journals are followed, their files are read.

One thread looks at the journals; two read files. Results wait to be taken by the engine's thread.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.cache.store_files import BlockKey
from engine.store.block_file import MAX_TOKENS, Damaged, decode, decode_header, header_bytes
from engine.store.directory import StoreDirectory, read_block
from engine.store.journal import VERSION, End, Put, Touch, decode_line
from engine.store.members import other_members
from engine.store.threads import READERS, Arrived, Missed

POLL_SECONDS = 0.5
MAX_READ_BYTES = 8 * 2**20
"""Of one journal, at one look."""
_HEAD_BYTES = header_bytes(MAX_TOKENS)


class PeerPut(NamedTuple):
    """A member's entry, whole in its files as far as their headers tell."""

    put: Put
    keys: list[BlockKey]


class PeerEnd(NamedTuple):
    """The hexadecimal key of an entry that a member has no more."""

    key: str


PeerResult = PeerPut | PeerEnd | Arrived | Missed


@dataclass
class _Journal:
    """How far a member's journal was read. Another `inode` is one that was written anew."""

    inode: int = 0
    offset: int = 0
    puts: dict[str, PeerPut] = field(default_factory=dict)


class Peers:
    """`wake`, once set, is called after each result; it must not block."""

    def __init__(self, own: StoreDirectory, model: bytes, payload_bytes: int) -> None:
        self._own = own
        self._model = model
        self._payload_bytes = payload_bytes
        self.wake: Callable[[], None] = lambda: None
        self._results: queue.SimpleQueue[PeerResult] = queue.SimpleQueue()
        self._journals: dict[Path, _Journal] = {}
        self._places: dict[str, Path] = {}
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
            members = other_members(self._own, self._model)
            for path in members:
                self._follow(path, self._journals.setdefault(path, _Journal()))
            for path in self._journals.keys() - set(members):
                self._end_all(self._journals.pop(path).puts)

    def _follow(self, path: Path, journal: _Journal) -> None:
        """Read what a journal has behind what was read. A line without its end waits."""
        try:
            with open(path / "journal", "rb") as file:
                told = os.fstat(file.fileno())
                before: dict[str, PeerPut] = {}
                if told.st_ino != journal.inode or told.st_size < journal.offset:
                    before, journal.puts = journal.puts, {}
                    journal.inode, journal.offset = told.st_ino, 0
                file.seek(journal.offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return  # it is not there yet, or no more
        whole = data[: data.rfind(b"\n") + 1]
        journal.offset += len(whole)
        for line in whole.splitlines():
            self._take(path, journal, line)
        self._end_all({key: one for key, one in before.items() if key not in journal.puts})

    def _take(self, path: Path, journal: _Journal, line: bytes) -> None:
        match decode_line(line, self._own.keys):
            case Put() as put if put.version == VERSION and put.model == self._model.hex():
                keys = self._heads(path, put)
                if keys is not None:
                    self._put(journal, put, keys)
            case Touch() as touch if touch.key in journal.puts:
                known = journal.puts[touch.key]
                self._put(
                    journal, msgspec.structs.replace(known.put, times=touch.times), known.keys
                )
            case End() as end if end.key in journal.puts:
                del journal.puts[end.key]
                self._say(PeerEnd(end.key))

    def _put(self, journal: _Journal, put: Put, keys: list[BlockKey]) -> None:
        journal.puts[put.key] = found = PeerPut(put, keys)
        self._say(found)

    def _end_all(self, puts: dict[str, PeerPut]) -> None:
        for key in puts:
            self._say(PeerEnd(key))

    def _heads(self, path: Path, put: Put) -> list[BlockKey] | None:
        """What the headers of an entry's files say. None where one is not to be had."""
        keys: list[BlockKey] = []
        for digest in put.blocks:
            try:
                name = self._own.keys.name_of(bytes.fromhex(digest))
                data, size = read_block(path / "blocks", name, _HEAD_BYTES)
                keys.append(decode_header(data, name, size, self._model, self._own.keys))
            except (OSError, ValueError, Damaged):
                return None
            self._places[name] = path
        return keys

    def _read(self, key: BlockKey) -> None:
        limit = self._payload_bytes + _HEAD_BYTES
        try:
            data, size = read_block(self._places[key.name] / "blocks", key.name, limit)
            if size > limit:
                raise Damaged("short")
            payload = decode(data, key, self._model, self._own.keys)
            if len(payload) != self._payload_bytes:
                raise Damaged("short")
        except (FileNotFoundError, KeyError):
            self._say(Missed(key.name, "missing"))
        except OSError:
            self._say(Missed(key.name, "unreadable"))
        except Damaged as damaged:
            self._say(Missed(key.name, damaged.reason))
        else:
            self._say(Arrived(key.name, payload))
