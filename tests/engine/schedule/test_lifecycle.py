"""A request from submit to its final counts, whatever way it ends."""

import time

import pytest

from engine.clock import MonotonicClock
from engine.errors import DuplicateRequest, Overloaded
from engine.protocol import ChainGone, Done, Failed, LeaseEnded, Started
from tests.engine.schedule.harness import Harness, Sent


def words(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def started(sent: Sent) -> Started:
    assert sent.started is not None
    return sent.started


def test_max_tokens_zero_reads_and_writes_and_samples_nothing() -> None:
    engine = Harness()
    sent = engine.send(words(0, 9), marks={0: "1h"}, max_tokens=0)
    engine.finish(sent)
    assert [type(frame).__name__ for frame in sent.frames] == ["Started", "Finished", "Done"]
    assert started(sent).usage.cache_write_1h_tokens == 9
    assert all(work.sample is None for step in engine.runner.steps for work in step)
    assert engine.books.unacknowledged()[0].output_tokens == 0


@pytest.mark.parametrize("others", [False, True])
def test_who_never_began_to_answer_has_refreshed_nothing_v79(others: bool) -> None:
    """While it waits the entry lives on; what another refreshed meanwhile stays."""
    engine = Harness(max_running=1)
    engine.finish(engine.send(words(0, 10), marks={0: "5m"}))
    (entry,) = engine.entries.live()
    blocker = engine.send(words(500, 4), max_tokens=2000)
    engine.step()
    engine.clock.advance(100)
    cancelled = [engine.send(words(0, 10), words(50, 7), marks={1: "5m"})]
    engine.clock.advance(100)
    other = engine.send(words(0, 10), marks={0: "5m"}) if others else None
    engine.clock.advance(50)
    cancelled.append(engine.send(words(0, 10), marks={0: "1h"}))
    assert entry.expires_at == 250 + 300
    for sent in (*cancelled, blocker):
        engine.lifecycle.cancel(sent.state.request_id)
    if other is not None:
        engine.finish(other)
    assert entry.expires_at == (200 + 300 if others else 300)
    engine.clock.advance(entry.expires_at - engine.clock.now())
    engine.step()
    assert engine.entries.live() == []


def test_what_is_found_at_arrival_is_held_until_it_runs() -> None:
    engine = Harness(num_blocks=16)
    engine.finish(engine.send(words(0, 16), marks={0: "5m"}))
    blocker = engine.send(words(100, 40), max_tokens=4)
    engine.step()
    sent = engine.send(words(0, 16), marks={0: "5m"})
    engine.clock.advance(300)
    engine.finish(blocker, sent)
    assert started(sent).usage.cache_read_tokens == 16


@pytest.mark.parametrize("steps", range(3))
def test_cancelled_before_it_started_it_writes_nothing(steps: int) -> None:
    engine = Harness(max_step_tokens=16)
    sent = engine.send(words(0, 60), marks={0: "5m"})
    engine.step(steps)
    assert engine.lifecycle.cancel(sent.state.request_id)
    assert [type(frame).__name__ for frame in sent.frames] == ["Failed"]
    assert len(engine.entries) == 0
    assert engine.pool.counts().active == 0
    counts = engine.books.unacknowledged()[0]
    assert (counts.reason, counts.usage, counts.output_tokens) == ("cancelled", None, 0)
    engine.check_idle()


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("victim", range(3))
def test_a_cancelled_neighbour_changes_nobodys_tokens(steps: int, victim: int) -> None:
    engine = Harness(num_blocks=16)
    sents = [engine.send(words(100 * (i // 2), 11), marks={0: "5m"}, seed=i) for i in range(3)]
    engine.step(steps)
    engine.lifecycle.cancel(sents[victim].state.request_id)
    engine.finish(*sents)
    engine.check_idle()


def test_a_request_id_is_refused_while_it_runs_and_until_it_is_acknowledged() -> None:
    engine = Harness()
    sent = engine.send(words(0, 9), request_id="one")
    with pytest.raises(DuplicateRequest):
        engine.send(words(0, 9), request_id="one")
    engine.finish(sent)
    with pytest.raises(DuplicateRequest):
        engine.send(words(0, 9), request_id="one")
    engine.books.acknowledge(["one", "unknown"])
    engine.books.acknowledge(["one"])
    engine.finish(engine.send(words(0, 9), request_id="one"))


def test_beyond_the_waiting_bound_a_request_is_refused_and_nothing_changes() -> None:
    engine = Harness(max_waiting=2)
    engine.finish(engine.send(words(0, 9), marks={0: "5m"}))
    waiting = [engine.send(words(0, 9), marks={0: "5m"}) for _ in range(2)]
    before = [block.ref_count for block in engine.pool.blocks]
    with pytest.raises(Overloaded):
        engine.send(words(0, 9), marks={0: "5m"}, request_id="refused")
    assert [block.ref_count for block in engine.pool.blocks] == before
    assert not engine.books.has("refused")
    engine.finish(*waiting)


def test_an_identical_request_during_prefill_is_computed_once_and_says_so() -> None:
    engine = Harness(max_step_tokens=16)
    first = engine.send(words(0, 40), marks={0: "5m"})
    second = engine.send(words(0, 40), marks={0: "5m"}, seed=2)
    engine.finish(first, second)
    assert started(first).miss_reason == "cold"
    assert started(second).miss_reason == "in_progress_race"
    usage = started(second).usage
    assert (usage.cache_read_tokens, usage.cache_write_5m_tokens) == (0, 40)
    assert usage.automatic_tokens >= 32, "the first one's blocks were used all the same"


def test_the_lease_ends_with_an_event_exactly_at_its_expiry() -> None:
    engine = Harness()
    engine.finish(engine.send(words(0, 9), marks={0: "5m"}))
    assert engine.lifecycle.seconds_to_expiry(engine.clock.now()) == 300
    engine.clock.advance(299.999)
    engine.step()
    assert not [event for event in engine.events if isinstance(event, LeaseEnded)]
    engine.clock.advance(0.001)
    engine.step()
    ended = [event for event in engine.events if isinstance(event, LeaseEnded)]
    assert [event.reason for event in ended] == ["expired"]


def test_final_counts_are_bounded_and_the_oldest_goes_first() -> None:
    engine = Harness()
    sent = engine.send(words(0, 5), words(5, 5), marks={1: "5m"}, max_tokens=3)
    engine.finish(sent)
    (counts,) = engine.books.unacknowledged()
    assert counts.usage == started(sent).usage
    assert (counts.reason, counts.output_tokens, counts.epoch) == ("length", 3, "e")


def test_the_thread_ends_leases_in_time_while_nothing_runs() -> None:
    engine = Harness(clock=MonotonicClock(), ttl_scale=0.001)
    engine.finish(engine.send(words(0, 9), marks={0: "5m"}))
    assert len(engine.entries.leases) == 1
    crashes: list[Exception] = []
    engine.loop.start(crashes.append)
    started_at = time.monotonic()
    while not any(isinstance(event, LeaseEnded) for event in engine.events):
        assert time.monotonic() - started_at < 180, "the lease does not end"
        time.sleep(0.01)
    engine.loop.stop()
    assert not crashes


def test_an_evicted_name_is_told_once() -> None:
    engine = Harness(num_blocks=8)
    engine.finish(engine.send(words(0, 9)))
    engine.pool.anchor("aa", engine.pool.blocks[1], 8)
    engine.finish(engine.send(words(100, 22)))
    gone = [event.names for event in engine.events if isinstance(event, ChainGone)]
    assert gone == [["aa"]]


def test_no_way_out_leaves_a_request_without_a_last_frame() -> None:
    engine = Harness()
    sents = [engine.send(words(100 * i, 9), max_tokens=8) for i in range(3)]
    engine.step(2)
    engine.lifecycle.cancel(sents[0].state.request_id)
    late = engine.send(words(900, 9))
    engine.lifecycle.cancel(late.state.request_id)
    engine.finish(*sents, late)
    for sent in (*sents, late):
        last = [frame for frame in sent.frames if isinstance(frame, Done | Failed)]
        assert last == [sent.frames[-1]]
    assert engine.books.num_unacknowledged == 4
