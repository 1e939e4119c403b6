"""What an engine tells of what it holds: consecutive, replayed, and in time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from engine.protocol import (
    ChainGone,
    ChainHeld,
    Event,
    EventFrame,
    Heartbeat,
    LeaseEnded,
    Name,
    Snapshot,
)
from tests.conformance.engines import TICK, Engine, prompt


@contextmanager
def subscribed(engine: Engine, **parameters: str | int) -> Iterator[Iterator[EventFrame]]:
    decoder = msgspec.json.Decoder(EventFrame)
    with engine.client.stream("GET", "/v1/events", params=parameters) as response:
        assert response.status_code == 200
        yield (decoder.decode(line) for line in response.iter_lines() if line)


def now(engine: Engine) -> dict[str, str | int]:
    """Where a subscriber that knows everything stands."""
    return {"epoch": engine.description.epoch, "after": engine.snapshot().seq}


def take(frames: Iterator[EventFrame], count: int) -> list[Event]:
    events: list[Event] = []
    while len(events) < count:
        frame = next(frames)
        if isinstance(frame, ChainHeld | ChainGone | LeaseEnded):
            events.append(frame)
    return events


def take_of(frames: Iterator[EventFrame], count: int, *names: str) -> list[Event]:
    """Those about these names: in a full pool, what other tests left is evicted meanwhile."""
    events: list[Event] = []
    while len(events) < count:
        (event,) = take(frames, 1)
        digests = (
            {n.digest for n in event.names} if isinstance(event, ChainHeld) else {*event.names}
        )
        if digests & set(names):
            events.append(event)
    return events


def hold(engine: Engine, scope: str, tokens: int = 80) -> str:
    """A request with one leased name; the name."""
    name = scope[:16]
    engine.ask(prompt(engine.text(tokens)), scope, 0, names=(Name(name, 0),))
    return name


def test_a_write_is_told_with_its_names_and_lease(engine: Engine) -> None:
    engine.require("hold")
    with subscribed(engine, **now(engine)) as frames:
        name = hold(engine, engine.scope())
        (chain,) = take_of(frames, 1, name)
    assert isinstance(chain, ChainHeld)
    assert [chain_name.digest for chain_name in chain.names] == [name]
    # A slot file ends with its entry, in the middle of a block.
    is_file = engine.description.upstream == "llamacpp"
    assert is_file or chain.names[0].tokens % engine.description.block_size == 0
    assert (chain.num_leased, chain.lease_seconds) == (1, 300)


def test_an_expiry_is_told_while_nothing_runs(engine: Engine) -> None:
    engine.require("hold")
    engine.advance(3600)  # whatever else there was has ended
    scope = engine.scope()
    name = hold(engine, scope)
    (entry,) = engine.entries(scope)
    with subscribed(engine, **now(engine)) as frames:
        engine.advance(300 - TICK)
        engine.advance(TICK)
        (ended,) = take_of(frames, 1, name)
    assert isinstance(ended, LeaseEnded)
    assert (ended.entry, ended.names, ended.reason) == (entry.entry, [name], "expired")


def test_a_drop_is_told(engine: Engine) -> None:
    engine.require("hold")
    scope = engine.scope()
    name = hold(engine, scope)
    with subscribed(engine, **now(engine)) as frames:
        engine.drop(scope)
        (ended,) = take_of(frames, 1, name)
    assert isinstance(ended, LeaseEnded)
    assert (ended.names, ended.reason) == ([name], "dropped")


def test_a_sacrifice_and_what_is_evicted_are_told(tiny_engine: Engine) -> None:
    tiny_engine.require("hold")
    engine = tiny_engine
    name = hold(engine, engine.scope(), 5 * engine.description.block_size)
    with subscribed(engine, **now(engine)) as frames:
        # A text has a few tokens less than asked for: 13 blocks of it always need the lease's.
        engine.ask(prompt(engine.text(13 * engine.description.block_size)), engine.scope())
        events = take_of(frames, 2, name)
    ended = next(event for event in events if isinstance(event, LeaseEnded))
    gone = next(event for event in events if isinstance(event, ChainGone))
    assert (ended.names, ended.reason) == ([name], "sacrificed")
    assert (gone.names, gone.reason) == ([name], "evicted")


def test_events_are_numbered_without_gaps_and_replayed_after_a_break(engine: Engine) -> None:
    start = now(engine)
    with subscribed(engine, **start) as frames:
        for _ in range(3):
            hold(engine, engine.scope())
        live = take(frames, 3)
    first = int(start["after"]) + 1
    assert [event.seq for event in live] == [first, first + 1, first + 2]
    for missed in range(3):
        with subscribed(engine, epoch=start["epoch"], after=first - 1 + missed) as frames:
            assert take(frames, 3 - missed) == live[missed:]


@pytest.mark.parametrize("what", ["other epoch", "no position", "the future", "nothing known"])
def test_who_cannot_be_caught_up_gets_a_snapshot_first(engine: Engine, what: str) -> None:
    name = hold(engine, engine.scope())
    here = now(engine)
    known: dict[str, dict[str, str | int]] = {
        "other epoch": {"epoch": "0" * 32, "after": 1},
        "no position": {"epoch": here["epoch"]},
        "the future": {"epoch": here["epoch"], "after": 10**9},
        "nothing known": {},
    }
    with subscribed(engine, **known[what]) as frames:
        base = next(frames)
        hold(engine, engine.scope())
        (following,) = take(frames, 1)
    assert isinstance(base, Snapshot)
    assert base.epoch == engine.description.epoch
    assert following.seq == base.seq + 1
    if engine.keeps("hold"):
        leased = {n.digest for chain in base.chains for n in chain.names[: chain.num_leased]}
        assert name in leased


def test_a_snapshot_shows_what_is_leased_and_what_is_merely_held(engine: Engine) -> None:
    engine.require("hold")
    scope = engine.scope()
    name = hold(engine, scope)
    for num_leased in (1, 0):
        chains = [c for c in engine.snapshot().chains if name in {n.digest for n in c.names}]
        assert [(len(c.names), c.num_leased) for c in chains] == [(1, num_leased)]
        engine.drop(scope)


def test_names_of_one_scope_are_never_told_with_anothers(engine: Engine) -> None:
    text = engine.text(80)
    with subscribed(engine, **now(engine)) as frames:
        names = []
        for scope in (engine.scope(), engine.scope()):
            names.append(scope[:16])
            engine.ask(prompt(text), scope, 0, names=(Name(names[-1], 0),))
        events = take_of(frames, 2, *names)
    assert [[n.digest for n in e.names] for e in events if isinstance(e, ChainHeld)] == [
        [names[0]],
        [names[1]],
    ]


def test_a_subscriber_that_leaves_is_forgotten(engine: Engine) -> None:
    for _ in range(20):
        with subscribed(engine) as frames:
            assert isinstance(next(frames), Snapshot)
    with subscribed(engine, **now(engine)) as frames:
        hold(engine, engine.scope())
        assert take(frames, 1)


def test_a_query_that_makes_no_sense_is_refused(engine: Engine) -> None:
    response = engine.client.get("/v1/events", params={"after": "soon"})
    assert response.status_code == 400
    assert response.json()["code"] == "invalid_request"


@pytest.mark.slow
def test_silence_is_broken_every_five_seconds(slow_engine: Engine) -> None:
    engine = slow_engine
    here = now(engine)
    request = engine.request(prompt(engine.text(7000)), engine.scope())
    with engine.stream(request) as stream:
        since = time.monotonic()
        first = next(stream.response.iter_raw())
        is_answer = bool(first.strip())
        assert not is_answer or time.monotonic() - since < 6, "a blank line comes before it"
        stream.response.close()
    engine.wait_until_idle()
    with subscribed(engine, **here) as frames:
        since = time.monotonic()
        beat = next(frame for frame in frames if isinstance(frame, Heartbeat))
        assert time.monotonic() - since < 30
    assert beat.seq >= int(here["after"])


def test_an_engine_says_which_of_some_names_it_holds(engine: Engine) -> None:
    scope = engine.scope()
    name = hold(engine, scope)
    reply = engine.client.post("/v1/names", json={"names": ["f" * 16, name]})
    assert reply.status_code == 200, reply.text
    (chain,) = msgspec.json.decode(reply.content, type=list[ChainHeld])
    known = {n.digest: chain for chain in engine.snapshot().chains for n in chain.names}[name]
    assert [chain_name.digest for chain_name in chain.names] == [name] and chain.tier == known.tier
    assert bool(chain.num_leased) == bool(known.num_leased)
    refused = engine.client.post("/v1/names", json={"names": ["f" * 16] * 513})
    assert refused.status_code == 400
