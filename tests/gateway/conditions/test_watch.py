"""Since when a condition lasts, which are told, and to whom."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.conditions.engines import Increases
from gateway.conditions.kinds import KINDS, LULL_SECONDS, Finding
from gateway.conditions.watch import Watch

WALL_MS = 1_800_000_000_000


def gone(cause: str = "cannot connect", since: float | None = None) -> Finding:
    return Finding("engine_not_answering", "engine-0", cause, "engine-0", since)


def test_a_condition_keeps_its_beginning_while_its_cause_changes_and_begins_anew_after_an_end() -> (
    None
):
    watch = Watch()
    watch.take([gone(since=95.0)], 100.0, WALL_MS)
    (first,) = watch.conditions(100.0)
    assert first.since_ms == WALL_MS - 5_000
    assert first.sentence.startswith("engine-0 has not answered since ")
    assert first.sentence.endswith(": cannot connect")
    # A wall clock that jumps moves no beginning.
    watch.take([gone("the engine did not answer in time", since=95.0)], 160.0, WALL_MS + 9_000_000)
    (later,) = watch.conditions(160.0)
    assert later.since_ms == first.since_ms
    assert later.cause == "the engine did not answer in time"
    watch.take([], 161.0, WALL_MS + 61_000)
    assert watch.conditions(161.0) == []
    watch.take([gone()], 162.0, WALL_MS + 62_000)
    assert watch.conditions(162.0)[0].since_ms == WALL_MS + 62_000


def test_what_must_last_is_told_when_it_has_lasted() -> None:
    watch = Watch()
    starting = Finding("engine_starting", "engine-0", "its stage is `weights`", "engine-0")
    long = KINDS["engine_starting"].seconds
    watch.take([starting], 100.0, WALL_MS)
    assert watch.conditions(100.0) == []
    (new,) = watch.conditions(100.0, with_new=True, is_for_all=True)
    assert (new.kind, new.since_ms) == ("engine_starting", WALL_MS)
    watch.take([starting], 100.0 + long, WALL_MS + round(1000 * long))
    (condition,) = watch.conditions(100.0 + long)
    assert condition.since_ms == WALL_MS


@given(st.sets(st.sampled_from(sorted(KINDS))))
def test_the_worst_come_first_and_a_workspace_sees_what_is_for_all_alone(kinds: set[str]) -> None:
    watch = Watch()
    findings = [Finding(kind, f"about {kind}", "why") for kind in KINDS if kind in kinds]
    for now in (0.0, 1e6):
        watch.take(findings, now, WALL_MS + round(now * 1000))
    everything = watch.conditions(1e6)
    assert {condition.kind for condition in everything} == kinds
    order = ["critical", "warning", "info"]
    ranks = [order.index(condition.severity) for condition in everything]
    assert ranks == sorted(ranks)
    assert all(condition.remedy for condition in everything)
    conditions = watch.conditions(1e6, is_for_all=True)
    assert {condition.kind for condition in conditions} == {k for k in kinds if KINDS[k].for_all}
    assert not any(condition.remedy for condition in conditions)


def test_a_workspace_is_told_no_name_of_another_model() -> None:
    watch = Watch()
    refused = Finding("another_model", "engine-0", "secret", "engine-0", cause_for_all="another")
    watch.take([refused], 0.0, WALL_MS)
    assert [condition.cause for condition in watch.conditions(0.0)] == ["secret"]
    assert [condition.cause for condition in watch.conditions(0.0, is_for_all=True)] == ["another"]


def test_what_has_ended_is_told_as_past_with_its_end() -> None:
    watch = Watch()
    lasting = Finding("leases_ended_early", "engine-0", "2 damaged on disk", "engine-0", 40.0)
    watch.take([lasting], 100.0, WALL_MS)
    (first,) = watch.conditions(100.0)
    assert first.ended_ms is None
    assert first.sentence.startswith("engine-0 has ended leases before their time since ")
    watch.take([lasting._replace(ended=100.0)], 220.0, WALL_MS + 120_000)
    (over,) = watch.conditions(220.0)
    assert over.since_ms == first.since_ms == WALL_MS - 60_000
    assert over.ended_ms == WALL_MS
    # 2027-01-15 08:00.
    assert over.sentence == (
        "engine-0 ended leases before their time from 2027-01-15 07:59 UTC to 2027-01-15 08:00 UTC,"
        " and no more since: 2 damaged on disk"
    )
    # A wall clock that jumps moves no end.
    watch.take([lasting._replace(ended=100.0)], 230.0, WALL_MS + 9_000_000)
    assert watch.conditions(230.0)[0].ended_ms == WALL_MS
    at_once = lasting._replace(since=300.0, ended=300.0)
    watch.take([], 300.0, WALL_MS + 200_000)
    watch.take([at_once], 390.0, WALL_MS + 290_000)
    (over,) = watch.conditions(390.0)
    assert " before their time at 2027-01-15 08:03 UTC, and no more since: " in over.sentence


def test_an_increase_lasts_until_a_minute_without_one_and_a_new_process_counts_from_0() -> None:
    increases = Increases()

    def look(count: int, now: float, epoch: str = "first") -> bool:
        return increases.has_grown("engine-0", "sacrificed", epoch, count, now)

    assert not look(7, 0.0), "nobody knows when that was"
    assert not look(7, 1.0)
    assert look(8, 2.0)
    assert look(8, 2.0 + LULL_SECONDS - 1)
    assert not look(8, 2.0 + LULL_SECONDS)
    assert not look(0, 700.0, "second")
    assert look(1, 701.0, "second")
    increases.keep(set())
    assert not look(1, 702.0, "second")
