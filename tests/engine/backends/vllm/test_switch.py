"""An error of ours in vLLM's scheduler ends our part and nothing else.

Hooks are found by what our classes define, so that a new one is tried, or named with a reason here.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from engine.backends.vllm.connector import HoldfastConnector, RequestTracker
from engine.backends.vllm.leases import LeaseManager
from engine.backends.vllm.switch import SwitchedOff
from tests.engine.backends.vllm.simulator import Simulator, tokens_of
from tests.faults.forgery import forged

PREFIX = tokens_of("prefix", 400)
PARTS = {"tracker": RequestTracker, "leases": LeaseManager}
# What our server asks through vLLM, which gives the caller the error, and what ends our part.
ASKED = {
    "tracker": {"bind", "report"},
    "leases": {
        "release",
        "unlease",
        "record",
        "restore",
        "state",
        "take_losses",
        "block_states",
        "abandon",
    },
}
# Errors of these end vLLM's start, as its operator must see.
AT_START = {"__init__", "bind_kv_cache_manager"}
# These hold nothing that can fail: a constant, or what `guarded` hooks of the same class call.
CONSTANT = {
    *("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "reset_cache"),
    "requires_kv_delivery",
}


def functions(owner: type) -> dict[str, Any]:
    kinds = (property, classmethod, staticmethod)
    members = {
        name: value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        for name, value in vars(owner).items()
        if inspect.isfunction(value) or isinstance(value, kinds)
    }
    return {name: value for name, value in members.items() if inspect.isfunction(value)}


def parts_hooks() -> Iterator[Any]:
    """Every public method of a part that vLLM's scheduler may get to."""
    for owner, part in PARTS.items():
        for name, member in vars(part).items():
            if inspect.isfunction(member) and name[0] != "_" and name not in ASKED[owner]:
                yield pytest.param(owner, name, id=f"{owner}.{name}")


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def test_every_method_is_guarded_or_named_with_a_reason() -> None:
    methods = functions(HoldfastConnector)
    hooks = {name for name, value in methods.items() if "otherwise" in vars(value)}
    assert set(methods) - AT_START - CONSTANT == hooks
    for name in CONSTANT:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(methods[name]))).body
        assert isinstance(function, ast.FunctionDef)
        for line in function.body:
            assert isinstance(line, ast.Expr | ast.Return), f"{name} must be guarded"
            assert line.value is None or isinstance(line.value, ast.Constant)


@pytest.mark.parametrize("window", [None, 64], ids=["full", "window"])
@pytest.mark.parametrize(("owner", "name"), list(parts_hooks()))
def test_vllm_goes_on_when_a_part_of_ours_fails(
    llama: Path, window: int | None, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    sim = Simulator(llama, window=window, num_blocks=65, max_len=1024)
    sim.run("writer", PREFIX, wants=[("entry", 320, 10.0), ("other", 96, 20.0)])
    assert sim.leases.num_leased_blocks
    parts = {"tracker": sim.tracker, "leases": sim.leases}
    monkeypatch.setattr(parts[owner], name, _fail)
    sim.add("reader", PREFIX, read="entry", wants=[("more", 384, 30.0)])
    sim.drain()
    assert len(sim.tokens["reader"]) == 2
    # Prompts beyond the pool's size: blocks are reused, and requests wait for room.
    for index in range(4):
        sim.add(f"big-{index}", tokens_of(f"big-{index}", 900 if window is None else 400))
    sim.drain()
    assert all(len(sim.tokens[f"big-{index}"]) == 2 for index in range(4))
    assert sim.scheduler.reset_prefix_cache()
    if sim.switch.is_on:
        # This part is only asked where the room or the layers need it. Its own test follows.
        pytest.skip("the hook was not called")
    monkeypatch.undo()
    assert sim.switch.reason == "RuntimeError"
    assert sim.leases.num_leased_blocks == 0
    with pytest.raises(SwitchedOff, match="RuntimeError"):
        sim.call("losses")
    used = sim.leases.total_blocks - sim.pool.get_num_free_blocks()
    assert used <= len(PREFIX) // 16 + 1, "only what the failing call itself had taken may stay"


def test_a_failing_reuse_of_a_block_ends_our_part_only(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulator(llama, lease_share=0.0)
    sim.run("writer", PREFIX, wants=[("entry", 320, 10.0)])
    monkeypatch.setattr(sim.leases, "note_reuse", _fail)
    for index in range(8):
        sim.run_foreign(f"flood-{index}", tokens_of(f"flood-{index}", 500))
    assert sim.switch.reason == "RuntimeError"


def test_a_failing_sacrifice_ends_our_part_and_the_waiting_request_runs(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulator(llama, num_blocks=65, max_len=1024, lease_share=1.0)
    for index in range(3):
        sim.run(f"w{index}", tokens_of(f"w{index}", 300), wants=[(f"e{index}", 288, 9.0)])
    monkeypatch.setattr(sim.leases, "sacrifice", _fail)
    sim.add("big", tokens_of("big", 1000))
    sim.drain()
    assert len(sim.tokens["big"]) == 2
    assert sim.switch.reason == "RuntimeError"


def test_the_server_can_end_all_holds_for_good(llama: Path) -> None:
    sim = Simulator(llama)
    sim.run("writer", PREFIX, wants=[("entry", 320, 10.0)])
    sim.call("switch_off", "its books failed")
    assert sim.pool.get_num_free_blocks() == sim.leases.total_blocks
    sim.run_foreign("next", PREFIX)
    with pytest.raises(SwitchedOff, match="its books failed"):
        sim.call("bind", "again")


@pytest.mark.parametrize("seed", range(4))
def test_forged_directives_hold_nothing(llama: Path, seed: int) -> None:
    sim = Simulator(llama)
    draw = Random(seed)
    key = "ab" * 16
    sim.run("writer", PREFIX, wants=[(key, 320, 10.0)])
    num_leased = sim.leases.num_leased_blocks
    for index in range(250):
        sim.run_foreign(f"forged-{index}", PREFIX[:340], transfer=forged(draw))
    assert sim.switch.is_on
    assert sim.leases.num_leased_blocks == num_leased
    assert sim.states() == {key: "leased"}
    sim.check_refs()


def test_no_directive_is_followed_but_of_the_server_that_told_its_token_last(llama: Path) -> None:
    early = Simulator(llama, is_bound=False)
    early.add("early", PREFIX, wants=[("entry", 320, 10.0)])
    early.drain()
    assert early.states() == {}
    sim = Simulator(llama)
    sim.run("writer", PREFIX, wants=[("entry", 320, 10.0)])
    sim.call("bind", "another")
    assert sim.states() == {} and sim.losses() == {}
    sim.add("late", PREFIX, wants=[("entry", 320, 10.0)])
    sim.drain()
    assert sim.states() == {}, "the old server's token is not the new one's"


def test_foreign_requests_and_their_blocks_are_told_apart(llama: Path) -> None:
    sim = Simulator(llama)
    sim.add("ours", tokens_of("ours", 100), max_tokens=20)
    sim.add_foreign("theirs", tokens_of("theirs", 200), max_tokens=20)
    while not (sim.tokens["ours"] and sim.tokens["theirs"]):
        sim.step()
    stats = sim.call("core_stats")
    assert (stats["running"], stats["foreign_running"]) == (2, 1)
    assert stats["blocks"]["foreign"] == 13 and stats["blocks"]["active"] == 20
    sim.drain()
    stats = sim.call("core_stats")
    assert (stats["blocks"]["foreign"], stats["foreign_running"]) == (0, 0)
