"""Leases inside vLLM's own schedulers, the synchronous and the asynchronous, step by step.

Time is numbers here: what expires does so because the test, as the server would, says `release`.
"""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from engine.backends.vllm import directive
from tests.engine.backends.vllm.conftest import Make
from tests.engine.backends.vllm.simulator import BLOCK, tokens_of

PREFIX = tokens_of("prefix", 640)
WINDOW = 64


def test_waiting_readers_give_up_before_leases_are_sacrificed(make: Make) -> None:
    sim = make(lease_share=0.4, max_seqs=1)
    sim.run("leased", tokens_of("l", 640), wants=[("leased", 640, 50.0)])
    sim.run("loose", tokens_of("m", 640), wants=[("loose", 640, 50.0)])
    assert sim.states() == {"leased": "leased", "loose": "best_effort"}
    sim.add("huge", tokens_of("huge", 80 * BLOCK))
    sim.add("reader", [*tokens_of("m", 640), 1], read="loose")
    sim.drain()
    assert len(sim.tokens["huge"]) == len(sim.tokens["reader"]) == 2
    assert "sacrificed" not in sim.losses().values()
    assert sim.report("reader").hit_tokens < 640, "given up and evicted: it was not read"
    assert sim.states() == {"leased": "leased"}


def test_what_nobody_asked_to_hold_follows_vllms_own_order(make: Make) -> None:
    """Chats that never come back, and short prompts that do: with entries as without any."""
    hits: list[list[int]] = []
    for has_entries in (True, False):
        sim = make()
        hit_tokens = list[int]()
        for number in range(40):
            chat = tokens_of(f"chat{number}", 320)
            wants = [(f"chat{number}", 320, 50.0 + number)] if has_entries else []
            sim.run(f"c{number}", chat, wants=wants, is_asked_for=False)
            short = [*tokens_of(f"short{number % 3}", 96), number]
            hit_tokens.append(sim.run(f"s{number}", short).hit_tokens)
        assert "leased" not in sim.states().values()
        hits.append(hit_tokens)
    assert hits[0] == hits[1]
    assert sum(hits[0]) == 37 * 96, "short prompts were starved"


def test_a_mark_leases_what_nobody_asked_to_hold(make: Make) -> None:
    sim = make()
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)], is_asked_for=False)
    assert sim.states() == {"entry": "best_effort"}
    sim.run("reader", [*PREFIX, 1], read="entry", wants=[("entry", 640, 60.0)])
    assert sim.states() == {"entry": "leased"}


def test_a_reset_of_running_requests_lets_them_write_anew(make: Make) -> None:
    sim = make(step_tokens=128, max_seqs=1)
    sim.run("old", PREFIX[:320], wants=[("old", 320, 50.0)])
    sim.add("runs", PREFIX, read="old", wants=[("new", 480, 50.0)])
    sim.add("waits", [*PREFIX[:320], 1], read="old")
    sim.step()
    sim.step()
    assert sim.states() == {"old": "leased", "new": "leased"}
    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert sim.states() == {}
    sim.drain()
    assert sim.states() == {"new": "leased"}
    assert sim.losses() == {"old": "reset", "new": "reset"}
    assert [outcome.state for outcome in sim.report("runs").held] == ["leased"]
    assert sim.report("runs").hit_tokens == 0, "it computed everything after all"


def test_a_block_that_vllm_unhashes_ends_the_lease_on_it(make: Make) -> None:
    sim = make()
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    block = sim.leases.protect("entry")
    assert block is not None
    sim.leases.unprotect(block)
    sim.scheduler.kv_cache_manager.evict_blocks({block[3].block_id})
    report = sim.run("reader", [*PREFIX, 1], read="entry", wants=[("entry", 640, 60.0)])
    assert report.hit_tokens == 3 * BLOCK
    assert report.held[0].state == "leased", "written anew"
    assert sim.losses() == {"entry": "evicted"}, "the one before"


def test_the_utility_calls_answer_in_plain_types(make: Make) -> None:
    sim = make(is_multi=True)
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    report = sim.call("report", "writer")
    assert report["held"] == [{"key": "entry", "state": "leased", "tokens": 640}]
    assert sim.call("report", "nobody") is None
    assert sim.call("core_stats")["leased_blocks"] == 40
    sim.scheduler.reset_prefix_cache()
    assert sim.call("losses") == [{"key": "entry", "reason": "reset"}]
    assert sim.call("release", ["entry"]) == 0


