"""Limits that workers share: their parent counts them, over links as workers have them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from gateway.base.bounds import LoadBounds
from gateway.base.errors import EngineFailed, Overloaded, RateLimited, SpendLimitReached
from gateway.base.grants import NO_LIMITS, Limits
from gateway.base.link import Link
from gateway.base.record import TurnRecord
from gateway.limits.admission import Admission, AdmittedTurn
from gateway.limits.counting import Counting
from gateway.limits.desk import Seat
from gateway.limits.shared import SharedAdmission, SharedCounting
from gateway.prompt.ask import Principal

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


@dataclass
class Worker:
    """A worker's end of a link, and the seat that its parent has for it."""

    link: Link
    seat: Seat
    admission: SharedAdmission
    counting: SharedCounting
    parents: Link

    async def die(self) -> None:
        self.link.close()
        await until(lambda: not self.parents.is_open)
        self.seat.lost()


@dataclass
class House:
    """A parent whose clock stands still until a test moves it."""

    limits: Limits = NO_LIMITS
    seconds: float = 0.0
    admission: Admission = field(init=False)
    counting: Counting = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(lambda: self.seconds, lambda: NOON)
        self.counting = Counting(LoadBounds(count_concurrency=2), lambda: self.seconds)

    @property
    def principal(self) -> Principal:
        return Principal("w", "k", "s", limits=self.limits)

    @asynccontextmanager
    async def worker(self, before: Seat | None = None) -> AsyncIterator[Worker]:
        ours, theirs = socket.socketpair()
        seat = Seat(self.admission, self.counting, lambda _: self.limits, before)
        parents = await Link.over(ours, seat.handlers)
        link = await Link.over(theirs, {})
        worker = Worker(link, seat, SharedAdmission(link, 2), SharedCounting(link), parents)
        try:
            yield worker
        finally:
            link.close()
            parents.close()
            await asyncio.sleep(0.01)

    async def begin(
        self, worker: Worker, turn_id: str, estimate: int = 1
    ) -> AbstractContextManager[AdmittedTurn]:
        return await worker.admission.admit(turn_id, self.principal, estimate, 0)


def record(turn_id: str, tokens: int = 0, cost: int = 0) -> TurnRecord:
    return TurnRecord(
        id=turn_id,
        instance="i",
        workspace="w",
        key_id="k",
        model="m",
        stream=False,
        opened_at=NOON,
        input_tokens=tokens,
        cost=cost,
    )


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0)


def test_places_are_counted_over_workers() -> None:
    async def run() -> None:
        house = House(Limits(max_concurrency=2))
        async with house.worker() as one, house.worker() as other:
            with await house.begin(one, "a"), await house.begin(other, "b"):
                for worker in (one, other):
                    with pytest.raises(RateLimited):
                        await house.begin(worker, "c")
            with await house.begin(one, "d"), await house.begin(other, "e"):
                assert one.admission.in_flight == other.admission.in_flight == 1

    asyncio.run(run())


def test_requests_of_a_minute_are_counted_over_workers_and_told_to_the_one_that_asks() -> None:
    async def run() -> None:
        house = House(Limits(requests_per_minute=3))
        async with house.worker() as one, house.worker() as other:
            for number, worker in enumerate((one, other, one)):
                with await house.begin(worker, f"t{number}"):
                    pass
            with pytest.raises(RateLimited, match="limit of 3 requests per minute") as refused:
                await house.begin(other, "t3")
            assert refused.value.retry_after == 20
            left = other.admission.rates(house.principal).requests
            assert left is not None and (left.limit, left.remaining) == (3, 0)
            house.seconds += 20
            with await house.begin(other, "t4"):
                pass

    asyncio.run(run())


def test_tokens_that_one_worker_counted_are_missing_at_the_other() -> None:
    async def run() -> None:
        house = House(Limits(tokens_per_minute=100))
        async with house.worker() as one, house.worker() as other:
            with await house.begin(one, "a", 10) as place:
                place.is_open = True
                one.admission.count_used(record("a", tokens=100))
                await one.admission.settled("a")
            with pytest.raises(RateLimited, match="tokens per minute"):
                await house.begin(other, "b", 10)

    asyncio.run(run())


def test_money_that_one_worker_spent_stops_the_other() -> None:
    async def run() -> None:
        house = House(Limits(monthly_spend=10))
        async with house.worker() as one, house.worker() as other:
            with await house.begin(one, "a") as place:
                place.is_open = True
                one.admission.count_used(record("a", cost=10))
                await one.admission.settled("a")
            with pytest.raises(SpendLimitReached):
                await house.begin(other, "b")

    asyncio.run(run())


def test_a_turn_of_a_workspace_without_limits_waits_for_nobody_and_counts_later() -> None:
    async def run() -> None:
        house = House()
        async with house.worker() as one, house.worker() as other:
            begun = house.begin(one, "a")
            with pytest.raises(StopIteration) as ended:
                begun.send(None)  # it never suspends
            with ended.value.value:
                house.limits = Limits(max_concurrency=1)
                await until(lambda: house.admission.in_flight > 0)
                with pytest.raises(RateLimited):
                    await house.begin(other, "b")

    asyncio.run(run())


