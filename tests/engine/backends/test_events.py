"""Streams to readers: events with replay, and a generation's frames."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import pytest

from engine.backends.base import Generation
from engine.backends.reports import MAX_BEHIND, REPLAY_EVENTS, EventLog
from engine.protocol import ChainGone, Event, EventFrame, Snapshot

pytestmark = pytest.mark.anyio


def gone(name: str) -> Event:
    return ChainGone(seq=0, names=[name], reason="evicted")


def subscribe(log: EventLog, epoch: str | None, after: int | None) -> AsyncIterator[EventFrame]:
    async def snapshot() -> Snapshot:
        return Snapshot(seq=log.last_seq, epoch=log.epoch, chains=[])

    return log.subscribe(epoch, after, snapshot)


async def take(frames: AsyncIterator[EventFrame], count: int) -> list[EventFrame]:
    return [await anext(frames) for _ in range(count)]


async def test_a_subscriber_gets_what_it_missed_then_what_comes_until_the_log_is_closed() -> None:
    log = EventLog("e")
    log.publish([gone("a"), gone("b")])
    frames = subscribe(log, "e", 1)
    (missed,) = await take(frames, 1)
    log.publish([gone("c")])
    (live,) = await take(frames, 1)
    assert [missed.seq, live.seq] == [2, 3]
    log.publish([gone("d")])
    log.close()
    log.publish([gone("e")])
    assert [frame.seq async for frame in frames] == [4]
    assert [frame async for frame in subscribe(log, "e", 0)] == []


async def test_what_the_snapshot_has_is_not_told_again() -> None:
    log = EventLog("e")

    async def snapshot() -> Snapshot:
        log.publish([gone("during")])
        return Snapshot(seq=log.last_seq, epoch="e", chains=[])

    async with aclosing(log.subscribe(None, None, snapshot)) as frames:
        base = await anext(frames)
        log.publish([gone("after")])
        following = await anext(frames)
    assert isinstance(base, Snapshot)
    assert (base.seq, following.seq) == (1, 2)


@pytest.mark.parametrize(
    ("epoch", "after"), [("other", 0), ("e", 1), ("e", 99_999), ("e", None), (None, None)]
)
async def test_who_cant_be_caught_up_gets_a_snapshot(epoch: str | None, after: int | None) -> None:
    log = EventLog("e")
    log.publish([gone("a")] * (REPLAY_EVENTS + 2))
    async with aclosing(subscribe(log, "e", 2)) as oldest:
        assert (await anext(oldest)).seq == 3
    async with aclosing(subscribe(log, epoch, after)) as frames:
        assert isinstance(await anext(frames), Snapshot)


async def test_a_subscriber_that_falls_behind_is_ended_and_others_are_not() -> None:
    log = EventLog("e")
    slow = subscribe(log, "e", 0)
    quick = subscribe(log, "e", 0)
    log.publish([gone("first")])
    await anext(slow)
    await anext(quick)
    for _ in range(3):
        log.publish([gone("a")] * (MAX_BEHIND // 2))
        await take(quick, MAX_BEHIND // 2)
    seqs = [frame.seq async for frame in slow]
    assert 0 < len(seqs) < MAX_BEHIND
    assert seqs == list(range(2, 2 + len(seqs))), "what it got had no gap"
    log.publish([gone("last")])
    assert (await anext(quick)).seq == log.last_seq
    await quick.aclose()


async def test_a_log_that_is_closed_before_the_snapshot_is_there_ends_behind_it() -> None:
    log = EventLog("e")

    async def snapshot() -> Snapshot:
        log.close()
        return Snapshot(seq=log.last_seq, epoch="e", chains=[])

    assert [frame.seq async for frame in log.subscribe(None, None, snapshot)] == [0]


class Opened:
    """A generation that is open, and how often it was cancelled."""

    def __init__(self) -> None:
        self.num_cancelled = 0
        self.generation = Generation(asyncio.get_running_loop(), self._cancel)
        self.generation.is_open = True

    def _cancel(self) -> None:
        self.num_cancelled += 1


async def test_a_reader_that_closes_or_is_cancelled_cancels_once() -> None:
    opened = Opened()
    opened.generation.close()
    opened.generation.close()
    assert opened.num_cancelled == 1
    assert [frame async for frame in opened.generation] == []
    opened = Opened()
    reader = asyncio.create_task(anext(opened.generation))
    await asyncio.sleep(0)
    reader.cancel()
    with suppress(asyncio.CancelledError):
        await reader
    assert opened.num_cancelled == 1


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_generation_nobody_reads_is_cancelled_unless_refused(is_open: bool) -> None:
    opened = Opened()
    opened.generation.is_open = is_open
    del opened.generation
    gc.collect()
    assert opened.num_cancelled == is_open
