"""Leases inside vLLM's own schedulers, the synchronous and the asynchronous, step by step.

Time is numbers here: what expires does so because the test, as the server would, says `release`.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from engine.backends.vllm import directive
from tests.engine.backends.vllm.conftest import Make
from tests.engine.backends.vllm.simulator import BLOCK, tokens_of

PREFIX = tokens_of("prefix", 640)


def test_an_unmarked_prefix_does_not_survive_a_flood(make: Make) -> None:
    sim = make()
    sim.run("first", PREFIX)
    assert sim.run("warm", [*PREFIX, 1]).hit_tokens == 640
    assert sim.leases.evicted_blocks == 0
    sim.flood(10)
    assert sim.run("late", [*PREFIX, 1]).hit_tokens == 0
    hashed = sum(block.block_hash is not None for block in sim.pool.blocks)
    assert hashed > 0
    assert sim.call(directive.CORE_STATS)["evicted_blocks"] == sim.leases.evicted_blocks > 640
    sim.check_refs()


def test_a_lease_survives_ten_pools_of_other_traffic(make: Make) -> None:
    sim = make()
    report = sim.run("writer", PREFIX, wants=[("entry", 640, 300.0)])
    assert report.held == [directive.Held(key="entry", state="leased", tokens=640)]
    sim.flood(10)
    report = sim.run("reader", [*PREFIX, 1, 2], read=("entry", 640))
    assert (report.hit_tokens, report.read_tokens) == (640, 640)
    assert sim.losses() == {}
    sim.check_refs()


def test_nested_breakpoints_share_their_blocks(make: Make) -> None:
    sim = make()
    wants = [("inner", 320, 300.0), ("outer", 512, 300.0)]
    sim.run("first", PREFIX[:600], wants=wants)
    assert sim.stats().leased_blocks == 512 // BLOCK
    second = sim.run("second", PREFIX, read=("outer", 512), wants=[*wants, ("last", 640, 9.0)])
    assert second.read_tokens == 512
    assert [(held.key, held.state) for held in second.held] == [
        ("inner", "leased"),
        ("outer", "leased"),
        ("last", "leased"),
    ]
    assert sim.stats().leased_blocks == 640 // BLOCK
    assert sim.stats().num_leases == 3
    sim.leases.release(["outer"])
    sim.flood(10)
    assert sim.run("third", [*PREFIX, 1], read=("last", 640)).read_tokens == 640
    sim.check_refs()


def test_what_was_released_is_like_any_other(make: Make) -> None:
    sim = make()
    sim.run("writer", PREFIX, wants=[("entry", 640, 300.0)])
    assert sim.leases.release(["entry", "unknown"]) == 1
    assert sim.leases.release(["entry"]) == 0
    assert sim.run("soon", [*PREFIX, 1], read=("entry", 640)).hit_tokens == 640
    assert sim.report("soon").read_tokens == 0, "the entry is over, whatever is in memory"
    sim.flood(10)
    assert sim.run("late", [*PREFIX, 1]).hit_tokens == 0
    assert sim.losses() == {}, "the server's own doing is no loss"
    sim.check_refs()


def test_wants_are_taken_as_chunks_are_scheduled(make: Make) -> None:
    sim = make(step_tokens=128)
    sim.add("long", PREFIX, wants=[("inner", 128, 1.0), ("outer", 640, 1.0)])
    sim.step()
    assert sim.states() == {"inner": "leased"}
    assert [held.state for held in sim.report("long").held] == ["leased", "none"]
    sim.until_started("long")
    assert [held.state for held in sim.report("long").held] == ["leased", "leased"]
    sim.drain()
    sim.check_refs()


def test_other_scopes_read_nothing(make: Make) -> None:
    sim = make()
    sim.run("mine", PREFIX, scope="mine", wants=[("entry", 640, 300.0)])
    assert sim.run("theirs", [*PREFIX, 1], scope="theirs").hit_tokens == 0
    sim.check_refs()


def test_wants_off_the_blocks_are_floored(make: Make) -> None:
    sim = make()
    report = sim.run("writer", PREFIX, wants=[("tiny", 15, 1.0), ("odd", 100, 1.0)])
    assert [(held.state, held.tokens) for held in report.held] == [("none", 0), ("leased", 96)]
    beyond = sim.run("beyond", PREFIX[:64], max_tokens=40, wants=[("beyond", 96, 1.0)])
    assert [held.state for held in beyond.held] == ["none"], "entries end within the prompt"
    sim.check_refs()


def test_over_budget_is_best_effort_and_promoted_when_there_is_room(make: Make) -> None:
    sim = make(lease_share=0.5)
    assert sim.stats().max_leased_blocks == 64
    sim.run("first", tokens_of("a", 640), wants=[("first", 640, 50.0)])
    second = sim.run("second", tokens_of("b", 640), wants=[("second", 640, 60.0)])
    assert [held.state for held in second.held] == ["best_effort"]
    assert sim.stats().denied == 1
    assert sim.stats().leased_blocks == 40
    sim.leases.release(["first"])
    again = sim.run("again", tokens_of("b", 640), wants=[("second", 640, 70.0)])
    assert [held.state for held in again.held] == ["leased"]
    sim.flood(10)
    read = sim.run("reader", [*tokens_of("b", 640), 1], read=("second", 640))
    assert read.read_tokens == 640
    sim.check_refs()


def test_a_best_effort_entry_ends_with_its_first_reused_block(make: Make) -> None:
    sim = make(lease_share=0.0)
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    assert sim.states() == {"entry": "best_effort"}
    assert sim.run("reader", [*PREFIX, 1], read=("entry", 640)).read_tokens == 640
    sim.flood(2)
    assert sim.states() == {}
    assert sim.losses() == {"entry": "evicted"}
    assert sim.losses() == {}
    assert sim.run("again", [*PREFIX, 1], read=("entry", 640)).read_tokens == 0
    rewritten = sim.run("writer2", PREFIX, wants=[("entry", 640, 50.0)])
    assert [held.state for held in rewritten.held] == ["best_effort"]
    sim.check_refs()


def test_a_loss_that_was_made_good_is_told_all_the_same(make: Make) -> None:
    sim = make(lease_share=0.0)
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    sim.flood(2)
    sim.run("writer2", PREFIX, wants=[("entry", 640, 50.0)])
    assert sim.losses() == {"entry": "evicted"}, "the first entry ended"
    sim.check_refs()


def test_the_read_entry_is_kept_while_its_reader_waits(make: Make) -> None:
    sim = make(max_seqs=1)
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    sim.add("runs", tokens_of("runs", 1000), max_tokens=200)
    sim.until_started("runs")
    sim.add("reader", [*PREFIX, 1], read=("entry", 640))
    sim.leases.release(["entry"])  # it expires while the reader waits
    assert sim.stats().protected_blocks == 40
    sim.drain()
    assert sim.report("reader").read_tokens == 640
    sim.check_refs()


def test_a_best_effort_entry_is_kept_while_its_reader_waits(make: Make) -> None:
    sim = make(max_seqs=1, lease_share=0.0)
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    sim.add("runs", tokens_of("runs", 1000), max_tokens=400)
    sim.until_started("runs")
    sim.add("reader", [*PREFIX, 1], read=("entry", 640))
    sim.drain()
    assert sim.report("reader").read_tokens == 640
    assert sim.states() == {"entry": "best_effort"}
    sim.check_refs()


@pytest.mark.parametrize("is_second_started", [True, False])
def test_what_two_were_writing_stays_if_one_of_them_started(
    make: Make, is_second_started: bool
) -> None:
    sim = make()
    request = sim.add("writer", PREFIX)
    sim.until_started("writer")
    want = directive.Want(key="entry", tokens=320, expires_at=1.0)
    holds = [sim.leases.hold(want, "scope", request.block_hashes, name) for name in ("one", "two")]
    assert holds[0] is holds[1] is not None
    sim.leases.end_claim(holds[0], "one", is_started=False)
    assert sim.states() == {"entry": "leased"}
    sim.leases.end_claim(holds[0], "two", is_started=is_second_started)
    assert sim.states() == ({"entry": "leased"} if is_second_started else {})
    sim.drain()
    sim.check_refs()


def test_a_scope_above_its_share_yields_to_one_within(make: Make) -> None:
    sim = make(scope_lease_share=0.5)
    for index, name in enumerate("abc"):
        sim.run(name, tokens_of(name, 320), scope="big", wants=[(name, 320, 10.0 + index)])
    assert sim.stats().leased_blocks == 60, "alone a scope may lease the whole budget"
    small = sim.run("small", tokens_of("s", 320), scope="small", wants=[("small", 320, 5.0)])
    assert [held.state for held in small.held] == ["leased"]
    assert sim.losses() == {"a": "yielded"}
    assert sim.states() == {
        "a": "best_effort",
        "b": "leased",
        "c": "leased",
        "small": "leased",
    }
    greedy = sim.run("greedy", tokens_of("g", 640), scope="small", wants=[("greedy", 640, 5.0)])
    assert [held.state for held in greedy.held] == ["best_effort"], "nobody yields beyond a share"
    assert sim.losses() == {}
    sim.check_refs()


def test_a_scope_has_the_share_that_its_requests_name(make: Make) -> None:
    sim = make(scope_lease_share=0.5)
    for index, name in enumerate("abc"):
        wants = [(name, 320, 10.0 + index)]
        sim.run(name, tokens_of(name, 320), scope="big", wants=wants, lease_blocks=60)
    small = sim.run("small", tokens_of("s", 320), scope="small", wants=[("small", 320, 5.0)])
    assert [held.state for held in small.held] == ["best_effort"]
    assert sim.losses() == {}


def test_a_request_larger_than_what_leases_leave_runs_at_their_cost(make: Make) -> None:
    sim = make()
    for index, name in enumerate("abc"):
        sim.run(name, tokens_of(name, 320), wants=[(name, 320, 100.0 - index)])
    assert sim.stats().leased_blocks == 60
    sim.run("huge", tokens_of("huge", 91 * BLOCK - 8))
    assert len(sim.tokens["huge"]) == 2
    assert sim.stats().sacrificed == 2, "the soonest to expire first, and no more than needed"
    assert sim.states()["a"] == "leased"
    sim.check_refs()


def test_waiting_readers_give_up_before_leases_are_sacrificed(make: Make) -> None:
    sim = make(lease_share=0.4, max_seqs=1)
    sim.run("leased", tokens_of("l", 640), wants=[("leased", 640, 50.0)])
    sim.run("loose", tokens_of("m", 640), wants=[("loose", 640, 50.0)])
    assert sim.states() == {"leased": "leased", "loose": "best_effort"}
    sim.add("huge", tokens_of("huge", 80 * BLOCK))
    sim.add("reader", [*tokens_of("m", 640), 1], read=("loose", 640))
    sim.drain()
    assert len(sim.tokens["huge"]) == len(sim.tokens["reader"]) == 2
    assert sim.stats().sacrificed == 0
    assert sim.report("reader").read_tokens == 0, "given up and evicted: nothing was read"
    assert sim.states() == {"leased": "leased"}
    sim.check_refs()


def test_reset_ends_leases_and_succeeds(make: Make) -> None:
    sim = make()
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    assert sim.scheduler.reset_prefix_cache()
    assert sim.losses() == {"entry": "reset"}
    assert sim.pool.get_num_free_blocks() == sim.leases.total_blocks
    assert sim.run("again", [*PREFIX, 1], read=("entry", 640)).hit_tokens == 0
    sim.check_refs()


def test_a_reset_that_fails_for_others_ends_no_lease(make: Make) -> None:
    sim = make()
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    sim.add("runs", tokens_of("runs", 100), max_tokens=20)
    sim.until_started("runs")
    assert not sim.scheduler.reset_prefix_cache()
    assert sim.states() == {"entry": "leased"}
    sim.drain()
    sim.check_refs()


def test_a_reset_of_running_requests_lets_them_write_anew(make: Make) -> None:
    sim = make(step_tokens=128, max_seqs=1)
    sim.run("old", PREFIX[:320], wants=[("old", 320, 50.0)])
    sim.add("runs", PREFIX, read=("old", 320), wants=[("new", 480, 50.0)])
    sim.add("waits", [*PREFIX[:320], 1], read=("old", 320))
    sim.step()
    sim.step()
    assert sim.states() == {"old": "leased", "new": "leased"}
    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert sim.states() == {}
    sim.drain()
    assert sim.states() == {"new": "leased"}
    assert sim.losses() == {"old": "reset", "new": "reset"}
    assert [held.state for held in sim.report("runs").held] == ["leased"]
    assert sim.report("runs").read_tokens == 0, "it computed everything after all"
    assert sim.report("runs").hit_tokens == 0
    assert sim.report("waits").read_tokens == 0
    sim.check_refs()


def test_preempted_requests_keep_their_numbers_and_references_agree(make: Make) -> None:
    sim = make(num_blocks=65)
    prefix = tokens_of("shared", 160)
    sim.run("writer", prefix, wants=[("entry", 160, 50.0)])
    names = [f"storm{index}" for index in range(8)]
    for index, name in enumerate(names):
        tail = tokens_of(name, 40 + index)
        wants = [(name, 192, 40.0 + index)]
        sim.add(name, [*prefix, *tail], max_tokens=150, read=("entry", 160), wants=wants)
    for name in names[:2]:
        sim.until_started(name)
    sim.abort(names[1])
    requests = list(sim.scheduler.requests.values())
    sim.drain()
    assert sum(request.num_preemptions for request in requests) > 0, "the storm did not preempt"
    for name in names:
        assert sim.report(name).read_tokens == 160
        assert sim.report(name).hit_tokens >= 160
    assert len(sim.tokens[names[0]]) == 150
    assert sim.states()["entry"] == "leased"
    sim.check_refs()
    assert sim.scheduler.reset_prefix_cache()
    assert sim.pool.get_num_free_blocks() == sim.leases.total_blocks


def test_a_block_that_vllm_unhashes_ends_the_lease_on_it(make: Make) -> None:
    sim = make()
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    block = sim.leases.protect("entry")
    assert block is not None
    sim.leases.unprotect(block)
    sim.scheduler.kv_cache_manager.evict_blocks({block[3].block_id})
    read = sim.run("reader", [*PREFIX, 1], read=("entry", 640), wants=[("entry", 640, 60.0)])
    assert read.read_tokens == 0
    assert read.held[0].state == "leased", "written anew"
    assert sim.losses() == {"entry": "evicted"}, "the one before"
    sim.check_refs()


def test_the_utility_calls_answer_in_plain_types(make: Make) -> None:
    sim = make(is_multi=True)
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    report = sim.call(directive.REPORT, "writer")
    assert report["held"] == [{"key": "entry", "state": "leased", "tokens": 640}]
    assert sim.call(directive.REPORT, "nobody") is None
    assert sim.call(directive.CORE_STATS)["leased_blocks"] == 40
    sim.scheduler.reset_prefix_cache()
    assert sim.call(directive.LOSSES) == [{"key": "entry", "reason": "reset"}]
    assert sim.call(directive.RELEASE, ["entry"]) == 0


def test_a_directive_that_makes_no_sense_harms_nobody(make: Make) -> None:
    sim = make()
    request = sim.add("odd", PREFIX)
    sim.abort("odd")
    assert request.kv_transfer_params is not None
    request.kv_transfer_params[directive.PARAM_KEY]["wants"] = [{"key": 5}]
    assert "wants[0]" in (sim.tracker.arrive(request) or "")
    sim.drain()
    assert sim.run("next", PREFIX).hit_tokens == 0
    sim.check_refs()
