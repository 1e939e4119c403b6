"""How vLLM calls what we wrap is its own affair: by name or by position."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from engine.backends.vllm import directive
from engine.backends.vllm.connector import relieve
from engine.backends.vllm.directive import Directive, Watch
from engine.backends.vllm.leases import Watches
from engine.backends.vllm.switch import Switch
from tests.engine.backends.vllm.simulator import Simulator, tokens_of


@pytest.mark.parametrize("is_positional", [False, True])
def test_nothing_else_runs_however_it_is_said(is_positional: bool) -> None:
    room: list[str] = []

    def allocate_slots(
        request: Any,
        num_new_tokens: int,
        new_computed_blocks: Any = None,
        has_scheduled_reqs: bool = True,
    ) -> Any:
        return "blocks" if room else None

    def sacrifice(_hit: set[int]) -> bool:
        room.append("one lease")
        return True

    cache = SimpleNamespace(allocate_slots=allocate_slots)
    leases: Any = SimpleNamespace(sacrifice=sacrifice)
    tracker: Any = SimpleNamespace(give_up=lambda _request_id: False)
    relieve(cache, leases, tracker, Switch())  # type: ignore[arg-type]
    request = SimpleNamespace(request_id="r")
    assert cache.allocate_slots(request, 4) is None and not room
    if is_positional:
        assert cache.allocate_slots(request, 4, None, False) == "blocks"
    else:
        assert cache.allocate_slots(request, 4, has_scheduled_reqs=False) == "blocks"


def test_the_names_of_a_long_prompt_are_looked_up_in_one_walk() -> None:
    size, num_blocks, walked = 16, 4096, 0
    blocks = [
        SimpleNamespace(block_id=i, block_hash=b"%d" % i, is_null=False) for i in range(num_blocks)
    ]

    def find(hashes: list[bytes], tokens: int) -> Any:
        nonlocal walked
        walked += len(hashes)
        return (blocks[: len(hashes)],), len(hashes) * size, None

    coordinator: Any = SimpleNamespace(
        find_longest_cache_hit=find, single_type_managers=[SimpleNamespace(block_size=size)]
    )
    watched: list[int] = []
    pool: Any = SimpleNamespace(
        hash_block_size=size,
        touch=lambda found: watched.append(found[0].block_id),
        unpin_blocks=lambda _blocks, _listener: None,
    )
    watches = Watches(pool, coordinator, lambda _block: None)
    request: Any = SimpleNamespace(
        request_id="r", num_computed_tokens=0, block_hashes=[b.block_hash for b in blocks]
    )
    offsets = [size * 8 * (n + 1) for n in range(512)]
    directive = Directive(
        request_id="r",
        scope="s",
        wants=[],
        watches=[Watch(key=f"name:{n}", tokens=n) for n in offsets],
    )
    watches.arrive(request, directive)
    watches.schedule({"r": num_blocks * size})
    assert watched == [offset // size - 1 for offset in offsets]
    assert walked == num_blocks, "each block of the prompt once, not once a name"
    assert watches.take_losses() == []


def test_a_lease_that_is_over_leaves_an_entry_that_can_be_read_and_reused(llama: Path) -> None:
    sim, prefix = Simulator(llama), tokens_of("prefix", 400)
    sim.run("writer", prefix, wants=[("entry", 320, 10.0)])
    sim.call(directive.UNLEASE, ["entry", "unknown"])
    assert sim.states() == {"entry": "best_effort"} and sim.losses() == {}
    assert sim.stats().leased_blocks == 0
    assert sim.run("late", prefix, read=("entry", 320)).read_tokens == 320
    sim.flood(2)
    assert sim.losses() == {"entry": "evicted"}
    sim.check_refs()