def test_a_directive_that_makes_no_sense_harms_nobody(make: Make) -> None:
    sim = make()
    request = sim.add("odd", PREFIX)
    sim.abort("odd")
    assert request.kv_transfer_params is not None
    request.kv_transfer_params[directive.PARAM_KEY]["wants"] = [{"key": 5}]
    assert "wants[0]" in (sim.tracker.arrive(request) or "")
    sim.drain()
    assert sim.run("next", PREFIX).hit_tokens == 0


# Aborts.


def test_a_waiting_reader_that_is_aborted_gives_everything_back(make: Make) -> None:
    sim = make(max_seqs=1)
    sim.run("writer", PREFIX, wants=[("entry", 640, 50.0)])
    sim.add("runs", tokens_of("runs", 300), max_tokens=20)
    sim.until_started("runs")
    sim.add("reader", [*PREFIX, 1], read="entry", wants=[("more", 640, 1.0)])
    sim.abort("reader")
    assert not sim.leases._protected
    sim.drain()
    assert sim.states() == {"entry": "leased"}


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


# Preemptions.


def test_one_that_lost_its_entry_before_its_first_token_read_nothing(make: Make) -> None:
    """Nobody holds the entry: who decodes grows into it while its reader waits again."""
    sim = make(num_blocks=65, lease_share=0.0, step_tokens=8)
    prefix = tokens_of("shared", 160)
    sim.run("writer", prefix, wants=[("entry", 160, 50.0)])
    sim.add("grows", tokens_of("grows", 536), max_tokens=480)
    sim.until_started("grows")
    reader = sim.add("reader", [*prefix, *tokens_of("tail", 300)], read="entry")
    while not reader.num_preemptions:
        sim.step()
        assert not sim.tokens["reader"], "it was to be preempted"
    assert sim.report("reader").hit_tokens == 160, "so far"
    sim.drain()
    assert sim.losses() == {"entry": "evicted"}
    report = sim.report("reader")
    assert report.hit_tokens < 160


def test_what_it_computed_itself_before_is_no_reuse(make: Make) -> None:
    sim = make(step_tokens=64)
    sim.run("writer", PREFIX[:320], wants=[("entry", 320, 50.0)])
    sim.add("reader", PREFIX, read="entry", wants=[("entry", 320, 50.0)])
    sim.step()
    assert sim.report("reader").hit_tokens == 320
    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True)
    while sim.states() != {"entry": "leased"}:
        sim.step()  # it writes the entry anew
    sim.preempt("reader")
    sim.drain()
    assert len(sim.tokens["reader"]) == 2
    report = sim.report("reader")
    assert report.hit_tokens == 0


def test_one_that_finds_everything_again_keeps_its_numbers(make: Make) -> None:
    sim = make(step_tokens=64)
    sim.run("writer", PREFIX[:320], wants=[("entry", 320, 50.0)])
    sim.add("reader", PREFIX, read="entry")
    sim.step()
    sim.step()
    sim.preempt("reader")
    sim.drain()
    report = sim.report("reader")
    assert report.hit_tokens == 320
    assert sim.call("core_stats")["preempted"] == 1


# Windows.


@pytest.mark.parametrize("second", ["window", "latent-window", "chunks", "window-alone"])
def test_a_lease_holds_what_other_kinds_of_layers_look_up(make: Make, second: str) -> None:
    sim = make(second=second, window=WINDOW)
    sim.run("writer", PREFIX, wants=[("inner", 336, 50.0), ("outer", 624, 50.0)])
    assert [outcome.state for outcome in sim.report("writer").held] == ["leased", "leased"]
    if second == "window":
        assert sim.leases.num_leased_blocks == 624 // BLOCK + 2 * WINDOW // BLOCK
    sim.flood(10)
    assert sim.run("inner", [*PREFIX[:336], 1], read="inner").hit_tokens == 336
    assert sim.run("outer", [*PREFIX[:624], 1], read="outer").hit_tokens == 624
    assert sim.losses() == {}


# States.

DEEP = [*PREFIX[:336], *tokens_of("tail", 200)]


