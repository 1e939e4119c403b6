"""What takes the journal too long fails, each at its own time, from one timer."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.journal.pending import Deadlines, PendingOpen

T = TypeVar("T")


class StandingLoop(asyncio.SelectorEventLoop):
    """Its time, in seconds, goes on only where a test moves it."""

    now = 0.0

    def time(self) -> float:
        return self.now

    async def move(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(3):
            await asyncio.sleep(0)


def run(work: Callable[[StandingLoop], Coroutine[Any, Any, T]]) -> T:
    loop = StandingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work(loop))


def test_each_work_fails_at_its_own_time_and_a_done_one_never() -> None:
    run(_fail_each)


async def _fail_each(loop: StandingLoop) -> None:
    deadlines = Deadlines(4.0)
    early, done, late = (loop.create_future() for _ in range(3))
    deadlines.watch(early)
    deadlines.watch(done)
    await loop.move(2.0)
    deadlines.watch(late)
    done.set_result("kept")
    await loop.move(1.9)
    assert not early.done()
    await loop.move(0.2)
    assert isinstance(early.exception(), TimeoutError) and not late.done()
    await loop.move(1.8)
    assert not late.done()
    await loop.move(0.2)
    assert isinstance(late.exception(), TimeoutError)
    assert await done == "kept"


def test_a_loop_that_ended_leaves_nothing_to_the_next() -> None:
    deadlines = Deadlines(0.1)

    async def watch(loop: StandingLoop) -> asyncio.Future[None]:
        future: asyncio.Future[None] = loop.create_future()
        deadlines.watch(future)
        return future

    async def fail(loop: StandingLoop) -> None:
        future = await watch(loop)
        await loop.move(0.2)
        assert isinstance(future.exception(), TimeoutError)

    left = run(watch)
    run(fail)
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
