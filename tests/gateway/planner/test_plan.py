"""Plans: what they say of traffic whose answer is known, and of what can't be planned."""

from typing import Any

import msgspec
import pytest

from gateway.base.errors import InvalidRequest
from gateway.planner.plan import plan
from gateway.planning.traffic import EngineFacts, Job, PlanRequest, Times
from gateway.structs.plan import Plan
from tests.gateway.planner.made_traffic import MadeTraffic, made_up

MADE = MadeTraffic(tenants=2, conversations=6, turns=5, hours=0.1, gap_seconds=20, seed=2)
ENGINE = EngineFacts(engines=1, device_tokens=16_384, bytes_per_token=131_072)
TIMES = Times(prefill_us=100.0, timed_turns=7, decode_ms=10.0)


def planned(
    traffic: MadeTraffic = MADE,
    engine: EngineFacts | None = ENGINE,
    times: Times | None = TIMES,
    **fields: Any,
) -> Plan:
    job = Job(request=PlanRequest(**fields), turns=made_up(traffic), engine=engine, times=times)
    return plan(job, lambda share: None)


def ideal(traffic: MadeTraffic) -> float:
    """All of a prompt that an earlier one had, of a cache that loses nothing."""
    prefix_ids = set[int]()
    read_tokens = 0
    total = 0
    for turn in made_up(traffic):
        total += turn.ends[-1]
        known = [
            end for number, end in zip(turn.ids, turn.ends, strict=True) if number in prefix_ids
        ]
        read_tokens += max(known, default=0)
        prefix_ids.update(turn.ids)
    return read_tokens / total


def test_enough_memory_reads_all_that_there_is_and_keeps_every_promise() -> None:
    answer = planned(device_tokens=1_600_000)
    # Two cold twins at most compute what a cache that loses nothing would have had.
    assert answer.whole.reuse_rate == pytest.approx(ideal(MADE), abs=0.01)
    assert answer.ceiling == pytest.approx(ideal(MADE), abs=0.01)
    assert answer.whole.promise_kept == 1.0
    assert answer.whole.leases_ended > 0
    assert answer.whole.best_effort == 0.0
    assert answer.whole.refused == 0
    assert answer.whole.turns == MADE.num_turns


def test_what_nobody_asked_to_hold_is_planned_without_leases() -> None:
    turns = [
        msgspec.structs.replace(turn, unheld=[place for place, _ in turn.marks])
        for turn in made_up(MADE)
    ]
    job = Job(request=PlanRequest(device_tokens=1_600_000), turns=turns, engine=ENGINE, times=TIMES)
    answer = plan(job, lambda share: None)
    assert (answer.whole.best_effort, answer.whole.leases_ended) == (1.0, 0)
    assert answer.whole.reuse_rate == pytest.approx(ideal(MADE), abs=0.01)


def test_less_memory_reads_less_and_every_tier_adds() -> None:
    answer = planned(device_tokens=12_288, host_tokens=12_288, disk_tokens=163_840)
    rates = [point.reuse_rate for point in answer.memory]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    tiers = {point.label: point.reuse_rate for point in answer.tiers}
    assert tiers["Device alone"] < tiers["With host and disk"]
    assert tiers["With host and disk"] == pytest.approx(ideal(MADE), abs=0.03)


def test_changes_compare_the_same_point_with_the_ones_of_the_curves() -> None:
    answer = planned(device_tokens=8_192)
    changes = {change.kind: change for change in answer.changes}
    assert changes["memory"].after.hit_rate == answer.memory[3].hit_rate
    assert changes["engine"].before.hit_rate == answer.memory[2].hit_rate
    assert f"{changes['memory'].after.hit_rate:.1%}" in changes["memory"].text


def test_the_first_token_waits_for_its_prefill_alone_on_an_idle_engine() -> None:
    alone = MadeTraffic(tenants=1, conversations=1, turns=1, system_tokens=0, question_tokens=800)
    answer = planned(traffic=alone)
    assert answer.whole.first_token_p50 == pytest.approx(0.08)


def test_what_was_not_measured_has_no_time() -> None:
    untimed = planned(times=None)
    points = [untimed.whole, *untimed.memory, *untimed.engines, *untimed.tiers]
    assert {point.first_token_p95 for point in points} == {None}
    assert {point.prefill_saved_seconds for point in points} == {None}
    assert "No turn of the range was timed" in untimed.assumptions[0]
    # Nobody timed the way back from a disk.
    timed = {point.label: point.first_token_p95 for point in planned().tiers}
    assert timed["Device alone"] is not None
    assert timed["With a disk for all of it"] is None
    # The hits hardly depend on the times.
    assert planned().whole.hit_rate == pytest.approx(untimed.whole.hit_rate, abs=0.01)


def test_the_engines_own_figures_stand_where_nothing_is_asked() -> None:
    engine = EngineFacts(engines=2, device_tokens=40_960, host_tokens=8_192, min_cache_tokens=512)
    answer = planned(engine=engine)
    assert answer.whole.engines == 2
    assert answer.engine.device_tokens == 40_960
    assert answer.engine.host_tokens == 8_192
    changed = planned(engine=engine, engines=1, host_tokens=0)
    assert changed.whole.engines == 1
    assert changed.engine.host_tokens == 0
    budget = 40_960 // 2
    assert answer.engine.lease_tokens
    assert answer.engine.leases_that_fit == budget // answer.engine.lease_tokens


def test_traffic_of_several_models_is_warned_of() -> None:
    job = Job(
        request=PlanRequest(), turns=made_up(MADE), models=["a", "b"], engine=ENGINE, times=TIMES
    )
    (warning,) = plan(job, lambda share: None).warnings
    assert "2 models (a, b)" in warning
    assert planned().warnings == []


def test_what_is_left_out_is_said() -> None:
    turns = made_up(MADE)
    job = Job(
        request=PlanRequest(), turns=turns, is_cut=True, num_unknown=3, engine=ENGINE, times=TIMES
    )
    assert plan(job, lambda share: None).warnings == [
        f"The newest {len(turns):,} requests of the range are planned. Older ones are left out.",
        "3 requests of an earlier version can't be planned, and are left out.",
    ]


@pytest.mark.parametrize(
    ("job", "named"),
    [
        ({"turns": [], "engine": ENGINE}, "since_ms: no request of this range"),
        ({"engine": None}, "device_tokens: no engine of the range's model answers"),
        ({"asked": {"device_tokens": 1000}}, "device_tokens: 1,000 is too small"),
        ({"asked": {"trace": ""}, "engine": ENGINE}, "trace: it has no request"),
        ({"asked": {"trace": "{}"}, "engine": ENGINE}, "trace: line 1"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_field(job: Any, named: str) -> None:
    job = {"turns": made_up(MADE), **job}
    request = msgspec.convert(job.pop("asked", {}), PlanRequest)
    with pytest.raises(InvalidRequest) as refused:
        plan(Job(request=request, **job), lambda share: None)
    assert named in str(refused.value)
