"""What takes the journal too long fails, each at its own time, from one timer."""

import asyncio

import pytest

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.journal.pending import Deadlines, PendingOpen


def test_each_work_fails_at_its_own_time_and_a_done_one_never() -> None:
    asyncio.run(_fail_each())


async def _fail_each() -> None:
    deadlines, loop = Deadlines(0.4), asyncio.get_running_loop()
    early, done, late = (loop.create_future() for _ in range(3))
    deadlines.watch(early)
    deadlines.watch(done)
    await asyncio.sleep(0.2)
    begun = loop.time()
    deadlines.watch(late)
    done.set_result("kept")
    with pytest.raises(TimeoutError):
        await early
    assert not late.done()
    with pytest.raises(TimeoutError):
        await late
    assert loop.time() - begun > 0.35
    assert await done == "kept"


def test_a_loop_that_ended_leaves_nothing_to_the_next() -> None:
    deadlines = Deadlines(0.1)

    async def watch() -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        deadlines.watch(future)
        return future

    async def fail() -> None:
        with pytest.raises(TimeoutError):
            await (await watch())

    left = asyncio.run(watch())
    asyncio.run(fail())
    assert not left.done()


@pytest.mark.parametrize(("has_room", "kind"), [(True, JournalUnavailable), (False, JournalFull)])
def test_all_who_wait_for_an_opening_hear_of_it_but_who_left(
    has_room: bool, kind: type[Exception]
) -> None:
    asyncio.run(_hear(has_room, kind))


async def _hear(has_room: bool, kind: type[Exception]) -> None:
    pending = PendingOpen(lambda: has_room)
    tasks = [asyncio.create_task(pending.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    assert tasks[0].cancelled() and not pending.is_decided
    pending.set_exception(OSError("disk"))
    assert pending.is_decided and pending.has_failed
    for task in tasks[1:]:
        with pytest.raises(kind):
            await task
    with pytest.raises(kind):
        await pending.wait()
