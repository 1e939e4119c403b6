"""Leases below the device, in vLLM's own offloading: a cache policy and a tier on disk.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "eviction_policy": "LeasedLast", "cache_policy_module_path": "…backends.vllm.tiers",
        "secondary_tiers": [{"type": "LeaseTier", "module_path": "…backends.vllm.tiers",
            "directory": "/var/lib/holdfast", "max_bytes": 107374182400}]}}

The connector beside it says which chunks leases want, and until when (`want`), and which entries
stand on them, for the store's journal. An entry whose files are all there is back at the next
start. Chunks are found by vLLM's block hashes, which begin with the scope. Times are Unix times.
All but the threads' work runs in the scheduler's thread; what it can't do is a miss.
"""

import heapq
import queue
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from vllm import __version__
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadPolicy, RequestOffloadingContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from engine.backends.vllm.directive import PARAM_KEY
from engine.backends.vllm.names import check_names
from engine.backends.vllm.switch import Switch, guarded
from engine.cache.block import Entry
from engine.cache.ids import NOBODY
from engine.cache.store_tier import BlockKey
from engine.protocol.reports import StoreStats
from engine.store.files import (
    Arrived,
    BlockReader,
    StoreDirectory,
    encode_header,
    fingerprint,
    header_bytes,
)
from engine.store.journal import End, Put, Record, replay, restore
from engine.store.store import Failed, StoreThreads

MAX_BLOCKS = 262_144
"""The most blocks of a tier. The server's books have some 600 bytes for each."""
MAX_WANTED = 1_000_000
"""Chunks that are remembered as wanted at most, some 100 bytes each."""
GRACE_SECONDS = 60.0
"""Content is kept for so long behind its lease: the server's clock says when a lease ends."""
CLOSE_SECONDS = 30.0


class Wanted:
    """Until when leases want chunks. Each chunk stands once in the order of ends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.until: dict[bytes, float] = {}
        self._ends: list[tuple[float, bytes]] = []

    def want(self, key: bytes, until: float) -> None:
        if key in self.until:
            self.until[key] = max(self.until[key], until)
        elif len(self.until) < MAX_WANTED:
            self.until[key] = until
            heapq.heappush(self._ends, (until, key))

    def take_ended(self) -> list[bytes]:
        """The chunks that nobody wants any more since the last call."""
        ended = list[bytes]()
        now = self.clock()
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            until = self.until[key]
            if until > now:
                heapq.heappush(self._ends, (until, key))
            else:
                del self.until[key]
                ended.append(key)
        return ended


class LeasedLast(CachePolicy):
    """Least recently used, what leases want after all other. In vLLM's tier of host memory.

    Nothing of ours may leave it: vLLM's scheduler calls it. `_chunks` is what vLLM relies on, and
    single steps of a dict keep it. The orders are ours. Where they fail the policy is off, and
    gives away what came first. A later vLLM may pass more arguments, as 0.33 does.
    """

    def __init__(self, cache_capacity: int, clock: Callable[[], float] = time.time) -> None:
        """Raise VllmChangedError where vLLM's offloading is not as it was read."""
        super().__init__(cache_capacity)
        check_names("offloading")
        self.switch = Switch("cache policy")
        self._wanted = Wanted(clock)
        self._chunks: dict[bytes, ChunkStatus] = {}
        self._plain: OrderedDict[bytes, None] = OrderedDict()
        self._leased: OrderedDict[bytes, None] = OrderedDict()

    @guarded(None)
    def want(self, keys: Iterable[bytes], until: float) -> None:
        for key in keys:
            self._wanted.want(key, until)
            if key in self._plain:
                del self._plain[key]
                self._leased[key] = None

    def get(self, key: bytes, *_: Any, **__: Any) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, *_: Any, **__: Any) -> None:
        self._chunks[key] = chunk
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: bytes, *_: Any, **__: Any) -> None:
        self._chunks.pop(key, None)
        self.switch.run(lambda: self._order_of(key).pop(key, None), None)

    @guarded(None)
    def touch(self, keys: Iterable[bytes], *_: Any, **__: Any) -> None:
        for key in reversed(list(keys)):
            order = self._order_of(key)
            if key in order:
                order.move_to_end(key)

    @guarded(None)
    def mark_evictable(self, key: bytes, *_: Any, **__: Any) -> None:
        order = self._leased if key in self._wanted.until else self._plain
        order[key] = None

    @guarded(None)
    def mark_non_evictable(self, key: bytes, *_: Any, **__: Any) -> None:
        del self._order_of(key)[key]

    def evict(
        self, n: int, protected: Collection[bytes], *_: Any, **__: Any
    ) -> list[tuple[bytes, ChunkStatus]] | None:
        keys = self.switch.run(lambda: self._take(n, protected), None)
        if not self.switch.is_on:
            idle = (key for key, chunk in self._chunks.items() if chunk.ref_cnt == 0)
            keys = list(islice((key for key in idle if key not in protected), n))
        if keys is None or len(keys) < n:
            return None
        return [(key, self._chunks.pop(key)) for key in keys]

    def clear(self, *_: Any, **__: Any) -> None:
        for content in (self._chunks, self._plain, self._leased):
            content.clear()

    def _take(self, n: int, protected: Collection[bytes]) -> list[bytes] | None:
        """Take so many out of the orders; None, and no change, where there are too few.

        Raises KeyError for a key in an order that is none of a chunk.
        """
        for key in self._wanted.take_ended():
            if key in self._leased:
                del self._leased[key]
                self._plain[key] = None
                self._plain.move_to_end(key, last=False)
        able = (key for key in chain(self._plain, self._leased) if key not in protected)
        keys = list(islice(able, n))
        if len(keys) < n:
            return None
        for key in keys:
            if key not in self._chunks:
                raise KeyError
            del self._order_of(key)[key]
        return keys

    def _order_of(self, key: bytes) -> OrderedDict[bytes, None]:
        return self._leased if key in self._leased else self._plain


