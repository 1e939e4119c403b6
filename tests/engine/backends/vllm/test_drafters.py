"""vLLM's drafters: who only looks tokens up is served, who drops a hit's block is refused."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from tests.engine.backends.vllm.simulator import Simulator, tokens_of

PREFIX = tokens_of("prefix", 640)


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_leases_and_counts_hold_while_tokens_are_proposed(llama: Path, drafter: str) -> None:
    sim = Simulator(llama, drafter=drafter)
    sim.add("writer", PREFIX, wants=[("entry", 640, 300.0)], max_tokens=60)
    while sim.scheduler.has_requests():
        sim.step()
        sim.propose()
    assert sim.num_accepted > 10, "nothing was proposed"
    assert sim.stats().num_leases == 1
    sim.flood(10)
    report = sim.run("reader", [*PREFIX, 1, 2], read=("entry", 640), max_tokens=40)
    assert (report.hit_tokens, report.read_tokens) == (640, 640)
    assert sim.losses() == {}
    sim.check_refs()


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "mtp"])
def test_drafters_that_drop_the_last_block_are_refused(llama: Path, drafter: str) -> None:
    with pytest.raises(ValueError, match="EAGLE or MTP"):
        Simulator(llama, drafter=drafter)
