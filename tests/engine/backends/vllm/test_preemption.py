"""What a request that vLLM preempts is told it reused: never more than it did."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from tests.engine.backends.vllm.simulator import BLOCK, Simulator, tokens_of

PREFIX = tokens_of("prefix", 640)


@pytest.fixture(params=[1, 2], ids=["scheduler", "async-scheduler"])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_one_that_lost_its_entry_before_its_first_token_read_nothing(
    llama: Path, depth: int
) -> None:
    """Nobody holds the entry: who decodes grows into it while its reader waits again."""
    sim = Simulator(llama, depth=depth, num_blocks=65, lease_share=0.0, step_tokens=8)
    prefix = tokens_of("shared", 160)
    sim.run("writer", prefix, wants=[("entry", 160, 50.0)])
    sim.add("grows", tokens_of("grows", 536), max_tokens=480)
    sim.until_started("grows")
    reader = sim.add("reader", [*prefix, *tokens_of("tail", 300)], read=("entry", 160))
    while not reader.num_preemptions:
        sim.step()
        assert not sim.tokens["reader"], "it was to be preempted"
    assert sim.report("reader").read_tokens == 160, "so far"
    sim.drain()
    assert sim.losses() == {"entry": "evicted"}
    report = sim.report("reader")
    assert report.hit_tokens < 160
    assert report.read_tokens == 0
    sim.check_refs()


def test_what_it_computed_itself_before_is_no_reuse(llama: Path, depth: int) -> None:
    sim = Simulator(llama, depth=depth, step_tokens=64)
    sim.run("writer", PREFIX[:320], wants=[("entry", 320, 50.0)])
    sim.add("reader", PREFIX, read=("entry", 320), wants=[("entry", 320, 50.0)])
    sim.step()
    assert sim.report("reader").read_tokens == 320
    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True)
    while sim.states() != {"entry": "leased"}:
        sim.step()  # it writes the entry anew
    sim.preempt("reader")
    sim.drain()
    assert len(sim.tokens["reader"]) == 2
    report = sim.report("reader")
    assert (report.hit_tokens, report.read_tokens) == (0, 0)
    sim.check_refs()


def test_one_that_finds_everything_again_keeps_its_numbers(llama: Path, depth: int) -> None:
    sim = Simulator(llama, depth=depth, step_tokens=64)
    sim.run("writer", PREFIX[:320], wants=[("entry", 320, 50.0)])
    sim.add("reader", PREFIX, read=("entry", 320))
    sim.step()
    sim.step()
    sim.preempt("reader")
    sim.drain()
    report = sim.report("reader")
    assert (report.hit_tokens, report.read_tokens) == (320, 320)
    sim.check_refs()


def test_one_preempted_while_it_decodes_keeps_its_numbers(llama: Path, depth: int) -> None:
    sim = Simulator(llama, depth=depth, num_blocks=65, lease_share=0.0)
    prefix = tokens_of("shared", 160)
    sim.run("writer", prefix, wants=[("entry", 160, 50.0)])
    sim.add("first", tokens_of("first", 500), max_tokens=400)
    sim.until_started("first")
    reader = sim.add("reader", [*prefix, 1], read=("entry", 160), max_tokens=500)
    sim.until_started("reader")
    sim.drain()
    assert reader.num_preemptions, "it was to be preempted"
    assert sim.report("reader").read_tokens == 160
    assert len(sim.tokens["reader"]) == 500
    assert sim.leases.total_blocks * BLOCK >= 160 + 1 + 500
    sim.check_refs()
