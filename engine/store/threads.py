"""The store's threads: one changes files, in order; some read. Results wait to be taken."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from engine.cache.store_tier import BlockKey, Payload
from engine.store.block_file import (
    MAX_TOKENS,
    Damage,
    Damaged,
    decode,
    decode_header,
    encode_header,
    header_bytes,
)
from engine.store.directory import StoreDirectory
from engine.store.journal import Record, encode_line, replay
from engine.store.keys import StoreKeys

READERS = 2
SCAN_BATCH = 64
_HEAD_BYTES = header_bytes(MAX_TOKENS)


class Written(NamedTuple):
    """A block's file was written, or `error` says why not."""

    name: str
    num_bytes: int
    error: str | None = None


class Arrived(NamedTuple):
    name: str
    payload: bytes


class Missed(NamedTuple):
    """A file is damaged or gone. It is deleted unless the engine knows another of its name."""

    name: str
    reason: Damage


class Scanned(NamedTuple):
    """Files that were found in the directory. `is_last` when there are no more."""

    keys: list[BlockKey]
    missed: list[Missed]
    is_last: bool = False


class Appended(NamedTuple):
    """The records of this call of `append`, and of all before it, are in the journal's file."""

    number: int


class Failed(NamedTuple):
    """The journal could not be written, or a file not be deleted."""

    error: str


Result = Written | Arrived | Missed | Scanned | Appended | Failed


