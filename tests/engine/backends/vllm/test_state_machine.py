"""Any order of requests, steps, aborts, releases, resets and evictions keeps the books straight.

vLLM's scheduler, cache manager and block pool are the real ones; only the model is missing.
`LEASE_EXAMPLES` and `LEASE_STEPS` (scripts/long_tests leases sets them) make it long.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.engine.backends.vllm.simulator import BLOCK, Simulator, check_leases, tokens_of

SCOPES = ["a", "b", "c"]
LENGTHS = [40, 96, 130, 200]
OFFSETS = [32, 64, 96, 128, 192]


class Machine(RuleBasedStateMachine):
    model: Path

    @initialize(
        depth=st.sampled_from([1, 2]),
        second=st.sampled_from([None, "window", "states"]),
        num_blocks=st.sampled_from([33, 49]),
        lease_share=st.sampled_from([0.1, 0.3, 1.0]),
    )
    def start(self, depth: int, second: str | None, num_blocks: int, lease_share: float) -> None:
        self.sim = Simulator(
            self.model,
            depth=depth,
            window=32,
            second=second,
            num_blocks=num_blocks,
            lease_share=lease_share,
            step_tokens=64,
            max_seqs=3,
            max_len=320,
        )
        self.num_requests = 0
        self.time = 0.0
        self.owed: dict[str, tuple[tuple[Any, ...], tuple[bytes | None, ...]]] = {}
        self.started: set[str] = set()
        self.prompts: dict[str, list[int]] = {}

    @rule(
        scope=st.sampled_from(SCOPES),
        stem=st.sampled_from("xy"),
        length=st.sampled_from(LENGTHS),
        offsets=st.sets(st.sampled_from(OFFSETS), min_size=1, max_size=3),
        read=st.sampled_from([None, *OFFSETS]),
        max_tokens=st.integers(1, 40),
    )
    def add(
        self, scope: str, stem: str, length: int, offsets: set[int], read: Any, max_tokens: int
    ) -> None:
        self.num_requests += 1
        self.time += 1
        prompt = [*tokens_of(stem, length), self.num_requests % 7]
        wants = [(f"{scope}{stem}{n}", n, self.time) for n in offsets if n <= length]
        for key, _, _ in wants:
            self.prompts[key] = prompt
        self.sim.add(
            str(self.num_requests),
            prompt,
            scope=scope,
            wants=wants,
            read=None if read is None else self.readable(f"{scope}{stem}", read, length),
            max_tokens=max_tokens,
        )

    def readable(self, owner: str, tokens: int, length: int) -> str | None:
        """An entry that is there, the nearest to so many tokens; else one that is not."""
        holds = self.sim.leases._entries.values()
        mine = [h for h in holds if h.key.startswith(owner) and h.tokens <= length]
        if mine:
            return min(mine, key=lambda hold: abs(hold.tokens - tokens)).key
        return f"{owner}{tokens}" if tokens <= length else None

    @rule(num=st.integers(1, 3))
    def flood(self, num: int) -> None:
        """Unmarked traffic that reuses whatever nobody holds."""
        for _ in range(num):
            self.num_requests += 1
            name = str(self.num_requests)
            self.sim.add(name, tokens_of(f"flood{name}", 250), max_tokens=1, scope="flood")
        self.step(8 * num)

    @rule(times=st.integers(1, 16))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.sim.scheduler.has_requests():
                self.sim.step()
                assert self.sim.num_idle_steps <= 3, "nothing can run"
            else:
                self.sim.drain()
            self.nothing_ends_untold()
            self.ask_reports()

    def ask_reports(self) -> None:
        """Once, at the first token, as the server does; with what it was told of stands there."""
        for name, tokens in self.sim.tokens.items():
            if tokens and name not in self.started:
                self.started.add(name)
                for outcome in self.sim.report(name).held:
                    if outcome.state != "none":
                        hold = self.sim.leases._entries[outcome.key]
                        self.owed[outcome.key] = hold.blocks, hold.hashes

    @precondition(lambda self: self.sim.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = sorted(name.removesuffix("-internal") for name in self.sim.scheduler.requests)
        self.sim.abort(data.draw(st.sampled_from(names)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        keys = sorted(self.prompts)
        if keys:
            key = data.draw(st.sampled_from(keys))
            self.sim.leases.release([key])
            self.owed.pop(key, None)

    @rule(is_forced=st.booleans(), dice=st.integers(1, 6))
    def reset(self, is_forced: bool, dice: int) -> None:
        """Seldom, since little is left to go wrong afterwards."""
        if dice < 6 or (is_forced and self.sim._in_flight):
            return  # vLLM resets between steps only
        self.sim.scheduler.reset_prefix_cache(reset_running_requests=is_forced)
        self.take_losses()

    @rule(data=st.data())
    def unhash(self, data: st.DataObject) -> None:
        """A KV load of another connector failed: of a leased block, where there is one."""
        block_ids = sorted(self.sim.leases._lease_refs) or [1]
        block_id = data.draw(st.sampled_from(block_ids))
        self.sim.scheduler.kv_cache_manager.evict_blocks({block_id})
        self.sim.states()
        self.take_losses()

    def take_losses(self) -> None:
        for loss in self.sim.leases.take_losses():
            if loss.reason in ("evicted", "reset"):
                self.owed.pop(loss.key, None)

    @invariant()
    def references_agree(self) -> None:
        leases = self.sim.leases
        pool = self.sim.pool
        check_leases(leases)
        expected = leases._lease_refs + leases._protected
        for manager in self.sim.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                expected += Counter(b.block_id for b in blocks if not b.is_null)
        for block in pool.blocks:
            assert block.is_null or block.ref_cnt == expected[block.block_id]
        assert pool.get_num_free_blocks() == leases.total_blocks - len(expected)
        assert self.sim.scheduler.waiting or not leases._protected, "protected, and nobody waits"

    @invariant()
    def nothing_ends_untold(self) -> None:
        """What a started request was told it has is there, or its loss was told.

        Looked up in the blocks themselves: to ask the manager for an entry is to have it find out.
        """
        self.take_losses()
        assert self.owed.keys() <= self.sim.leases._entries.keys(), "an entry went untold"
        for key, (blocks, hashes) in self.owed.items():
            now = tuple(block.block_hash for block in blocks)
            assert now == hashes, f"{key} was evicted, and nobody told"

    @invariant()
    def leased_prefixes_are_found(self) -> None:
        """No live lease was evicted: the whole prefix is hit."""
        coordinator = self.sim.scheduler.kv_cache_manager.coordinator
        for key, state in self.sim.states().items():
            if state == "leased":
                tokens = self.sim.leases._entries[key].tokens
                request = self.sim.make_request("probe", self.prompts[key], scope=key[0])
                hashes = request.block_hashes[: tokens // BLOCK]
                assert coordinator.find_longest_cache_hit(hashes, tokens)[1] == tokens

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()
            self.sim.check_refs()
            assert self.sim.scheduler.reset_prefix_cache()


@pytest.mark.timeout(0)
def test_any_order_keeps_the_books_straight(llama: Path) -> None:
    Machine.model = llama
    run_machine(
        Machine,
        settings=settings(
            max_examples=int(os.environ.get("LEASE_EXAMPLES", "40")),
            stateful_step_count=int(os.environ.get("LEASE_STEPS", "40")),
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
