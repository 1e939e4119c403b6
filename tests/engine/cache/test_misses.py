"""Why each breakpoint was not read: one reason for each, and which of them is the request's."""

from typing import Any, NamedTuple

import pytest
from msgspec import UnsetType

from engine.cache.digests import ChainKind
from engine.protocol import BreakpointReport, MissReason, Ttl
from tests.engine.cache.disk import damage, save, work
from tests.engine.cache.test_entries import EIGHT, FIVE, TWELVE, finished, flood
from tests.engine.cache.world import World

MANY = [(number,) for number in range(1, 31)]
Missed = MissReason | None


class Told(NamedTuple):
    request: Missed
    marks: list[Missed]


def reasons_of(world: World, *segments: tuple[int, ...], marks: list[int], **more: Any) -> Told:
    """What a request of the scope `red` is told, marked behind these segments."""
    lifetimes: dict[int, Ttl] = dict.fromkeys(marks, "5m")
    life = world.arrive("red", segments, lifetimes, **more)
    assert world.begin(life)
    world.bring_back(life)
    world.compute(life, life.pending)
    start = world.start(life)
    world.end(life)
    return Told(start.miss_reason, [missed_of(report) for report in start.breakpoints])


def missed_of(report: BreakpointReport) -> Missed:
    assert not isinstance(report.missed, UnsetType)
    return report.missed


def test_a_first_prompt_is_cold_at_each_breakpoint_and_then_read() -> None:
    world = World()
    assert reasons_of(world, FIVE, (6,), marks=[0, 1]) == ("cold", ["cold", "cold"])
    assert reasons_of(world, FIVE, (6,), marks=[0, 1]) == (None, [None, None])


def test_what_follows_a_read_grew_and_is_no_miss_of_the_request() -> None:
    world = World()
    finished(world, "red", FIVE)
    assert reasons_of(world, FIVE, (6,), (7,), marks=[0, 2]) == (None, [None, "grew"])
    assert reasons_of(world, FIVE, (6,), (8,), (9,), marks=[1, 3]) == (None, ["grew", "grew"])


def test_what_another_scope_wrote_is_cold_and_no_hint() -> None:
    world = World()
    finished(world, "blue", FIVE)
    assert reasons_of(world, FIVE, marks=[0]) == ("cold", ["cold"])


def test_each_breakpoint_has_the_reason_of_its_own_entry() -> None:
    world = World(num_blocks=20)
    world.end(world.run("red", [FIVE, (6,), (7,)], {0: "1h", 1: "5m", 2: "5m"}))
    world.wait(301)
    reasons = reasons_of(world, FIVE, (6,), (7,), marks=[0, 1, 2])
    assert reasons == ("ttl_expired", [None, "ttl_expired", "ttl_expired"])
    world.wait(301)
    reasons = reasons_of(world, FIVE, (6,), (8,), marks=[0, 1, 2])
    assert reasons == ("ttl_expired", [None, "ttl_expired", "grew"])


def test_too_short_a_prefix_is_below_the_minimum_and_others_are_not() -> None:
    world = World()
    least = {"min_cache_tokens": 5}
    assert reasons_of(world, (1, 2), EIGHT, marks=[0, 1], **least).marks == [
        "below_minimum",
        "cold",
    ]
    assert reasons_of(world, (1, 2), EIGHT, marks=[0, 1], **least).marks == [None, None], (
        "it is in what was read"
    )
    assert reasons_of(world, (1, 2), marks=[0], **least) == ("below_minimum", ["below_minimum"])


def test_a_request_without_a_breakpoint_has_none_to_tell_of() -> None:
    assert reasons_of(World(), FIVE, marks=[]) == ("no_breakpoint", [])


def test_an_entry_too_far_back_is_told_of_the_breakpoints_behind_it() -> None:
    world = World(num_blocks=40, lease_share=0.0)
    finished(world, "red", *MANY[:4])
    reasons = reasons_of(world, *MANY, marks=[1, 29])
    assert reasons == ("lookback_exceeded", ["cold", "lookback_exceeded"])


def test_an_entry_too_far_back_is_told_also_of_a_turn_that_read_another() -> None:
    world = World(num_blocks=60, lease_share=0.0)
    world.end(world.run("red", MANY[:6], {1: "5m", 5: "5m"}))
    assert reasons_of(world, *MANY, marks=[1, 29]) == (None, [None, "lookback_exceeded"])


def test_what_made_room_was_evicted() -> None:
    world = World(lease_share=0.0)
    finished(world, "red", EIGHT)
    flood(world)
    flood(world, start=2000)
    assert reasons_of(world, EIGHT, marks=[0]) == ("best_effort_evicted", ["best_effort_evicted"])


def test_what_was_sacrificed_and_then_made_room_was_sacrificed() -> None:
    world = World()
    finished(world, "red", EIGHT)
    assert world.sacrifice()
    flood(world)
    flood(world, start=2000)
    assert reasons_of(world, EIGHT, marks=[0]) == ("sacrificed", ["sacrificed"])


def test_what_an_operator_dropped_was_dropped() -> None:
    world = World()
    finished(world, "red", FIVE)
    world.drop("red")
    assert reasons_of(world, FIVE, (6,), marks=[0, 1]) == ("dropped", ["dropped", "cold"])


def test_what_an_adapter_wrote_went_with_it_and_the_models_own_stays() -> None:
    world = World()
    adapter = ChainKind("1" * 64, 0)
    finished(world, "red", FIVE)
    reasons_of(world, FIVE, marks=[0], adapter=adapter)
    world.drop_adapter(adapter.digest)
    assert reasons_of(world, FIVE, marks=[0]) == (None, [None])
    [lost, again] = [reasons_of(world, FIVE, marks=[0], adapter=adapter) for _ in range(2)]
    assert lost == ("adapter_unloaded", ["adapter_unloaded"])
    assert again == (None, [None])


def test_a_prefix_that_another_request_computes_is_a_race_of_its_breakpoint_alone() -> None:
    world = World(num_blocks=20)
    first = world.arrive("red", [FIVE], {0: "5m"})
    second = world.arrive("red", [FIVE, (6,)], {0: "5m", 1: "5m"})
    for life in (first, second):
        assert world.begin(life)
        world.compute(life, life.pending)
    world.start(first)
    start = world.start(second)
    assert start.miss_reason == "cold", "the request's is that of its last breakpoint"
    assert [missed_of(report) for report in start.breakpoints] == ["in_progress_race", "cold"]


def test_a_copy_that_is_not_whole_was_damaged() -> None:
    world = World(store_blocks=40, lease_share=0.0)
    finished(world, "red", TWELVE)
    save(world)
    work(world)
    flood(world)
    flood(world, start=2000)
    for index in range(len(world.disk.files)):
        damage(world, index, is_torn=False)
    reasons = reasons_of(world, TWELVE, marks=[0])
    assert reasons.marks == ["damaged"]


@pytest.mark.parametrize("num_read", [1, 2])
def test_what_is_read_in_full_never_has_a_reason(num_read: int) -> None:
    world = World(num_blocks=20)
    world.end(world.run("red", [FIVE, (6,)], {num_read - 1: "5m"}))
    reasons = reasons_of(world, FIVE, (6,), marks=[0, 1])
    assert [reason is None for reason in reasons.marks] == [True, num_read == 2]
