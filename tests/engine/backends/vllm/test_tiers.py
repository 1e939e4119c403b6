"""Leases below the device: vLLM's own scheduler, offloading and tiers, with our policy and tier.

Only the copies between device and host are ours here: vLLM's want a GPU. A device block's content
is a function of its hash; what comes back is compared with it.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from engine.backends.external import MirrorPool, Order
from engine.backends.reports import chains_held, entry_infos
from engine.backends.vllm import directive
from engine.backends.vllm.core import OrderRefused, VllmCore
from engine.backends.vllm.loop import HeldCache, HeldEntries
from engine.backends.vllm.tiers import LeasedLast, LeaseTier
from engine.cache.digests import ChainHasher
from engine.cache.lookup import Segment
from engine.cache.prefix_cache import CacheQuery, CacheResult
from engine.protocol import Breakpoint, ChainHeld, HeldName
from engine.protocol.reports import EntryInfo
from engine.schedule.runner import SampleParams
from engine.store.files import StoreRefused
from engine.store.journal import Record
from tests.engine.backends.local import request
from tests.engine.backends.vllm.simulator import BLOCK, TOKEN, Simulator, tokens_of
from tests.engine.cache.checks import check_entries, check_pool

TIERS = "engine.backends.vllm.tiers"
CHUNK_BYTES = 4096
PREFIX = tokens_of("prefix", 640)


class Offloading(Simulator):
    """With an OffloadingConnector beside ours, `host_blocks` in host memory and a tier on disk."""

    max_idle_steps = 10_000
    is_closed = False

    def __init__(
        self, model: Path, directory: Path, *, host_blocks: int = 64, **options: Any
    ) -> None:
        tier = {"directory": str(directory), "max_bytes": 2**24, "module_path": TIERS}
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": host_blocks * CHUNK_BYTES,
            "eviction_policy": "LeasedLast",
            "cache_policy_module_path": TIERS,
            "secondary_tiers": [{"type": "LeaseTier", **tier}],
        }
        beside = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        super().__init__(
            model, beside={**beside, "kv_connector_extra_config": extra}, is_bound=False, **options
        )
        self.offloading = self.scheduler.get_kv_connector().sub_connectors[1].connector_scheduler
        (self.tier,) = self.offloading.manager.secondary_tiers
        self.view = self.offloading.manager.primary_tier.get_kv_memoryview().cast("B")
        self.loaded: dict[int, bytes] = {}
        self.num_loaded = 0
        self.bound = msgspec.convert(self.call("bind", TOKEN), directive.Bound)
        assert self.bound.max_blocks == self.tier.max_blocks > 1000

    def step(self) -> None:
        super().step()
        if self.num_idle_steps:
            time.sleep(0.001)  # threads read and write

    def settle(self) -> None:
        """Until everything that was to be written is."""
        deadline = time.monotonic() + 60
        while self.offloading.has_pending_push_work():
            self.step()
            assert time.monotonic() < deadline
        self.drain()
        self.tier.drain_jobs()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.view.release()
            self.scheduler.shutdown()

    def _run(self, output: Any) -> ModelRunnerOutput:
        result = super()._run(output)
        meta = output.kv_connector_metadata.metadata[1]
        metadata = OffloadingWorkerMetadata()
        blocks = self.pool.blocks
        received = set()
        for job_id, job in meta.store_jobs.items():
            pairs = zip(job.src_spec.block_ids, job.dst_spec.block_ids, strict=True)
            for block_id, chunk in pairs:
                at = int(chunk) * CHUNK_BYTES
                self.view[at : at + CHUNK_BYTES] = content_of(blocks[block_id].block_hash)
            metadata.mark_completed(job_id)
        for job_id, job in meta.load_jobs.items():
            pairs = zip(job.src_spec.block_ids, job.dst_spec.block_ids, strict=True)
            for chunk, block_id in pairs:
                at = int(chunk) * CHUNK_BYTES
                self.loaded[int(block_id)] = bytes(self.view[at : at + CHUNK_BYTES])
            self.num_loaded += len(job.dst_spec.block_ids)
            metadata.mark_completed(job_id)
            received.add(job.req_id)
        result.kv_connector_output = KVConnectorOutput(
            finished_recving=received,
            kv_connector_worker_meta=MultiKVConnectorWorkerMetadata((None, metadata)),
        )
        return result

    def check_loaded(self) -> int:
        """What was loaded is what its block's hash stands for; how many blocks were."""
        for block_id, content in self.loaded.items():
            key = self.pool.blocks[block_id].block_hash
            if key is not None:
                assert content == content_of(key)
        self.loaded.clear()
        num = self.num_loaded
        self.num_loaded = 0
        return num


