"""The event log: numbering, replay, and subscribers that fall behind."""

from collections.abc import AsyncIterator

import pytest

from engine.backends.events import MAX_BEHIND, REPLAY_EVENTS, EventLog
from engine.protocol import ChainGone, Event, EventFrame, Snapshot

pytestmark = pytest.mark.anyio


def gone(name: str) -> Event:
    return ChainGone(seq=0, names=[name], reason="evicted")


class Store:
    """Answers with a snapshot of what was published so far."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    async def snapshot(self) -> Snapshot:
        return Snapshot(seq=self._log.last_seq, epoch=self._log.epoch, chains=[])


def subscribe(log: EventLog, epoch: str | None, after: int | None) -> AsyncIterator[EventFrame]:
    return log.subscribe(epoch, after, Store(log).snapshot)


async def take(frames: AsyncIterator[EventFrame], count: int) -> list[EventFrame]:
    return [await anext(frames) for _ in range(count)]


async def test_events_are_numbered_from_one_without_gaps() -> None:
    log = EventLog("e")
    log.publish([gone("a"), gone("b")])
    log.publish([gone("c")])
    frames = subscribe(log, "e", 0)
    assert [frame.seq for frame in await take(frames, 3)] == [1, 2, 3]
    await frames.aclose()


async def test_a_subscriber_gets_what_it_missed_then_what_comes() -> None:
    log = EventLog("e")
    log.publish([gone("a"), gone("b")])
    frames = subscribe(log, "e", 1)
    (missed,) = await take(frames, 1)
    log.publish([gone("c")])
    (live,) = await take(frames, 1)
    assert [missed.seq, live.seq] == [2, 3]
    await frames.aclose()


async def test_what_the_snapshot_has_is_not_told_again() -> None:
    log = EventLog("e")

    async def snapshot() -> Snapshot:
        log.publish([gone("during")])
        return Snapshot(seq=log.last_seq, epoch="e", chains=[])

    frames = log.subscribe(None, None, snapshot)
    base = await anext(frames)
    log.publish([gone("after")])
    following = await anext(frames)
    assert isinstance(base, Snapshot)
    assert (base.seq, following.seq) == (1, 2)
    await frames.aclose()


@pytest.mark.parametrize(("epoch", "after"), [("other", 0), ("e", 99), ("e", None), (None, None)])
async def test_who_cannot_be_caught_up_gets_a_snapshot(
    epoch: str | None, after: int | None
) -> None:
    log = EventLog("e")
    log.publish([gone("a")])
    frames = subscribe(log, epoch, after)
    assert isinstance(await anext(frames), Snapshot)
    await frames.aclose()


async def test_what_is_no_longer_kept_is_replaced_by_a_snapshot() -> None:
    log = EventLog("e")
    log.publish([gone("a")] * (REPLAY_EVENTS + 2))
    oldest = subscribe(log, "e", 2)
    assert (await anext(oldest)).seq == 3
    too_old = subscribe(log, "e", 1)
    assert isinstance(await anext(too_old), Snapshot)
    await oldest.aclose()
    await too_old.aclose()


async def test_a_subscriber_that_falls_behind_is_ended_and_others_are_not() -> None:
    log = EventLog("e")
    slow, quick = subscribe(log, "e", 0), subscribe(log, "e", 0)
    log.publish([gone("first")])
    await anext(slow)
    await anext(quick)
    for _ in range(3):
        log.publish([gone("a")] * (MAX_BEHIND // 2))
        await take(quick, MAX_BEHIND // 2)
    received = [frame async for frame in slow]
    assert 0 < len(received) < MAX_BEHIND
    seqs = [frame.seq for frame in received]
    assert seqs == list(range(2, 2 + len(seqs))), "what it got had no gap"
    log.publish([gone("last")])
    assert (await anext(quick)).seq == log.last_seq
    await quick.aclose()


async def test_a_log_that_is_closed_ends_who_listens_and_who_comes_later() -> None:
    log = EventLog("e")
    frames = subscribe(log, "e", 0)
    log.publish([gone("a")])
    assert [frame.seq for frame in await take(frames, 1)] == [1]
    log.publish([gone("b")])
    log.close()
    log.publish([gone("c")])
    assert [frame.seq async for frame in frames] == [2]
    assert [frame async for frame in subscribe(log, "e", 0)] == []


async def test_a_log_that_is_closed_before_the_snapshot_is_there_ends_behind_it() -> None:
    log = EventLog("e")

    async def snapshot() -> Snapshot:
        log.close()
        return Snapshot(seq=log.last_seq, epoch="e", chains=[])

    assert [frame.seq async for frame in log.subscribe(None, None, snapshot)] == [0]
