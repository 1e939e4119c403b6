"""Whose prompt is prepared next, and what becomes of those that take long or are given up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.backends.prepare.pool import PreparePool
from engine.backends.prepare.prepared import GENERATE, Answer, Kind, Refused, Stopped
from engine.errors import Overloaded, PromptTooLong, SchemaRefused, TooCostly
from engine.text.rendered import KnownDays

pytestmark = pytest.mark.anyio


class Worker:
    """Holds each body until it is let go; `log` has the scopes in the order of their turns."""

    def __init__(self, log: list[str], gates: dict[str, asyncio.Event]) -> None:
        self._log = log
        self._gates = gates
        self.num_recovered = 0
        self.is_busy = False

    async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
        assert not self.is_busy, "two requests at once"
        self.is_busy = True
        self._log.append(body.decode().partition(" ")[0])
        if b"costly" in body:
            self.is_busy = False
            raise TooCostly("time")
        if b"broken" in body:
            self.is_busy = False
            raise OSError("too many open files")
        await self._gates[body.decode().partition(" ")[0]].wait()
        self.is_busy = False
        return Stopped()

    async def recover(self) -> None:
        self.num_recovered += 1
        self.is_busy = False

    async def close(self) -> None:
        """There is nothing to end."""


class Bench:
    def __init__(self, max_workers: int, max_waiting: int = 100, wait_seconds: float = 60) -> None:
        self.log: list[str] = []
        self.gates = {name: asyncio.Event() for name in ("a", "b", "c")}
        self.workers: list[Worker] = []
        self.pool = PreparePool(
            self._new, max_workers=max_workers, max_waiting=max_waiting, wait_seconds=wait_seconds
        )

    def _new(self) -> Worker:
        self.workers.append(Worker(self.log, self.gates))
        return self.workers[-1]

    def send(self, scope: str, more: str = "") -> "asyncio.Task[Answer]":
        return asyncio.ensure_future(self.pool.run(GENERATE, f"{scope} {more}".encode(), scope))

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@asynccontextmanager
async def bench(*given: float) -> AsyncIterator[Bench]:
    made = Bench(*given)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for gate in made.gates.values():
            gate.set()


async def test_scopes_take_turns_whatever_one_of_them_has_waiting() -> None:
    async with bench(1) as b:
        tasks = [b.send("a") for _ in range(6)] + [b.send("b") for _ in range(2)]
        await b.settle()
        for gate in b.gates.values():
            gate.set()
        await asyncio.gather(*tasks)
        assert b.log == ["a", "a", "b", "a", "b", "a", "a", "a"]


async def test_one_scope_never_has_the_last_worker() -> None:
    async with bench(3) as b:
        held = [b.send("a") for _ in range(10)]
        await b.settle()
        assert b.log == ["a", "a"]
        b.gates["b"].set()
        await b.send("b")
        assert b.log == ["a", "a", "b"] and b.pool.num_waiting == 8
        b.gates["a"].set()
        await asyncio.gather(*held)
        assert len(b.workers) == 3


async def test_a_worker_that_fails_in_a_way_that_nobody_expects_is_free_again() -> None:
    async with bench(1) as b:
        b.gates["b"].set()
        for more in ("broken", "held"):
            task = b.send("a", more)
            await b.settle()
            task.cancel()
            await asyncio.wait([task])
            await asyncio.wait_for(b.send("b"), 60)
        assert len(b.workers) == 1


async def test_a_request_that_is_given_up_while_it_waits_costs_no_worker() -> None:
    async with bench(1) as b:
        first, second, third = b.send("a"), b.send("b"), b.send("c")
        await b.settle()
        second.cancel()
        b.gates["a"].set()
        b.gates["c"].set()
        await asyncio.gather(first, third)
        assert b.log == ["a", "c"] and b.pool.num_waiting == 0
        assert second.cancelled()


async def test_a_request_that_is_given_up_at_work_frees_its_worker_for_the_next() -> None:
    async with bench(1) as b:
        first, second = b.send("a"), b.send("b")
        await b.settle()
        first.cancel()
        b.gates["b"].set()
        await second
        assert first.cancelled() and b.workers[0].num_recovered == 1


async def test_a_request_that_is_cancelled_as_it_gets_its_worker_gives_it_back() -> None:
    async with bench(1) as b:
        first, second, third = b.send("a"), b.send("b"), b.send("c")
        await b.settle()
        b.gates["a"].set()
        await first
        second.cancel()  # it has been granted the worker, and has not run since
        b.gates["c"].set()
        await asyncio.wait_for(third, 180)


async def test_a_scope_has_a_bound_of_what_waits_and_others_are_not_under_it() -> None:
    async with bench(1, 2) as b:
        held = [b.send("a") for _ in range(3)]
        await b.settle()
        with pytest.raises(Overloaded):
            await b.send("a")
        other = b.send("b")
        await b.settle()
        assert b.pool.num_waiting == 3
        for gate in b.gates.values():
            gate.set()
        await asyncio.gather(*held, other)


async def test_who_waits_too_long_is_refused_as_overloaded() -> None:
    async with bench(1, 10, 0.05) as b:
        held = b.send("a")
        await b.settle()
        with pytest.raises(Overloaded):
            await b.send("b")
        b.gates["a"].set()
        await held
        b.gates["b"].set()
        await b.send("b")


async def test_a_request_that_is_too_costly_leaves_its_worker_to_the_next() -> None:
    async with bench(1) as b:
        with pytest.raises(TooCostly):
            await b.send("a", "costly")
        b.gates["b"].set()
        await b.send("b")


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (Refused(code="prompt_too_long", message="9 tokens > 8"), PromptTooLong),
        (Refused(code="invalid_request", message="tools[0]", is_public=True), SchemaRefused),
        (Refused(code="too_costly", message="memory"), TooCostly),
    ],
)
async def test_a_workers_refusal_is_the_error_it_was(refused: Refused, kind: type) -> None:
    class Refusing(Worker):
        async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
            return refused

    pool = PreparePool(lambda: Refusing([], {}), max_workers=1, max_waiting=1, wait_seconds=1)
    with pytest.raises(kind) as error:
        await pool.run(GENERATE, b"{}", "a")
    assert (str(error.value), error.value.is_public) == (refused.message, refused.is_public)
