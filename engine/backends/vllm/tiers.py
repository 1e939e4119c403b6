"""Leases below the device, in vLLM's own offloading: a cache policy and a tier on disk.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "eviction_policy": "LeasedLast", "cache_policy_module_path": "…backends.vllm.tiers",
        "secondary_tiers": [{"type": "LeaseTier", "module_path": "…backends.vllm.tiers",
            "directory": "/var/lib/holdfast", "max_bytes": 107374182400}]}}

Our connector beside it says which chunks leases want and until when (`want`). It also says which
entries stand on them, for the tier's journal (`record`). An entry whose files are all there is back
at the next start. Chunks are found by vLLM's block hashes, which begin with the scope. Times are
Unix times. Everything but the threads' work runs in the scheduler's thread. A chunk that can't be
read is a miss.
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
"""The most blocks of a tier. The server's books take some 600 bytes for each."""
MAX_WANTED = 1_000_000
"""The most chunks that are remembered as wanted. Each takes some 100 bytes."""
GRACE_SECONDS = 60.0
"""How long content is kept after its lease, because the server's clock says when a lease ends."""
CLOSE_SECONDS = 30.0


class Wanted:
    """Until when leases want chunks. Each chunk is in the order of ends once."""

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
    """The policy of vLLM's tier in host memory: chunks that leases want are evicted last.

    Among the others, and among those, the least recently used goes first. No error of ours may
    leave the policy, because vLLM's scheduler calls it. vLLM relies on `_chunks`, so each change of
    it is one step of a dict. The orders are ours. If they fail, the policy is off and evicts what
    came first. A later vLLM may pass more arguments, as 0.33 does.
    """

    def __init__(self, cache_capacity: int, clock: Callable[[], float] = time.time) -> None:
        """Raise VllmChangedError if vLLM's offloading has changed."""
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
        """Take `n` keys out of the orders. If there are too few, None, and nothing is taken out.

        Raises KeyError if a key in the orders has no chunk.
        """
        for key in self._wanted.take_ended():
            if key in self._leased:
                del self._leased[key]
                self._plain[key] = None
                self._plain.move_to_end(key, last=False)
        evictable = (key for key in chain(self._plain, self._leased) if key not in protected)
        keys = list(islice(evictable, n))
        if len(keys) < n:
            return None
        for key in keys:
            if key not in self._chunks:
                raise KeyError
            del self._order_of(key)[key]
        return keys

    def _order_of(self, key: bytes) -> OrderedDict[bytes, None]:
        return self._leased if key in self._leased else self._plain


class DoneJob(NamedTuple):
    """A job that a thread has done."""

    job_id: int
    # It read chunks. Otherwise it wrote chunks.
    is_load: bool
    # The keys of the chunks that it wrote or read.
    good: Sequence[bytes]
    # The reason for each chunk that it could not write or read.
    failed: dict[bytes, str]
    seconds: float


