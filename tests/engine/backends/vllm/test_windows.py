"""Models with sliding windows: a second group of layers keeps only the blocks that a hit needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from tests.engine.backends.vllm.simulator import BLOCK, Simulator, tokens_of

Make = Callable[..., Simulator]
WINDOW = 64
PREFIX = tokens_of("prefix", 640)


@pytest.fixture(params=[1, 2], ids=["scheduler", "async-scheduler"])
def make(request: pytest.FixtureRequest, llama: Path) -> Make:
    def make(**options: Any) -> Simulator:
        return Simulator(llama, depth=request.param, window=WINDOW, **options)

    return make


def test_a_lease_holds_a_window_of_the_second_group(make: Make) -> None:
    sim = make()
    sim.run("writer", PREFIX, wants=[("inner", 320, 50.0), ("outer", 640, 50.0)])
    assert [held.state for held in sim.report("writer").held] == ["leased", "leased"]
    assert sim.stats().leased_blocks == 640 // BLOCK + 2 * WINDOW // BLOCK
    sim.flood(10)
    assert sim.run("inner", [*PREFIX[:320], 1], read=("inner", 320)).read_tokens == 320
    assert sim.run("outer", [*PREFIX, 1], read=("outer", 640)).read_tokens == 640
    assert sim.losses() == {}
    sim.check_refs()


def test_only_what_is_marked_is_kept_of_a_window(make: Make) -> None:
    sim = make()
    sim.run("writer", PREFIX, wants=[("inner", 320, 50.0)])
    assert sim.run("between", [*PREFIX[:480], 1]).hit_tokens == 320
    sim.check_refs()


def test_a_mark_inside_what_was_never_marked_has_no_blocks(make: Make) -> None:
    sim = make()
    sim.run("writer", PREFIX, wants=[("outer", 640, 50.0)])
    late = sim.run("late", [*PREFIX, 1], read=("outer", 640), wants=[("inner", 320, 50.0)])
    assert late.read_tokens == 640
    assert [held.state for held in late.held] == ["none"], "the window before it is long gone"
    sim.check_refs()


def test_an_abort_before_the_first_token_leaves_nothing(make: Make) -> None:
    sim = make()
    sim.add("gone", PREFIX, wants=[("inner", 128, 50.0)])
    sim.step()
    assert sim.states() == {"inner": "leased"}
    sim.abort("gone")
    sim.drain()
    assert sim.states() == {}
    sim.check_refs()