def content_of(block_hash: bytes) -> bytes:
    return sha256(block_hash).digest() * (CHUNK_BYTES // 32)


def file_of(sim: Offloading, entry: str) -> Path:
    """Of the entry's block in the middle."""
    name = sim.tier._reader.keys.name_of(sim.leases._entries[entry].hashes[20])
    return sim.tier._directory.path / "blocks" / name[:2] / str(name)


def hurt(path: Path, damage: str) -> bytes:
    """What was written there."""
    file_bytes = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(
            file_bytes[:-1] + (b"" if damage == "short" else bytes([file_bytes[-1] ^ 1]))
        )
    return file_bytes


Make = Callable[..., Offloading]


@pytest.fixture(params=[1, 2], ids=["scheduler", "async-scheduler"])
def make(request: pytest.FixtureRequest, llama: Path, tmp_path: Path) -> Iterator[Make]:
    simulators: list[Offloading] = []

    def make(at: str = "tier", **options: Any) -> Offloading:
        simulators.append(Offloading(llama, tmp_path / at, depth=request.param, **options))
        return simulators[-1]

    yield make
    for sim in simulators:
        sim.close()


def soon(seconds: float = 300.0) -> float:
    return time.time() + seconds


def test_a_lease_that_gives_its_room_to_others_stays_and_is_read_from_the_tier(make: Make) -> None:
    sim = make(host_blocks=50)
    sim.run("first", PREFIX, wants=[("first", 640, soon())])
    sim.settle()
    # The budget is 64 blocks: the first lease makes way, and would have ended.
    second_prompt = tokens_of("other", 640)
    sim.run("second", second_prompt, wants=[("second", 640, soon(400))], scope="other")
    assert sim.states() == {"first": "leased", "second": "leased"}
    assert sim.leases.num_lowered == 1 and sim.losses() == {}
    sim.flood(3)
    sim.settle()
    assert sim.states() == {"first": "leased", "second": "leased"}
    report = sim.run("reader", [*PREFIX, 1, 2], read="first", wants=[("first", 640, soon())])
    assert report.hit_tokens == 640 and report.computed_tokens == 2
    assert sim.check_loaded() == 40
    assert [outcome.state for outcome in report.held] == ["leased"] and sim.losses() == {}
    sim.settle()
    sim.check_refs()


def test_what_is_not_marked_is_not_written_to_the_tier(make: Make) -> None:
    sim = make()
    sim.run("marked", PREFIX, wants=[("entry", 320, soon())])
    sim.run_foreign("plain", tokens_of("plain", 640))
    sim.settle()
    files = [path for path in (sim.tier._directory.path / "blocks").rglob("*") if path.is_file()]
    assert len(files) == 320 // BLOCK
    # Nor is another scope's: the same tokens have other hashes.
    sim.flood(3)
    assert sim.run("stranger", [*PREFIX, 1], scope="stranger").hit_tokens == 0


def test_what_nobody_asked_to_hold_takes_no_room_of_the_tier(make: Make) -> None:
    sim = make()
    vars(sim.tier)["max_blocks"] = 40
    for number in range(3):
        wants = [(f"chat{number}", 640, soon())]
        sim.run(f"c{number}", tokens_of(f"chat{number}", 640), wants=wants, is_asked_for=False)
        sim.settle()
    assert sim.tier.stats().used_blocks == 0
    sim.run("marked", PREFIX, wants=[("marked", 640, soon())])
    sim.settle()
    assert sim.tier.keeps(list(sim.leases._entries["marked"].hashes))
    assert sim.tier.stats().used_blocks == 40


def test_a_mark_behind_what_nobody_asked_to_hold_writes_it_to_the_tier(make: Make) -> None:
    server = Server(make())
    server.turn("writer", [*PREFIX, 1], hold=False)
    (entry,) = server.listing()
    assert (entry.state, entry.reason) == ("best_effort", "automatic")
    assert server.sim.tier.stats().used_blocks == 0
    assert server.sim.tier.stats().entries == 0, "the journal was told of a copy that is not there"
    server.turn("reader", [*PREFIX, 1, 2])
    assert [(entry.state, entry.reason) for entry in server.listing()] == [("leased", None)]
    stats = server.sim.tier.stats()
    assert (stats.used_blocks, stats.entries, stats.leases) == (40, 1, 1)
    again = server.killed(make, "again")
    assert [(entry.state, entry.tier) for entry in again.listing()] == [("leased", "disk")]
    assert again.sim.tier.stats().misses == {}


def test_a_prefix_that_others_computed_is_written_when_it_is_marked(make: Make) -> None:
    sim = make()
    sim.run("unmarked", PREFIX)
    sim.run("marked", [*PREFIX, 1], wants=[("entry", 640, soon())])
    sim.settle()
    assert sim.tier.keeps(list(sim.leases._entries["entry"].hashes))


@pytest.mark.parametrize("damage", ["changed", "short", "gone"])
def test_a_damaged_file_is_computed_and_its_lease_told_as_lost(make: Make, damage: str) -> None:
    sim = make(host_blocks=50)
    sim.run("first", PREFIX, wants=[("first", 640, soon())])
    sim.settle()
    path = file_of(sim, "first")
    sim.run("second", tokens_of("other", 640), wants=[("second", 640, soon())], scope="other")
    sim.flood(3)
    sim.settle()
    file_bytes = hurt(path, damage)
    report = sim.run("reader", [*PREFIX, 1, 2], read="first")
    assert report.hit_tokens == 320 and report.computed_tokens == 322
    assert sim.check_loaded() == 20
    assert sim.losses() == {"first": "evicted"}
    # Its time is not over: what was computed again is written again.
    sim.settle()
    assert path.read_bytes() == file_bytes


NAME = "00112233aabbccdd"


class Server:
    """The books of a server over the scheduler of a simulator. Its clock began at its start."""

    def __init__(self, sim: Offloading) -> None:
        self.sim = sim
        self.began_at = time.time()
        self.pool = MirrorPool(4096, BLOCK)
        self.entries = HeldEntries(self.pool, is_recorded=True)
        self.cache = HeldCache(self.pool, self.entries, ChainHasher(sim.bound.chain, BLOCK))
        self.cache.restore(sim.bound.entries, self.now, time.time())

    @property
    def now(self) -> float:
        return time.time() - self.began_at

    def turn(
        self, name: str, prompt: list[int], *, age: float = 0.0, hold: bool = True
    ) -> CacheResult:
        """A prompt with a breakpoint at its first 640 tokens, for 300 seconds."""
        query = CacheQuery(
            scope="scope",
            tokens=prompt,
            digests=self.cache.digests("scope", prompt),
            segments=[Segment("text", 640)],
            breakpoints=[Breakpoint(0, hold=hold)],
            names=[HeldName(NAME, 640)],
            min_cache_tokens=1,
            arrived_at=self.now - age,
        )
        prefix = self.cache.look_up(query)
        orders = self.cache.directive(name, query, prefix, None)
        stamped = msgspec.structs.replace(orders, token=TOKEN, unix_offset=self.began_at)
        transfer = {directive.PARAM_KEY: msgspec.to_builtins(stamped)}
        self.sim.add_foreign(name, prompt, transfer=transfer, scope="scope")
        self.sim.drain()
        self.cache.lose(self.sim.leases.take_losses())
        table = self.cache.new_table(query)
        self.cache.admit(query, prefix, table, self.sim.report(name))
        start = self.cache.write(query, prefix, table, self.now)
        self.cache.let_go(prefix)
        table.release()
        self.sim.call("release", [key.hex() for key in self.cache.let_off(orders)])
        self.tell()
        return start

    def tell(self) -> None:
        released = [key.hex() for key in self.cache.take_released()]
        self.sim.call("release", released)
        records = self.entries.take_records(self.now, time.time())
        self.sim.call("record", msgspec.json.encode(records))
        self.sim.settle()
        check_pool(self.pool)

    def listing(self) -> list[EntryInfo]:
        check_entries(self.entries)
        return entry_infos(self.cache, lambda: self.now, {})

    def chains(self) -> list[ChainHeld]:
        return [chain for part in chains_held(self.cache, lambda: self.now) for chain in part]

    def killed(self, make: Make, at: str) -> "Server":
        """What a new process has of what this one had on the disk at this moment."""
        here = self.sim.tier._directory.path
        shutil.copytree(here, here.parent / at)
        return Server(make(at=at))


@pytest.mark.parametrize("share", [0.5, 0.0], ids=["leased", "best_effort"])
def test_an_entry_whose_files_are_there_outlives_the_process(make: Make, share: float) -> None:
    server = Server(make(lease_share=share))
    state = "leased" if share else "best_effort"
    assert server.turn("writer", [*PREFIX, 1]).usage.cache_read_tokens == 0
    server.turn("other", [*tokens_of("other", 640), 1])
    with pytest.raises(StoreRefused):
        make()
    again = server.killed(make, "again")
    assert [(entry.state, entry.tier, entry.tokens) for entry in again.listing()] == [
        (state, "disk", 640)
    ] * 2
    assert all(295 < entry.expires_in_seconds <= 300 for entry in again.listing())
    assert {(chain.tier, chain.num_leased) for chain in again.chains()} == {
        ("disk", int(share > 0))
    }
    assert again.entries.num_leases == (2 if share else 0)
    reader = again.turn("reader", [*PREFIX, 1, 2])
    assert (reader.usage.cache_read_tokens, reader.usage.computed_tokens) == (640, 2)
    assert again.sim.check_loaded() == 40
    assert sorted(entry.tier for entry in again.listing()) == ["device", "disk"]
    # Whatever ended is not there again; what was refreshed is.
    assert again.entries.drop("scope", again.entries.live()[1].key) == 1
    again.tell()
    third = again.killed(make, "third")
    assert len(third.listing()) == 1
    stats = third.sim.tier.stats()
    assert (stats.restored_entries, stats.lost_leases, stats.used_blocks) == (1, 0, 40)


def test_an_entry_whose_time_is_over_is_not_there_again(make: Make) -> None:
    server = Server(make())
    server.turn("writer", [*PREFIX, 1], age=297.0)
    assert server.listing()[0].state == "leased"
    time.sleep(3.1)
    again = server.killed(make, "again")
    assert again.listing() == []
    assert again.turn("reader", [*PREFIX, 1]).usage.input_tokens > 0
    assert again.sim.check_loaded() == 0


@pytest.mark.parametrize("damage", ["changed", "short", "gone"])
def test_a_file_that_is_damaged_while_nothing_runs_is_a_counted_miss(
    make: Make, damage: str
) -> None:
    server = Server(make())
    server.turn("writer", [*PREFIX, 1])
    (entry,) = server.entries.live()
    hurt(file_of(server.sim, entry.key.hex()), damage)
    again = server.killed(make, "again")
    assert len(again.listing()) == (damage == "changed"), "its content is looked at when it is read"
    usage = again.turn("reader", [*PREFIX, 1]).usage
    assert usage.cache_read_tokens == 0 and usage.computed_tokens + usage.automatic_tokens == 641
    assert again.sim.check_loaded() == (20 if damage == "changed" else 0)
    stats = again.sim.tier.stats()
    reason = {"gone": "missing", "changed": "checksum"}
    assert stats.misses == {reason.get(damage, damage): 1}
    assert stats.lost_leases == (damage != "changed")
    assert again.turn("again", [*PREFIX, 1]).usage.cache_read_tokens == 640


def test_files_of_another_model_are_misses(llama: Path, tmp_path: Path, make: Make) -> None:
    sim = make()
    sim.run("first", PREFIX, wants=[("first", 640, soon())])
    sim.settle()
    sim.close()
    weights = next(llama.glob("*.safetensors"))
    before = weights.stat()
    os.utime(weights, (0, 0))
    try:
        assert make().run("reader", [*PREFIX, 1, 2]).hit_tokens == 0
    finally:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


class Recorded:
    """An AsyncLLM that refuses what it notes."""

    async def add_request(self, _id: str, prompt: Any, params: Any, **more: Any) -> None:
        self.prompt = prompt
        self.transfer = params.extra_args["kv_transfer_params"]
        raise ValueError


@pytest.mark.anyio
@pytest.mark.parametrize("lengths", [[], [32], [32, 320]])
async def test_the_server_says_what_is_marked_and_until_when(lengths: list[int]) -> None:
    llm = Recorded()
    core = VllmCore(llm, 4096, takes_seeds=True, is_owner=False)
    wants = [directive.Want(key="00", tokens=n, expires_at=9.0) for n in lengths]
    wish = directive.Directive(request_id="r", scope="s", wants=wants, unix_offset=7.0)
    order = Order(
        order_id="r",
        scope="s",
        token_ids=[1],
        request=request(),
        sample=SampleParams(temperature=0, top_p=1, top_k=0, seed=0),
        max_tokens=1,
        adapter="ab",
    )
    with pytest.raises(OrderRefused):
        await anext(aiter(core.generate(order, wish)))
    assert llm.transfer["max_offload_tokens"] == max(lengths, default=0)
    assert llm.transfer[directive.PARAM_KEY]["unix_offset"] == 7.0
    assert llm.prompt["cache_salt"] == "s.ab"


def test_the_policy_takes_what_leases_want_last_and_follows_a_model() -> None:
    rng = Random(5)
    now = [0.0]
    policy = LeasedLast(1000, clock=lambda: now[0])
    ends: dict[bytes, float] = {}
    order: list[bytes] = []
    for number in range(2000):
        key = make_offload_key(rng.randbytes(32), 0)
        act = rng.random()
        now[0] += 1
        if act < 0.5:
            if rng.random() < 0.3:
                ends[key] = now[0] + rng.randrange(200)
                policy.want([key], ends[key])
            chunk = ChunkStatus(number)
            chunk.ref_cnt = 0
            policy.insert(key, chunk)
            order.append(key)
        elif act < 0.7 and order:
            key = rng.choice(order)
            order.remove(key)
            order.append(key)
            policy.touch([key], None)
        elif order:
            protected = set(rng.sample(order, min(3, len(order))))
            evicted = policy.evict(1, protected)
            able = [key for key in order if key not in protected]
            if not able:
                assert evicted is None
                continue
            assert evicted is not None
            ((gone, _),) = evicted
            free = {key for key in able if ends.get(key, 0) <= now[0]}
            assert gone in (free or able) and policy.get(gone) is None
            order.remove(gone)
    assert len(order) == len(policy._chunks) > 100


def test_a_full_tier_keeps_what_it_has(tmp_path: Path) -> None:
    view = memoryview(bytearray(8 * CHUNK_BYTES)).cast("B", (8, CHUNK_BYTES))
    config = SimpleNamespace(
        model=SimpleNamespace(name="m", dtype="float32"),
        groups=(),
        cache=(),
        parallel=SimpleNamespace(tp_size=1, pp_size=1),
    )
    spec = SimpleNamespace(blocks_per_chunk=1, config=config)
    tier = LeaseTier(spec, view, "LeaseTier", str(tmp_path / "tier"), 5 * CHUNK_BYTES)
    assert tier.max_blocks == 4
    keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(8)]
    tier.want(keys, soon())
    context = ReqContext("r")
    job = SimpleNamespace(job_id=1, keys=keys, chunk_ids=list(range(8)), req_context=context)
    tier.submit_store(job)
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert result.success
    results = [tier.lookup(key, context) for key in keys]
    assert results == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 4
    tier.shutdown()
    spec.blocks_per_chunk = 2
    with pytest.raises(ValueError, match="blocks_per_chunk"):
        LeaseTier(spec, view, "LeaseTier", str(tmp_path / "other"), 2**20)


