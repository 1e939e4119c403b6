"""An error in each part of our cache policy and our tier: vLLM's scheduler never meets it."""

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from engine.backends.vllm.tiers import LeasedLast
from tests.engine.backends.vllm.simulator import tokens_of
from tests.engine.backends.vllm.test_tiers import PREFIX, Offloading

POLICY_PARTS = ["_wanted", "_plain", "_take", "_order_of"]
TIER_PARTS = ["_begin_store", "_begin_load", "_finish", "_write", "_read", "_end"]


class Broken:
    """Whatever is done with it fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("planted")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")


@pytest.mark.parametrize("name", POLICY_PARTS)
def test_a_policy_that_fails_is_off_and_still_gives_away_what_is_idle(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    policy = LeasedLast(4)
    keys = [bytes([number]) * 8 for number in range(4)]
    chunks = [ChunkStatus(number) for number in range(4)]
    for key, chunk in zip(keys, chunks, strict=True):
        policy.insert(key, chunk, ReqContext("r"))
        chunk.ref_cnt = 0
        policy.mark_evictable(key)
    monkeypatch.setattr(policy, name, Broken())
    policy.want(keys[:1], 9.0)
    policy.touch(keys, ReqContext("r"))
    policy.mark_non_evictable(keys[3])
    chunks[3].ref_cnt = 1
    policy.mark_evictable(keys[0])
    evicted = policy.evict(2, {keys[0]})
    assert policy.switch.reason in ("RuntimeError", "TypeError")
    assert evicted is not None
    assert [key for key, _ in evicted] == [keys[1], keys[2]]
    assert policy.evict(1, {keys[0]}) is None
    policy.remove(keys[0])
    policy.remove(b"unknown")
    assert policy.get(keys[0]) is None


def test_a_key_that_is_of_no_chunk_switches_the_policy_off() -> None:
    """Such as vLLM would leave where it marks a chunk that it has removed."""
    policy = LeasedLast(4)
    policy.mark_evictable(b"of no chunk")
    chunk = ChunkStatus(0)
    policy.insert(b"known", chunk)
    chunk.ref_cnt = 0
    policy.mark_evictable(b"known")
    assert policy.evict(1, set()) == [(b"known", chunk)]
    assert policy.switch.reason == "KeyError"
    assert policy.evict(1, set()) is None


def test_a_job_that_was_cancelled_has_failed(llama: Path, tmp_path: Path) -> None:
    """As those are that wait when the tier is closed."""
    sim = Offloading(llama, tmp_path, host_blocks=50)
    try:
        job = Future[None]()
        assert job.cancel()
        sim.tier._jobs[4_711] = job
        (result,) = sim.tier.get_finished_jobs()
        assert (result.job_id, result.success) == (4_711, False)
        assert not sim.tier.has_pending_work()
    finally:
        sim.close()


@pytest.mark.parametrize("name", TIER_PARTS)
def test_a_tier_that_fails_is_off_and_says_why_while_all_else_goes_on(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The prefix stands in the tier alone, unless writing it is what failed."""
    until = time.time() + 300.0
    sim = Offloading(llama, tmp_path, host_blocks=50)
    try:
        if name not in ("_begin_load", "_read"):
            monkeypatch.setattr(sim.tier, name, Broken())
        sim.run("first", PREFIX, wants=[("first", 640, until)])
        sim.settle()
        sim.run("second", tokens_of("other", 640), wants=[("second", 640, until)], scope="other")
        sim.flood(3)
        sim.settle()
        monkeypatch.setattr(sim.tier, name, Broken())
        report = sim.run("reader", [*PREFIX, 1, 2], read="first")
        assert report.hit_tokens + report.computed_tokens == 642
        sim.check_loaded()
        sim.settle()
        assert sim.tier.switch.reason == "RuntimeError"
        assert sim.tier.stats().is_up is False
        assert sim.tier.stats().problem == "the tier is off (RuntimeError)"
        assert sim.tier.stats().used_blocks == 0
        assert not sim.tier.keeps([b"any"])
        assert not sim.tier.has_pending_work()
        # What stood there alone is told as lost, and leases on vLLM's own blocks go on.
        losses = sim.losses()
        assert losses and set(losses) | set(sim.states()) == {"first", "second"}
        assert sim.switch.is_on
        sim.check_refs()
        sim.call("release", list(sim.states()))
        sim.run("later", tokens_of("later", 640), wants=[("later", 640, until)], scope="later")
        assert sim.states() == {"later": "leased"}
        sim.call("release", ["later"])
        sim.check_refs()
    finally:
        sim.close()