def test_a_state_is_kept_at_a_mark_and_read_in_front_of_another_tail(make: Make) -> None:
    """vLLM's issue 45238: its own states lie at prompts' ends, in tokens that never come again."""
    sim = make(second="states")
    assert sim.run("plain", DEEP).hit_tokens == 0
    assert sim.run("again", [*PREFIX[:336], *tokens_of("other", 200)]).hit_tokens == 0
    sim = make(second="states")
    sim.run("writer", DEEP, wants=[("inner", 100, 50.0), ("outer", 336, 50.0)])
    assert [outcome.tokens for outcome in sim.report("writer").held] == [96, 336]
    assert sim.leases.num_leased_blocks == 336 // BLOCK + 2, "a state is one block more"
    sim.flood(10)
    assert sim.losses() == {}
    report = sim.run("outer", [*PREFIX[:336], *tokens_of("third", 200)], read="outer")
    assert (report.hit_tokens, report.computed_tokens) == (336, 200)
    assert sim.run("inner", [*PREFIX[:96], *tokens_of("x", 9)], read="inner").hit_tokens == 96


def test_a_mark_in_front_of_what_is_read_has_no_state(make: Make) -> None:
    sim = make(second="states")
    sim.run("writer", DEEP, wants=[("outer", 336, 50.0)])
    late = sim.run("late", [*DEEP, 1], read="outer", wants=[("inner", 160, 50.0)])
    assert late.hit_tokens >= 336
    assert [outcome.state for outcome in late.held] == ["none"]


def test_a_preempted_request_keeps_its_states_anew(make: Make) -> None:
    sim = make(second="states")
    sim.run("old", DEEP, wants=[("old", 336, 50.0)])
    sim.add("reader", [*DEEP, *tokens_of("more", 300)], read="old", wants=[("new", 640, 50.0)])
    sim.step()
    sim.preempt("reader")
    sim.drain()
    report = sim.report("reader")
    assert report.hit_tokens == 528, "the end of the first prompt is a state of vLLM's own"
    assert [(outcome.state, outcome.tokens) for outcome in report.held] == [("leased", 640)]


def test_a_name_stands_where_a_state_is_kept(make: Make) -> None:
    sim = make(second="states")
    sim.run("writer", DEEP, wants=[("outer", 336, 50.0)], watches=[160, 336, 400])
    assert sim.losses() == {"name:160": "evicted", "name:400": "evicted"}
    sim.call("unlease", ["outer"])
    sim.flood(10)
    assert sim.losses()["name:336"] == "evicted"


def test_a_mark_inside_what_was_never_marked_has_no_blocks(make: Make) -> None:
    sim = make(window=WINDOW)
    sim.run("writer", PREFIX, wants=[("outer", 640, 50.0)])
    late = sim.run("late", [*PREFIX, 1], read="outer", wants=[("inner", 320, 50.0)])
    assert late.hit_tokens == 640
    assert [outcome.state for outcome in late.held] == ["none"], "the window before it is long gone"


def test_the_names_of_a_long_prompt_are_looked_up_in_one_walk(make: Make) -> None:
    length = 500 * BLOCK
    sim = make(num_blocks=600, step_tokens=length, max_len=length + BLOCK)
    coordinator = sim.scheduler.kv_cache_manager.coordinator
    walked = 0
    find = coordinator.find_longest_cache_hit

    def counted(hashes: list[bytes], tokens: int) -> Any:
        nonlocal walked
        walked += len(hashes)
        return find(hashes, tokens)

    coordinator.find_longest_cache_hit = counted
    offsets = range(BLOCK, length + 1, BLOCK)
    sim.run("writer", tokens_of("long", length), watches=offsets)
    assert sim.losses() == {}
    assert walked <= 2 * 500, "vLLM's own look-up, and one for all names"
    sim.flood(2)
    assert len(sim.losses()) == 500


def test_a_lease_that_is_over_leaves_an_entry_that_can_be_read_and_reused(make: Make) -> None:
    sim = make()
    prefix = PREFIX[:400]
    sim.run("writer", prefix, wants=[("entry", 320, 10.0)])
    sim.call("unlease", ["entry", "unknown"])
    assert sim.states() == {"entry": "best_effort"} and sim.losses() == {}
    assert sim.leases.num_leased_blocks == 0
    late = [*prefix[:320], *tokens_of("late", 80)]
    assert sim.run("late", late, read="entry").hit_tokens == 320
    sim.flood(2)
    assert sim.losses() == {"entry": "evicted"}
