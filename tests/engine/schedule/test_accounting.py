"""A request from submit to its final counts, whatever way it ends, and what is kept of it."""

import pytest

from engine.protocol import FinalCounts
from engine.schedule import accounting
from engine.schedule.accounting import Totals
from tests.engine.schedule.harness import Harness, Sent, words


@pytest.mark.parametrize("has_others", [False, True])
def test_who_never_began_to_answer_has_refreshed_nothing_v79(has_others: bool) -> None:
    """While it waits the entry lives on; what another refreshed meanwhile stays."""
    engine = Harness(max_running=1)
    engine.done(words(0, 10), marks={0: "5m"})
    (entry,) = engine.entries.live()
    blocker = engine.send(words(500, 4), max_tokens=2000)
    engine.step()
    engine.clock.advance(100)
    cancelled = [engine.send(words(0, 10), words(50, 7), marks={1: "5m"})]
    engine.clock.advance(100)
    reader = engine.send(words(0, 10), marks={0: "5m"}) if has_others else None
    engine.clock.advance(50)
    cancelled.append(engine.send(words(0, 10), marks={0: "1h"}))
    assert entry.expires_at == 250 + 300
    for turn in (*cancelled, blocker):
        engine.loop.cancel(turn.state.request_id)
    if reader is not None:
        engine.finish(reader)
    assert entry.expires_at == (200 + 300 if has_others else 300)
    engine.clock.advance(entry.expires_at - engine.clock.now())
    engine.step()
    assert engine.entries.live() == []


def test_what_is_found_at_arrival_is_held_until_it_runs() -> None:
    engine = Harness(num_blocks=16)
    engine.done(words(0, 16), marks={0: "5m"})
    blocker = engine.send(words(100, 40), max_tokens=4)
    engine.step()
    turn = engine.send(words(0, 16), marks={0: "5m"})
    engine.clock.advance(300)
    engine.finish(blocker, turn)
    assert turn.usage.cache_read_tokens == 16


def prefilled(engine: Harness, turn: Sent) -> int:
    """What the final counts say was computed of a request that is cancelled now."""
    engine.loop.cancel(turn.state.request_id)
    by_id = {counts.request_id: counts for counts in engine.totals.unacknowledged()}
    assert by_id[turn.state.request_id].usage is None
    engine.step()
    assert not engine.scheduler.has_work, "nothing of it is computed after its end"
    return by_id[turn.state.request_id].prefilled_tokens


def test_a_request_that_is_cancelled_during_prefill_tells_what_was_computed() -> None:
    """Not what was read, and what was computed again after preemption once."""
    engine = Harness(max_step_tokens=16, num_blocks=256)
    turn = engine.send(words(1000, 200), max_tokens=4)
    engine.step(5)
    assert prefilled(engine, turn) == 5 * 16
    engine.done(words(0, 80), marks={0: "5m"}, max_tokens=1)
    turn = engine.send(words(0, 80), words(500, 100), marks={0: "5m"}, max_tokens=1)
    engine.step(2)
    assert prefilled(engine, turn) == 32
    turn = engine.send(words(2000, 100), max_tokens=1)
    engine.step(3)
    engine.scheduler._preempt(turn.state.leader)
    engine.step(1)
    assert prefilled(engine, turn) == 64


def kept_of(of: Totals, numbers: range, record: str) -> list[str]:
    """Which records are kept when so many more requests ended."""
    for number in numbers:
        of.ended(FinalCounts(request_id=f"r{number}", epoch="e", reason="stop"), record)
    return [
        record.request_id for record in of.records(f"r{number}" for number in range(numbers.stop))
    ]


def test_beyond_a_bound_the_oldest_records_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond that of their bytes their counts stay, beyond that of the counts both go."""
    monkeypatch.setattr(accounting, "MAX_RECORDS_BYTES", 30)
    of = Totals()
    assert kept_of(of, range(5), "ü" * 5) == ["r2", "r3", "r4"] and of.num_unacknowledged == 5
    of.acknowledge(["r2", "r3"])
    of.acknowledge(["r3"])
    assert kept_of(of, range(5, 7), "x" * 10) == ["r4", "r5", "r6"]
    monkeypatch.setattr(accounting, "MAX_UNACKNOWLEDGED", 2)
    of = Totals()
    assert kept_of(of, range(4), "x") == ["r2", "r3"] and of.num_forgotten == 2
