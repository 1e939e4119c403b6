"""Work of one scope runs one piece after another, beside that of other scopes."""

import asyncio
import gc
import threading
from contextlib import suppress

import pytest

from engine.backends.looped import ScopeThreads

SECONDS = 60


def nothing() -> None:
    """No thread has anything to begin with."""


def test_a_scope_with_much_work_leaves_a_thread_to_others() -> None:
    async def run() -> None:
        threads, goes_on = ScopeThreads(2, "t", nothing), threading.Event()
        many = [
            asyncio.create_task(threads.run("many", lambda: goes_on.wait(SECONDS)))
            for _ in range(8)
        ]
        await asyncio.sleep(0)
        async with asyncio.timeout(SECONDS):
            assert await threads.run("few", lambda: "done") == "done"
        assert not any(task.done() for task in many)
        goes_on.set()
        assert await asyncio.gather(*many) == [True] * 8
        await asyncio.sleep(0)
        gc.collect()
        assert not threads._locks
        threads.close()

    asyncio.run(run())


def test_work_whose_client_left_keeps_its_turn_until_it_ends() -> None:
    async def run() -> None:
        threads, goes_on = ScopeThreads(2, "t", nothing), threading.Event()
        has_begun, order = threading.Event(), list[str]()

        def first() -> None:
            has_begun.set()
            goes_on.wait(SECONDS)
            order.append("first")

        left = asyncio.create_task(threads.run("s", first))
        waits = asyncio.create_task(threads.run("s", lambda: order.append("never")))
        last = asyncio.create_task(threads.run("s", lambda: order.append("last")))
        await asyncio.to_thread(has_begun.wait, SECONDS)
        for task in (left, waits):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await threads.run("another", nothing)
        assert not order and not last.done()
        goes_on.set()
        await asyncio.wait_for(last, SECONDS)
        assert order == ["first", "last"]
        await asyncio.sleep(0)
        gc.collect()
        assert not threads._locks
        threads.close()

    asyncio.run(run())


def test_an_error_is_the_callers_and_frees_the_turn() -> None:
    async def run() -> None:
        threads = ScopeThreads(1, "t", nothing)

        def fails() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await threads.run("s", fails)
        assert await threads.run("s", lambda: 1) == 1
        threads.close()
        with pytest.raises(RuntimeError):
            await threads.run("s", lambda: 1)

    asyncio.run(run())
