"""Requests aborted inside vLLM's own schedulers: what they held, and what they computed."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from tests.engine.backends.vllm.conftest import Make
from tests.engine.backends.vllm.simulator import tokens_of

PREFIX = tokens_of("prefix", 640)


def test_a_waiting_reader_that_is_aborted_gives_everything_back(make: Make) -> None:
    sim = make(max_seqs=1)
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    sim.add("runs", tokens_of("runs", 300), max_tokens=20)
    sim.until_started("runs")
    sim.add("reader", [*PREFIX, 1], read=("entry", 640), wants=[("more", 640, 1.0)])
    sim.abort("reader")
    assert sim.stats().protected_blocks == 0
    sim.drain()
    assert sim.states() == {"entry": "leased"}
    sim.check_refs()


def test_an_abort_before_the_first_token_leaves_nothing_it_made(make: Make) -> None:
    sim = make(step_tokens=128)
    sim.run("writer", PREFIX[:320], wants=[("old", 320, 50.0)])
    sim.add("gone", PREFIX, wants=[("old", 320, 60.0), ("new", 480, 60.0), ("end", 640, 60.0)])
    sim.step()
    sim.step()
    assert "new" in sim.states()
    assert not sim.tokens["gone"]
    sim.abort("gone")
    sim.drain()
    assert sim.states() == {"old": "leased"}
    assert sim.losses() == {}
    sim.check_refs()


def test_what_was_scheduled_before_an_abort_is_told_each_position_once(make: Make) -> None:
    sim = make(step_tokens=128)
    sim.run("writer", PREFIX[:320])
    request = sim.add("gone", [*PREFIX, *tokens_of("gone", 300)])
    sim.step()
    sim.preempt("gone")
    for _ in range(2):
        sim.step()
    assert not sim.tokens["gone"]
    reached = request.num_computed_tokens
    sim.abort("gone")
    report = sim.report("gone")
    assert report.hit_tokens == 320 and reached > 320 + 128
    assert report.computed_tokens == reached - 320
    sim.drain()
    sim.check_refs()


def test_a_request_that_never_ran_computed_nothing(make: Make) -> None:
    sim = make(step_tokens=128)
    sim.add("waits", PREFIX)
    sim.abort("waits")
    assert sim.report("waits").computed_tokens == 0


def test_an_abort_while_decoding_keeps_the_entry(make: Make) -> None:
    sim = make()
    sim.add("cut", PREFIX, max_tokens=500, wants=[("entry", 640, 50.0)])
    sim.until_started("cut")
    sim.abort("cut")
    sim.drain()
    sim.flood(10)
    assert sim.run("reader", [*PREFIX, 1], read=("entry", 640)).read_tokens == 640
    sim.check_refs()