def test_a_turn_that_is_settled_holds_no_place_when_its_client_has_the_answer() -> None:
    async def run() -> None:
        house = House(Limits(max_concurrency=1))
        async with house.worker() as one, house.worker() as other:
            with await house.begin(one, "answered") as place:
                place.is_open = True
                one.admission.count_used(record("answered"))
                await one.admission.settled("answered")
                with await house.begin(other, "next"):
                    assert house.admission.in_flight == 1
                await other.admission.settled("next")
            with pytest.raises(EngineFailed), await house.begin(one, "failed"):
                raise EngineFailed
            await one.admission.settled("failed")
            assert house.admission.in_flight == 0
            with await house.begin(other, "last"):
                pass

    asyncio.run(run())


def test_a_turn_of_a_worker_that_knows_no_limit_yet_is_counted_and_not_refused() -> None:
    async def run() -> None:
        house = House()
        unlimited = house.principal
        house.limits = Limits(max_concurrency=1, tokens_per_minute=100, requests_per_minute=10)
        async with house.worker() as late, house.worker() as other:
            with ExitStack() as stack:
                for turn_id in ("a", "b"):
                    begun = await late.admission.admit(turn_id, unlimited, 30, 0)
                    stack.enter_context(begun).is_open = True
                    late.admission.count_used(record(turn_id, tokens=60))
                await until(lambda: house.admission.in_flight == 2)
                with pytest.raises(RateLimited, match="concurrent"):
                    await house.begin(other, "c")
            await until(lambda: house.admission.in_flight == 0)
            with pytest.raises(RateLimited, match="tokens per minute"):
                await house.begin(other, "d")
            left = other.admission.rates(house.principal).requests
            assert left is not None and left.remaining == 8

    asyncio.run(run())


def test_a_client_that_leaves_while_its_place_is_asked_for_keeps_none() -> None:
    async def run() -> None:
        house = House(Limits(max_concurrency=1, tokens_per_minute=10))
        async with house.worker() as one:
            asking = asyncio.create_task(house.begin(one, "a", 10))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            with await house.begin(one, "b", 10):
                assert house.admission.in_flight == 1

    asyncio.run(run())


def test_a_dead_worker_holds_no_place_and_its_open_turns_count_when_they_are_closed() -> None:
    async def run() -> None:
        house = House(Limits(max_concurrency=2, tokens_per_minute=100))
        async with house.worker() as dead:
            opened, lost = await house.begin(dead, "open", 40), await house.begin(dead, "lost", 40)
            opened.__enter__()
            lost.__enter__()
            with pytest.raises(RateLimited):
                await house.begin(dead, "third", 1)
            await dead.die()
        assert house.admission.in_flight == 0
        async with house.worker(dead.seat) as again:
            with pytest.raises(RateLimited, match="tokens"):
                await house.begin(again, "a", 40)  # both are still reserved
            again.seat.has_recovered({"open"})  # the other one is in no journal
            with await house.begin(again, "b", 40):
                pass
            again.admission.count_used(record("open", tokens=0))
            with await house.begin(again, "c", 60), await house.begin(again, "d", 1):
                pass

    asyncio.run(run())


def test_a_turn_that_was_charged_before_the_kill_and_again_behind_it_counts_once() -> None:
    async def run() -> None:
        house = House(Limits(monthly_spend=11))
        async with house.worker() as dead:
            with await house.begin(dead, "a") as place:
                place.is_open = True
                dead.admission.count_used(record("a", cost=10))
                await dead.admission.settled("a")
            await dead.die()
        async with house.worker(dead.seat) as again:
            again.seat.has_recovered({"a"})
            again.admission.count_used(record("a", cost=10))
            with await house.begin(again, "b"):
                pass

    asyncio.run(run())


def test_calls_of_count_tokens_are_counted_over_workers_and_end_with_their_worker() -> None:
    async def run() -> None:
        house = House()
        async with house.worker() as one, house.worker() as other:
            held = one.counting.admit("w", 10)
            await held.__aenter__()
            async with other.counting.admit("w", 10):
                with pytest.raises(RateLimited):
                    await other.counting.admit("w", 10).__aenter__()
            await one.die()
            async with other.counting.admit("w", 10), other.counting.admit("w", 10):
                pass
            await held.__aexit__(None, None, None)

    asyncio.run(run())


def test_a_call_of_count_tokens_holds_no_place_when_its_client_has_the_answer() -> None:
    async def run() -> None:
        house = House()
        async with house.worker() as one, house.worker() as other:
            async with other.counting.admit("w", 10):
                for _ in range(3):
                    async with one.counting.admit("w", 10):
                        pass
                    with house.counting.admitted("w", 10):
                        pass  # the parent knows it by now

    asyncio.run(run())


def test_a_worker_without_its_parent_refuses_turns_of_limited_workspaces() -> None:
    async def run() -> None:
        house = House(Limits(max_concurrency=2))
        async with house.worker() as one:
            await one.die()
            with pytest.raises(Overloaded):
                await house.begin(one, "a")

    asyncio.run(run())
