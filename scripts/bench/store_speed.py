"""Bytes a second of the store's threads, beside plain files of as many bytes."""

import os
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from engine.cache.digests import ChainHasher, pack
from engine.cache.store_files import BlockKey
from engine.store.directory import StoreDirectory
from engine.store.keys import FINGERPRINT_BYTES
from engine.store.threads import Arrived, StoreThreads
from scripts.bench.common import BLOCK_SIZE
from scripts.bench.report import table

ROUNDS = 3
WAIT_SECONDS = 600.0
MIB = 2**20


def tell_speed(folder: Path, options: Namespace) -> None:
    """Print a row for plain files and one for the store: written, written and synced, read."""
    heads = options.hidden // 256 or 1
    num_bytes = 2 * options.layers * heads * 64 * 4 * BLOCK_SIZE
    data = [os.urandom(num_bytes) for _ in range(options.files)]
    rates: dict[str, list[tuple[float, ...]]] = {"plain files": [], "the store": []}
    for number in range(ROUNDS):
        rates["plain files"].append(_plain(folder / f"plain-{number}", data))
        rates["the store"].append(_store(folder / f"speed-{number}", data))
    rows = [
        [name, *(f"{statistics.median(column):.0f}" for column in zip(*found, strict=True))]
        for name, found in rates.items()
    ]
    total = len(data) * num_bytes / MIB
    print(f"{len(data)} files of {num_bytes // 1024} KiB, {total:.0f} MiB, {ROUNDS} rounds")
    print(table(["MiB/s", "written", "written and synced", "read"], rows), flush=True)


def _rates(num_bytes: int, seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(num_bytes / MIB / one for one in seconds)


def _plain(place: Path, data: list[bytes]) -> tuple[float, ...]:
    """A file at a time, by one thread, each written under another name first."""
    place.mkdir()
    began = time.monotonic()
    for number, content in enumerate(data):
        (place / f"{number}.new").write_bytes(content)
        os.replace(place / f"{number}.new", place / str(number))
    written = time.monotonic() - began
    os.sync()
    synced = time.monotonic() - began
    _forget(place)
    began = time.monotonic()
    for number, content in enumerate(data):
        assert len((place / str(number)).read_bytes()) == len(content)
    return _rates(sum(map(len, data)), (written, synced, time.monotonic() - began))


def _store(place: Path, data: list[bytes]) -> tuple[float, ...]:
    """By the store's threads: one writes, two read and verify."""
    directory = StoreDirectory(place)
    threads = StoreThreads(directory, bytes(FINGERPRINT_BYTES))
    keys = keys_of_chain(directory, len(data))
    began = time.monotonic()
    for key, content in zip(keys, data, strict=True):
        threads.write(key, content)
    threads.barrier().result(WAIT_SECONDS)
    written = time.monotonic() - began
    os.sync()
    synced = time.monotonic() - began
    threads.take_results()
    _forget(place)
    began, arrived = time.monotonic(), 0
    for key in keys:
        threads.read(key, len(data[0]))
    while arrived < len(data):
        results = threads.take_results(timeout=WAIT_SECONDS)
        assert results and all(isinstance(one, Arrived) for one in results)
        arrived += len(results)
    read = time.monotonic() - began
    threads.close(WAIT_SECONDS)
    directory.close()
    return _rates(sum(map(len, data)), (written, synced, read))


def keys_of_chain(directory: StoreDirectory, count: int) -> list[BlockKey]:
    """The keys of a chain of so many blocks."""
    rng, keys = random.Random(1), []
    hasher = ChainHasher(directory.keys.chain, BLOCK_SIZE)
    root = parent = hasher.root("bench")
    for place in range(count):
        packed = pack([rng.randrange(4096) for _ in range(BLOCK_SIZE)])
        digest = hasher.extend(parent, packed)
        keys.append(BlockKey(directory.keys.name_of(digest), root, digest, parent, place, packed))
        parent = digest
    return keys


def _forget(place: Path) -> None:
    """Have the page cache forget all files."""
    for path in place.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