class Done(NamedTuple):
    """A job that a thread has done: the chunks that it has written or read, and the others, of
    which those that it read have a reason."""

    job_id: int
    is_load: bool
    done: Sequence[bytes]
    failed: dict[bytes, str]
    seconds: float


class LeaseTier(SecondaryTierManager):
    """Keeps the chunks that leases want until their end, in files as the engine's own store does.

    A file that is not what was written for its chunk, by this model in this layout, is a miss.
    `above` is the policy of the tier between, which hears of leases too. `chain` is the secret of
    the keys of entries. After an error of ours it is off: all that it kept is gone, every look-up
    is a miss, every job has failed, and `stats` says why.
    """

    medium = Medium.STORAGE
    above: object = None

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        directory: str,
        max_bytes: int,
        backpressure_detector: Any = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raise ValueError for chunks of several blocks, StoreRefused for the directory, and
        VllmChangedError where vLLM's offloading is not as it was read.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        check_names("offloading")
        if offloading_spec.blocks_per_chunk != 1:
            raise ValueError("LeaseTier: `blocks_per_chunk` must be 1, as leases are of blocks")
        self.switch = Switch("tier")
        self.switch.give_back = self._lose_all
        self._bytes = primary_kv_view.cast("B")
        self._directory = StoreDirectory(Path(directory))
        model = fingerprint(
            facts_of(offloading_spec.config) | {"bytes": str(self._block_size_bytes)}
        )
        self._reader = BlockReader(model, self._block_size_bytes, self._directory.keys)
        self._wanted = Wanted(clock)
        self._stored: dict[bytes, None] = {}
        self._writing: set[bytes] = set()
        self._gone: list[bytes] = []
        # None: it never began.
        self._jobs: dict[int, Future[None] | None] = {}
        self._finished: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(4, "lease-tier")
        # One thread changes files, so that they change in order.
        self._threads = StoreThreads(self._directory, self._reader)
        self._file_bytes = header_bytes(len(_packed(b"\0" * 36)) // 4) + self._block_size_bytes
        self.max_blocks = min(max_bytes // self._file_bytes, MAX_BLOCKS)
        self.chain = self._directory.keys.chain
        self._counts = Counter[str]()
        self._puts = replay(self._directory.journal_lines(), model.hex(), self._directory.keys)
        self._leases: dict[str, bool] = {}
        now = clock()
        self._restored = restore(
            self._puts,
            self.restore,
            lambda put: list(map(self._block_of, put.files)),
            partial(self._reader.miss_of, self._directory.path),
            now,
            now,
        )
        self._misses = self._restored.misses
        self._threads.append([End(key=key) for key in self._restored.dead], {})
        self._threads.compact()
        self._threads.sweep(frozenset(map(self._reader.keys.name_of, self._stored)))

    # What leases want and have.

    @guarded(None)
    def want(self, keys: Sequence[bytes], until: float) -> None:
        """Keep these, once they come, until then at least."""
        if isinstance(self.above, LeasedLast):
            self.above.want(keys, until)
        for key in keys:
            self._wanted.want(key, until + GRACE_SECONDS)

    @guarded(False)
    def keeps(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._stored for key in keys)

    def take_gone(self) -> set[bytes]:
        """Chunks that were kept, and are no more, since the last call."""
        self.switch.run(self._end, None)
        gone = self._gone
        self._gone = []
        return set(gone)

    @guarded(None)
    def record(self, records: Sequence[Record]) -> None:
        """Tell the journal of entries. What is said of one that it does not know is left out."""
        known_records = [
            record for record in records if isinstance(record, Put) or record.key in self._leases
        ]
        for record in known_records:
            if isinstance(record, End):
                self._leases.pop(record.key, None)
            else:
                self._leases[record.key] = record.times.is_leased
        self._threads.append(known_records, {})

    def restore(self, entry: Entry, keys: Sequence[BlockKey]) -> bool:
        """Keep an entry of an earlier process; False where there is no room."""
        key = entry.key.hex()
        files = self._puts.entries[key].files
        num_new = sum(file not in self._stored for file in files)
        if len(self._stored) + num_new > self.max_blocks:
            return False
        for file in files:
            self._stored[file] = None
            self._wanted.want(file, entry.expires_at + GRACE_SECONDS)
        self._leases[key] = entry.is_leased
        return True

    def take_restored(self) -> list[Put]:
        """The entries that are there from an earlier process, once."""
        puts = self._puts.entries
        self._puts.entries = {}
        return [puts[key] for key in self._leases if key in puts]

    def stats(self) -> StoreStats:
        used = len(self._stored)
        restored = self._restored
        return StoreStats(
            is_up=self.switch.is_on,
            blocks=self.max_blocks,
            used_blocks=used,
            held_blocks=used,
            max_bytes=self.max_blocks * self._file_bytes,
            used_bytes=used * self._file_bytes,
            entries=len(self._leases),
            leases=sum(self._leases.values()),
            written_bytes=self._counts["written"] * self._block_size_bytes,
            read_bytes=self._counts["loaded"] * self._block_size_bytes,
            written_blocks=self._counts["written"],
            loaded_blocks=self._counts["loaded"],
            restored_entries=restored.num_entries,
            restored_leases=restored.num_leases,
            lost_leases=restored.num_lost,
            failed_writes=self._counts["failed"],
            misses=dict(self._misses),
            problem=self._problem(),
        )

    # What vLLM's manager calls.

    @guarded(RequestOffloadingContext(OffloadPolicy.CHUNK_LEVEL))
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """What a request of ours marks is offloaded whole, though others computed it before."""
        is_ours = PARAM_KEY in (req_context.kv_transfer_params or ())
        policy = OffloadPolicy.REQUEST_LEVEL if is_ours else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(policy)

    @guarded(LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        return LookupResult.HIT if key in self._stored else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        job = self.switch.run(lambda: self._begin_store(job_metadata), None)
        self._jobs[job_metadata.job_id] = job

    def submit_load(self, job_metadata: Any) -> None:
        job = self.switch.run(lambda: self._begin_load(job_metadata), None)
        self._jobs[job_metadata.job_id] = job

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Every job once. One that ended without a result has failed: vLLM waits for each."""
        ended = {job_id: job for job_id, job in self._jobs.items() if job is None or job.done()}
        for job in ended.values():
            # `exception` raises for a job that was cancelled when the tier was closed.
            error = None if job is None or job.cancelled() else job.exception()
            if error is not None:
                self.switch.turn_off(type(error).__name__)
        nothing: list[JobResult] = []
        results = {result.job_id: result for result in self.switch.run(self._finish, nothing)}
        for job_id in ended:
            results.setdefault(job_id, JobResult(job_id, success=False))
        known = [result for job_id, result in results.items() if job_id in self._jobs]
        for result in known:
            del self._jobs[result.job_id]
        return known

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    @guarded(None)
    def drain_jobs(self) -> None:
        wait([*filter(None, self._jobs.values()), self._threads.run()])

    @guarded(None)
    def shutdown(self) -> None:
        self._readers.shutdown()
        self._threads.close(CLOSE_SECONDS)
        self._bytes.release()
        self._directory.close()

    # Inside.

    def _problem(self) -> str | None:
        """What of ours is off, and why."""
        switches = [self.switch]
        if isinstance(self.above, LeasedLast):
            # Only the order in host memory is lost with it. What leases want is on disk.
            switches.append(self.above.switch)
        problems = [
            f"the {switch.part} is off ({switch.reason})" for switch in switches if not switch.is_on
        ]
        return "; ".join(problems) or None

    def _begin_store(self, job_metadata: Any) -> "Future[None]":
        self._end()
        pairs = list[tuple[bytes, int]]()
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            is_new = key in self._wanted.until and key not in self._stored
            has_room = len(self._stored) + len(self._writing) < self.max_blocks
            if is_new and has_room and key not in self._writing:
                self._writing.add(key)
                pairs.append((key, int(chunk)))
        return self._threads.run(partial(self._write, job_metadata.job_id, pairs))

    def _begin_load(self, job_metadata: Any) -> "Future[None]":
        pairs = list(zip(job_metadata.keys, map(int, job_metadata.chunk_ids), strict=True))
        return self._readers.submit(self._read, job_metadata.job_id, pairs)

    def _finish(self) -> list[JobResult]:
        failures = (result for result in self._threads.results.take() if isinstance(result, Failed))
        self._counts["failed"] += sum(1 for _ in failures)
        results = list[JobResult]()
        with suppress(queue.Empty):
            while True:
                results.append(self._result_of(self._finished.get_nowait()))
        return results

    def _result_of(self, done: Done) -> JobResult:
        self._counts["loaded" if done.is_load else "written"] += len(done.done)
        if done.is_load:
            self._misses.update(done.failed.values())
            for key in done.failed:
                self._forget(key)
        else:
            self._counts["failed"] += len(done.failed)
            self._writing.difference_update(done.done, done.failed)
            self._stored.update(dict.fromkeys(done.done))
            for key in done.done:
                if key not in self._wanted.until:  # its time is over already
                    self._forget(key)
        return JobResult(
            done.job_id,
            success=not done.failed,
            successful_keys=done.done if done.is_load and done.failed else None,
            transfer_time=done.seconds,
            transfer_bytes=len(done.done) * self._block_size_bytes,
        )

    def _lose_all(self) -> None:
        """What leases stood on here is told as gone."""
        self._gone.extend(self._stored)
        self._stored.clear()

    def _end(self) -> None:
        """Delete what nobody wants any more."""
        ended = [key for key in self._wanted.take_ended() if key in self._stored]
        for key in ended:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        if key in self._stored:
            del self._stored[key]
            self._gone.append(key)
            self._threads.delete(self._reader.keys.name_of(key))

    # In the threads.

    def _write(self, job_id: int, pairs: Sequence[tuple[bytes, int]]) -> None:
        began = time.monotonic()
        done = list[bytes]()
        failed = dict[bytes, str]()
        for key, chunk in pairs:
            payload = self._chunk(chunk)
            block = self._block_of(key)
            try:
                header = encode_header(block, payload, self._reader.model)
                self._directory.write(block.name, header, payload)
                done.append(key)
            except OSError:
                failed[key] = "unwritten"
        self._finished.put(Done(job_id, False, done, failed, time.monotonic() - began))

    def _read(self, job_id: int, pairs: Sequence[tuple[bytes, int]]) -> None:
        began = time.monotonic()
        done = list[bytes]()
        failed = dict[bytes, str]()
        for key, chunk in pairs:
            outcome = self._reader.read(self._directory.path, self._block_of(key))
            if isinstance(outcome, Arrived):
                self._chunk(chunk)[:] = outcome.payload
                done.append(key)
            else:
                failed[key] = outcome.reason
        self._finished.put(Done(job_id, True, done, failed, time.monotonic() - began))

    def _chunk(self, chunk: int) -> memoryview:
        return self._bytes[chunk * self._block_size_bytes : (chunk + 1) * self._block_size_bytes]

    def _block_of(self, key: bytes) -> BlockKey:
        """The header has vLLM's whole hash in the place of a block's tokens."""
        return BlockKey(self._reader.keys.name_of(key), NOBODY, NOBODY, NOBODY, 0, _packed(key))


def _packed(key: bytes) -> bytes:
    return key + b"\0" * (-len(key) % 4)


def facts_of(config: Any) -> dict[str, str]:
    """What a chunk depends on besides its hash, of vLLM's OffloadingConfig.

    The weights of a local model are told by their files' sizes and times of change.
    """
    folder = Path(config.model.name)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    stats = [(path.name, stat.st_size, stat.st_mtime_ns) for path in files if (stat := path.stat())]
    layout = (config.groups, config.cache, config.parallel.tp_size, config.parallel.pp_size)
    return {
        "vllm": __version__,
        "model": f"{config.model.name} {config.model.dtype}",
        "weights": repr(stats),
        "layout": repr(layout),
    }