class Kept:
    """A tier that keeps what it is told to, at once, and loses some of it."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.kept: set[bytes] = set()
        self._gone: set[bytes] = set()

    def want(self, keys: Sequence[bytes], until: float) -> None:
        if self._rng.random() < 0.7:
            self.kept.update(keys)

    def keeps(self, keys: Iterable[bytes]) -> bool:
        return self.kept.issuperset(keys)

    def take_gone(self) -> set[bytes]:
        gone = self._gone
        self._gone = set()
        return gone

    def record(self, records: Sequence[Record]) -> None:
        pass

    def lose(self, num: int) -> None:
        lost = self._rng.sample(sorted(self.kept), min(num, len(self.kept)))
        self.kept.difference_update(lost)
        self._gone.update(lost)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("second", [None, "window"])
def test_the_server_hears_of_each_lease_that_neither_has(
    llama: Path, seed: int, second: str | None
) -> None:
    rng = Random(seed)
    sim = Simulator(llama, second=second)
    states = dict[str, str]()
    below = Kept(rng)
    vars(sim.leases)["below"] = below
    prefixes = [tokens_of(f"prefix{n}", 320) for n in range(8)]
    for turn in range(80):
        act = rng.random()
        number = rng.randrange(8)
        if act < 0.6:
            lengths = sorted(rng.sample([80, 160, 240, 320], rng.randrange(1, 3)))
            wants = [(f"{number}-{n}", n, float(rng.randrange(999))) for n in lengths]
            scope = f"scope{number % 3}"
            prompt = [*prefixes[number], 1, turn + 5]
            sim.run(f"turn{turn}", prompt, wants=wants, scope=scope, read=wants[-1][0])
        elif act < 0.8:
            sim.flood(rng.random(), scope=f"flood{turn}")
        elif act < 0.9:
            below.lose(rng.randrange(1, 9))
        elif states:
            key = rng.choice(sorted(states))
            sim.leases.release([key])
            del states[key]
        now = sim.states()
        for key, reason in sim.losses().items():
            states[key] = "best_effort"
            if reason in ("evicted", "reset"):
                del states[key]
        if act < 0.6:
            outcomes = sim.report(f"turn{turn}").held
            states |= {entry.key: entry.state for entry in outcomes if entry.state != "none"}
        assert states == sim.states(), (turn, now)
        sim.check_refs()
    assert sim.leases.num_lowered > 5
