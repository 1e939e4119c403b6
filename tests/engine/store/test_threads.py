"""The store's threads: files of any folder, and one call for all results that wait."""

from pathlib import Path

from engine.cache.digests import ChainHasher, pack
from engine.cache.store_tier import BlockKey
from engine.store.files import FINGERPRINT_BYTES, Arrived, BlockReader, StoreDirectory
from engine.store.store import StoreThreads, Written

CONTENT = bytes(range(256)) * 16


def new_threads(directory: StoreDirectory) -> StoreThreads:
    reader = BlockReader(bytes(FINGERPRINT_BYTES), len(CONTENT), directory.keys)
    return StoreThreads(directory, reader)


def keys_of_chain(directory: StoreDirectory, count: int) -> list[BlockKey]:
    hasher = ChainHasher(directory.keys.chain, 16)
    root = parent = hasher.root("scope")
    keys = []
    for place in range(count):
        packed = pack(range(16 * place, 16 * place + 16))
        digest = hasher.extend(parent, packed)
        keys.append(BlockKey(directory.keys.name_of(digest), root, digest, parent, place, packed))
        parent = digest
    return keys


def test_what_is_written_is_read_back_and_results_that_nobody_took_yet_wake_once(
    tmp_path: Path,
) -> None:
    directory = StoreDirectory(tmp_path)
    threads = new_threads(directory)
    wakes: list[int] = []
    threads.results.wake = lambda: wakes.append(1)
    keys = keys_of_chain(directory, 40)
    for number in (1, 2):
        for key in keys:
            threads.write(key, memoryview(CONTENT))
        threads.run().result(60)
        assert len(wakes) == number
        taken = threads.results.take()
        assert [result.error for result in taken if isinstance(result, Written)] == [None] * len(
            keys
        )
    assert sorted(directory.names()) == sorted(key.name for key in keys)
    for key in keys:
        threads.read(key)
        (arrival,) = threads.results.take(timeout=60)
        assert arrival == Arrived(key.name, CONTENT)
    assert threads.close(60)
    directory.close()