class LeaseTier(SecondaryTierManager):
    """Keeps the chunks that leases want until their end, in files as the engine's own store does.

    A file that was not written for its chunk by this model in this layout is a miss. `above` is the
    policy of the tier in host memory, which must hear of leases too. `chain` is the secret of the
    keys of entries. After an error of ours the tier is off. Then all that it kept counts as gone,
    every look-up is a miss, every job fails, and `stats` says why.
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
        """`max_bytes` bounds the files of `directory`.

        Raises ValueError for chunks of several blocks. Raises StoreRefused for a directory that
        can't be used. Raises VllmChangedError if vLLM's offloading has changed.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        check_names("offloading")
        if offloading_spec.blocks_per_chunk != 1:
            raise ValueError("LeaseTier: `blocks_per_chunk` must be 1: a lease is of single blocks")
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
        # The thread's work for each job that vLLM waits for. None if it never began.
        self._jobs: dict[int, Future[None] | None] = {}
        self._finished: queue.SimpleQueue[DoneJob] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(4, "lease-tier")
        # One thread changes files, so that they change in order.
        self._threads = StoreThreads(self._directory, self._reader)
        self._file_bytes = header_bytes(len(_packed(b"\0" * 36)) // 4) + self._block_size_bytes
        self.max_blocks = min(max_bytes // self._file_bytes, MAX_BLOCKS)
        self.chain = self._directory.keys.chain
        self._counts = Counter[str]()
        self._puts = replay(self._directory.journal_lines(), model.hex(), self._directory.keys)
        # Whether an entry is leased, by the keys of the entries in the journal.
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
        """Keep these chunks, once they come, until this time at least."""
        if isinstance(self.above, LeasedLast):
            self.above.want(keys, until)
        for key in keys:
            self._wanted.want(key, until + GRACE_SECONDS)

    @guarded(False)
    def keeps(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._stored for key in keys)

    def take_gone(self) -> set[bytes]:
        """The chunks that the tier has stopped keeping since the last call."""
        self.switch.run(self._end, None)
        gone = self._gone
        self._gone = []
        return set(gone)

    @guarded(None)
    def record(self, records: Sequence[Record]) -> None:
        """Write records to the journal. Records of entries that it does not know are left out."""
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
        """Keep an entry of an earlier process. False if there is no room."""
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
        """The entries that are there from an earlier process. Empty after the first call."""
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
        """Have the marked part of our requests offloaded whole, even what others computed."""
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
        """Each ended job once. vLLM waits for every job, so one without a result has failed."""
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
        """Which parts of ours are off, and why. None if none is off."""
        switches = [self.switch]
        if isinstance(self.above, LeasedLast):
            # With the policy only the order in host memory is lost. What leases want is on disk.
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

    def _result_of(self, job: DoneJob) -> JobResult:
        """Take a job's outcome into the books."""
        self._counts["loaded" if job.is_load else "written"] += len(job.good)
        if job.is_load:
            self._misses.update(job.failed.values())
            for key in job.failed:
                self._forget(key)
        else:
            self._counts["failed"] += len(job.failed)
            self._writing.difference_update(job.good, job.failed)
            self._stored.update(dict.fromkeys(job.good))
            for key in job.good:
                if key not in self._wanted.until:  # its time is over already
                    self._forget(key)
        return JobResult(
            job.job_id,
            success=not job.failed,
            successful_keys=job.good if job.is_load and job.failed else None,
            transfer_time=job.seconds,
            transfer_bytes=len(job.good) * self._block_size_bytes,
        )

    def _lose_all(self) -> None:
        """Count every chunk as gone."""
        self._gone.extend(self._stored)
        self._stored.clear()

    def _end(self) -> None:
        """Delete the chunks that nobody wants any more."""
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
        start = time.monotonic()
        good = list[bytes]()
        failed = dict[bytes, str]()
        for key, chunk in pairs:
            payload = self._chunk(chunk)
            block = self._block_of(key)
            try:
                header = encode_header(block, payload, self._reader.model)
                self._directory.write(block.name, header, payload)
                good.append(key)
            except OSError:
                failed[key] = "unwritten"
        self._finished.put(DoneJob(job_id, False, good, failed, time.monotonic() - start))

    def _read(self, job_id: int, pairs: Sequence[tuple[bytes, int]]) -> None:
        start = time.monotonic()
        good = list[bytes]()
        failed = dict[bytes, str]()
        for key, chunk in pairs:
            outcome = self._reader.read(self._directory.path, self._block_of(key))
            if isinstance(outcome, Arrived):
                self._chunk(chunk)[:] = outcome.payload
                good.append(key)
            else:
                failed[key] = outcome.reason
        self._finished.put(DoneJob(job_id, True, good, failed, time.monotonic() - start))

    def _chunk(self, chunk: int) -> memoryview:
        return self._bytes[chunk * self._block_size_bytes : (chunk + 1) * self._block_size_bytes]

    def _block_of(self, key: bytes) -> BlockKey:
        """A chunk's place in the store. It has vLLM's whole hash in the place of tokens."""
        return BlockKey(self._reader.keys.name_of(key), NOBODY, NOBODY, NOBODY, 0, _packed(key))


def _packed(key: bytes) -> bytes:
    """The key, padded to a multiple of four bytes, as token ids are."""
    return key + b"\0" * (-len(key) % 4)


def facts_of(config: Any) -> dict[str, str]:
    """What a chunk depends on besides its hash. `config` is vLLM's OffloadingConfig.

    The files' sizes and times of change stand for the weights of a local model.
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