class StoreThreads:
    """`wake`, once set, is called from these threads after a result; it must not block.

    It is called once for all results until they are taken.
    """

    def __init__(self, directory: StoreDirectory, fingerprint: bytes) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        self.wake: Callable[[], None] = _nobody
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")
        self._writer = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._is_woken = threading.Event()
        self._is_closed = threading.Event()
        self._is_abandoned = threading.Event()
        self._unwritten: list[bytes] = []
        self._num_appends = 0
        self.journal_bytes = self.compacted_bytes = 0
        self._writer.start()

    def take_results(self, timeout: float | None = None) -> list[Result]:
        """The results since the last call. With a timeout in seconds this waits for the first."""
        results: list[Result] = []
        self._is_woken.clear()
        while True:
            try:
                if timeout is not None and not results:
                    results.append(self._results.get(timeout=timeout))
                else:
                    results.append(self._results.get_nowait())
            except queue.Empty:
                return results

    # Tasks of the writer.

    def write(self, key: BlockKey, payload: Payload) -> None:
        self._tasks.put(lambda: self._write(key, payload))

    def delete(self, name: str) -> None:
        self._tasks.put(lambda: self._delete(name))

    def append(self, records: Sequence[Record]) -> int:
        """Add records to the journal. Return the number by which `Appended` tells that they are."""
        self._num_appends += 1
        number = self._num_appends
        self._tasks.put(lambda: self._append(records, number))
        return number

    def compact(self) -> None:
        """Write the journal anew, with what had not ended."""
        self._tasks.put(self._compact)

    def barrier(self) -> "Future[None]":
        """Done when everything before is done."""
        future: Future[None] = Future()
        self._tasks.put(lambda: future.set_result(None))
        return future

    # Tasks of the readers.

    def read(self, key: BlockKey, payload_bytes: int) -> None:
        self._readers.submit(self._read, key, payload_bytes)

    def scan(self, known: frozenset[str]) -> None:
        """Look at every file that is not known."""
        self._readers.submit(self._scan, known)

    def close(self, timeout: float) -> bool:
        """Finish the writer's tasks. False if that took too long."""
        self._is_closed.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._tasks.put(None)
        self._writer.join(timeout)
        return not self._writer.is_alive()

    def abandon(self) -> None:
        """End after the task in progress. Nothing else is done: a killed process does no more."""
        self._is_abandoned.set()
        self.close(timeout=60.0)

    # Inside.

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._is_abandoned.is_set():
                task()

    def _say(self, result: Result) -> None:
        self._results.put(result)
        # `take_results` clears the event first: a result put before that is taken with it.
        if not self._is_woken.is_set():
            self._is_woken.set()
            self.wake()

    def _write(self, key: BlockKey, payload: Payload) -> None:
        header = encode_header(key, payload, self._fingerprint, self._directory.keys)
        try:
            self._directory.write(key.name, header, payload)
        except OSError as error:
            self._say(Written(key.name, len(payload), _told(error)))
        else:
            self._say(Written(key.name, len(payload)))

    def _delete(self, name: str) -> None:
        try:
            self._directory.delete(name)
        except OSError as error:
            self._say(Failed(_told(error)))

    def _append(self, records: Sequence[Record], number: int) -> None:
        """Lines that could not be written are tried again with the next ones, on a line of their
        own."""
        keys = self._directory.keys
        self._unwritten.extend(encode_line(record, keys) for record in records)
        if not self._unwritten:
            return
        lines = b"".join(self._unwritten)
        try:
            self._directory.append_journal(lines)
        except OSError as error:
            if self._unwritten[0] != b"\n":
                self._unwritten.insert(0, b"\n")
            self._say(Failed(_told(error)))
        else:
            self._unwritten.clear()
            self.journal_bytes += len(lines)
            self._say(Appended(number))

    def _compact(self) -> None:
        keys, model = self._directory.keys, self._fingerprint.hex()
        try:
            told = replay(self._directory.journal_lines(), model, keys)
            lines = b"".join(encode_line(put, keys) for put in told.entries.values())
            self._directory.rewrite_journal(lines)
        except OSError as error:
            self._say(Failed(_told(error)))
        else:
            self.journal_bytes = self.compacted_bytes = len(lines)

    def _read(self, key: BlockKey, payload_bytes: int) -> None:
        limit = payload_bytes + _HEAD_BYTES
        try:
            data, size = self._directory.read(key.name, limit)
            if size > limit:
                raise Damaged("short")
            payload = decode(data, key, self._fingerprint, self._directory.keys)
            if len(payload) != payload_bytes:
                raise Damaged("short")
        except FileNotFoundError:
            self._say(Missed(key.name, "missing"))
        except OSError:
            self._say(Missed(key.name, "unreadable"))
        except Damaged as damaged:
            self._say(Missed(key.name, damaged.reason))
        else:
            self._say(Arrived(key.name, payload))

    def _scan(self, known: frozenset[str]) -> None:
        keys: list[BlockKey] = []
        missed: list[Missed] = []
        try:
            for name in self._directory.names():
                if self._is_closed.is_set():
                    return
                if name in known:
                    continue
                found = self.head(name)
                if not isinstance(found, Missed):
                    keys.append(found)
                elif found.reason != "missing":  # it was deleted meanwhile
                    missed.append(found)
                if len(keys) + len(missed) >= SCAN_BATCH:
                    self._say(Scanned(keys, missed))
                    keys, missed = [], []
        except OSError as error:
            self._say(Failed(_told(error)))
        self._say(Scanned(keys, missed, is_last=True))

    def head(self, name: str) -> BlockKey | Missed:
        """The key in a file's header, or why it is none."""
        return read_header(self._directory.read, name, self._fingerprint, self._directory.keys)


def read_header(
    read: Callable[[str, int], tuple[bytes, int]], name: str, model: bytes, keys: StoreKeys
) -> BlockKey | Missed:
    """The key in a file's header, or why it is none. `read` takes a name and the most bytes."""
    try:
        data, size = read(name, _HEAD_BYTES)
        return decode_header(data, name, size, model, keys)
    except FileNotFoundError:
        return Missed(name, "missing")
    except OSError:
        return Missed(name, "unreadable")
    except Damaged as damaged:
        return Missed(name, damaged.reason)


def _nobody() -> None:
    """Nobody waits for results yet."""


def _told(error: OSError) -> str:
    return error.strerror or type(error).__name__
