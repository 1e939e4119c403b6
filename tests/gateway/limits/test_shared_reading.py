"""Places for reads of the admin API that workers share, over links as workers have them."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from gateway.base.errors import RateLimited
from gateway.base.link import Link
from gateway.limits.reading import ReadKind, ReadLimit
from gateway.limits.shared_reading import ReadNumbers, ReadSeat, SharedReadLimit
from tests.gateway.serving import WAIT_SECONDS


@dataclass
class Worker:
    link: Link
    parents: Link
    seat: ReadSeat
    export: SharedReadLimit
    read: SharedReadLimit

    async def die(self) -> None:
        self.link.close()
        async with asyncio.timeout(WAIT_SECONDS):
            while self.parents.is_open:
                await asyncio.sleep(0)
        self.seat.lost()


@asynccontextmanager
async def two_workers(wait_seconds: float) -> AsyncIterator[tuple[Worker, Worker]]:
    limits: dict[ReadKind, ReadLimit] = {
        "export": ReadLimit(1, 0.0, wait_seconds=wait_seconds),
        "read": ReadLimit(2, 0.0, wait_seconds=wait_seconds),
    }

    async def worker() -> Worker:
        ours, theirs = socket.socketpair()
        seat, numbers = ReadSeat(limits), ReadNumbers()
        parents, link = await Link.over(ours, seat.handlers), await Link.over(theirs, {})
        export, read = (SharedReadLimit(link, numbers, kind) for kind in limits)
        return Worker(link, parents, seat, export, read)

    workers = await worker(), await worker()
    try:
        yield workers
    finally:
        for each in workers:
            each.link.close()
            each.parents.close()
            each.seat.lost()
        await asyncio.sleep(0.01)


async def reads(limit: SharedReadLimit, key: str) -> None:
    async with limit.taken(key):
        pass


def test_a_key_has_one_export_over_all_workers_and_the_next_waits_for_its_end() -> None:
    async def run() -> None:
        async with two_workers(WAIT_SECONDS) as (one, other):
            async with one.export.taken("k"):
                waiting = asyncio.create_task(reads(other.export, "k"))
                await reads(other.export, "another key")
                await reads(other.read, "k")
                assert not waiting.done()
            await asyncio.wait_for(waiting, WAIT_SECONDS)
            assert not one.seat._holding

    asyncio.run(run())


def test_who_waits_too_long_is_refused_and_takes_nothing() -> None:
    async def run() -> None:
        async with two_workers(0.01) as (one, other):
            async with one.read.taken("k"), other.read.taken("k"):
                with pytest.raises(RateLimited, match="limit of 2 reads at once") as refused:
                    await reads(one.read, "k")
                assert refused.value.retry_after == 5
            await reads(other.read, "k")

    asyncio.run(run())


def test_the_place_of_a_client_that_leaves_while_it_waits_or_reads_is_free() -> None:
    async def run() -> None:
        async with two_workers(WAIT_SECONDS) as (one, other):
            reading = asyncio.create_task(_reads_for_ever(one.export))
            while not one.seat._holding:
                await asyncio.sleep(0)
            waiting = asyncio.create_task(reads(other.export, "k"))
            while not other.seat._holding:
                await asyncio.sleep(0)
            waiting.cancel()
            while other.seat._holding:
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait_for(reads(other.export, "k"), WAIT_SECONDS)

    asyncio.run(run())


def test_a_dead_workers_places_are_free() -> None:
    async def run() -> None:
        async with two_workers(WAIT_SECONDS) as (one, other):
            reading = asyncio.create_task(_reads_for_ever(one.export))
            while not one.seat._holding:
                await asyncio.sleep(0)
            await one.die()
            await asyncio.wait_for(reads(other.export, "k"), WAIT_SECONDS)
            reading.cancel()

    asyncio.run(run())


async def _reads_for_ever(limit: SharedReadLimit) -> None:
    async with limit.taken("k"):
        await asyncio.sleep(3600)
