"""Whose prompt is prepared next, and what becomes of those that take long or are given up."""

import asyncio
from typing import Any

import pytest

from engine.backends.prepare.pool import PreparePool
from engine.backends.prepare.prepared import GENERATE, Answer, Kind, Ready, Refused
from engine.backends.prepare.process import WorkerProcess
from engine.errors import Overloaded, PromptTooLong, PublicRefusal, TooCostly
from engine.text.rendered import KnownDays

pytestmark = pytest.mark.anyio


class Bench:
    """A pool whose workers hold each body until `gates` lets its scope go.

    `log` has the scopes in the order of their turns.
    """

    def __init__(self, max_workers: int, max_waiting: int = 100, wait_seconds: float = 60) -> None:
        self.log: list[str] = []
        self.gates = {name: asyncio.Event() for name in ("a", "b", "c")}
        self.workers: list[Worker] = []
        self.are_started = True
        self.starts = asyncio.Event()
        self.starts.set()
        self.pool = PreparePool(
            self._new, max_workers=max_workers, max_waiting=max_waiting, wait_seconds=wait_seconds
        )

    def _new(self) -> "Worker":
        self.workers.append(Worker(self))
        return self.workers[-1]

    async def send(self, *requests: str) -> "list[asyncio.Task[Answer]]":
        """Each is a scope, and more; the loop runs until nothing moves."""
        tasks = [
            asyncio.ensure_future(self.pool.run(GENERATE, name.encode(), name[0]))
            for name in requests
        ]
        for _ in range(10):
            await asyncio.sleep(0)
        return tasks

    async def ask(self, name: str) -> Answer:
        self.open("b")
        return await asyncio.wait_for(self.pool.run(GENERATE, name.encode(), name[0]), 60)

    def open(self, scopes: str = "abc") -> None:
        for scope in scopes:
            self.gates[scope].set()


class Worker(WorkerProcess):
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.num_recovered = 0
        self.is_busy = False

    async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
        assert not self.is_busy, "two requests at once"
        scope, _, outcome = body.decode().partition(" ")
        self._bench.log.append(scope)
        if outcome == "costly":
            raise TooCostly("time")
        if outcome == "broken":
            raise OSError("too many open files")
        self.is_busy = True
        await self._bench.gates[scope].wait()
        self.is_busy = False
        return Ready()

    @property
    def has_started(self) -> bool:
        return self._bench.are_started

    async def ready(self) -> Any:
        """It is at once, or when the bench lets it start."""
        await self._bench.starts.wait()

    async def recover(self) -> None:
        self.num_recovered += 1
        self.is_busy = False

    async def close(self) -> None:
        """There is nothing to end."""


async def test_scopes_take_turns_whatever_one_of_them_has_waiting() -> None:
    bench = Bench(1)
    tasks = await bench.send(*"aaaaaabb")
    bench.open()
    await asyncio.gather(*tasks)
    assert bench.log == [*"aababaaa"]


async def test_one_scope_never_has_the_last_worker() -> None:
    bench = Bench(3)
    tasks = await bench.send(*"a" * 10)
    assert bench.log == ["a", "a"]
    await bench.ask("b")
    assert bench.log == ["a", "a", "b"]
    assert not any(task.done() for task in tasks)
    bench.open()
    await asyncio.gather(*tasks)
    assert len(bench.workers) == 3


async def test_nobody_waits_for_a_start_where_a_worker_is_free_before_it() -> None:
    """A machine that is busy starts a process in half a minute, and gateways wait 16 s."""
    bench = Bench(3)
    (first,) = await bench.send("a")
    bench.starts.clear()
    second, third = await bench.send("a", "a")
    assert (bench.log, len(bench.workers)) == (["a"], 2)
    bench.open("a")
    await asyncio.wait_for(asyncio.gather(first, second, third), 60)
    assert bench.log == ["a", "a", "a"]
    bench.gates["a"].clear()
    tasks = await bench.send("a", "a")
    assert bench.log == ["a"] * 4
    bench.starts.set()
    await bench.send()
    assert bench.log == ["a"] * 5, "the started one is there for the next"
    bench.open()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("outcome", ["broken", "costly", "held"])
async def test_a_worker_whose_request_failed_or_was_given_up_is_free_again(outcome: str) -> None:
    bench = Bench(1)
    first, second = await bench.send(f"a {outcome}", "b")
    first.cancel()
    await asyncio.wait([first])
    bench.open("b")
    await asyncio.wait_for(second, 60)
    assert len(bench.workers) == 1
    assert bench.workers[0].num_recovered == (outcome == "held")


async def test_a_request_that_is_given_up_while_it_waits_costs_no_worker() -> None:
    bench = Bench(1)
    first, second, third = await bench.send(*"abc")
    second.cancel()
    bench.open()
    await asyncio.gather(first, third)
    assert bench.log == ["a", "c"]
    assert second.cancelled()


async def test_a_request_that_is_cancelled_as_it_gets_its_worker_gives_it_back() -> None:
    bench = Bench(1)
    first, second, third = await bench.send(*"abc")
    bench.open("a")
    await first
    second.cancel()  # it has been granted the worker, and has not run since
    bench.open("c")
    await asyncio.wait_for(third, 180)


async def test_a_scope_has_a_bound_of_what_waits_and_others_are_not_under_it() -> None:
    bench = Bench(1, 2)
    tasks = await bench.send(*"aaa")
    with pytest.raises(Overloaded):
        await bench.ask("a")
    tasks += await bench.send("b")
    bench.open()
    await asyncio.gather(*tasks)


async def test_who_waits_too_long_is_refused_as_overloaded() -> None:
    bench = Bench(1, 10, 0.05)
    (tasks,) = await bench.send("a")
    with pytest.raises(Overloaded):
        await bench.ask("b")
    bench.open("a")
    await tasks
    await bench.ask("b")


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (Refused(code="prompt_too_long", message="9 tokens > 8"), PromptTooLong),
        (Refused(code="invalid_request", message="tools[0]", is_public=True), PublicRefusal),
        (Refused(code="too_costly", message="memory"), TooCostly),
    ],
)
async def test_a_workers_refusal_is_the_error_it_was(refused: Refused, kind: type) -> None:
    class Refusing(Worker):
        async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
            return refused

    pool = PreparePool(lambda: Refusing(Bench(1)), max_workers=1, max_waiting=1, wait_seconds=1)
    with pytest.raises(kind) as error:
        await pool.run(GENERATE, b"{}", "a")
    assert (str(error.value), error.value.is_public) == (refused.message, refused.is_public)
