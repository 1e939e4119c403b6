"""A request from submit to its final counts, whatever way it ends."""

import time

import pytest

from engine.clock import MonotonicClock
from engine.protocol import LeaseEnded
from tests.engine.schedule.harness import Harness, words


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
        engine.loop.cancel(sent.state.request_id)
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
    assert sent.started is not None and sent.started.usage.cache_read_tokens == 16


def test_the_lease_ends_with_an_event_exactly_at_its_expiry() -> None:
    engine = Harness()
    engine.finish(engine.send(words(0, 9), marks={0: "5m"}))
    assert engine.accounting.seconds_to_expiry(engine.clock.now()) == 300
    engine.clock.advance(299.999)
    engine.step()
    assert not [event for event in engine.events if isinstance(event, LeaseEnded)]
    engine.clock.advance(0.001)
    engine.step()
    ended = [event for event in engine.events if isinstance(event, LeaseEnded)]
    assert [event.reason for event in ended] == ["expired"]


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
