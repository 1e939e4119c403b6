"""Workers share one queue, one set of windows, and what they know of engines, over real links."""

import asyncio
import random
from itertools import count

import pytest

from engine.protocol import InputUsage, Receipt, Started
from gateway.base.errors import Overloaded
from gateway.routing.breaker import FAILURES, FIRST_PAUSE_SECONDS
from gateway.turn.room import OwnRoom, Room, make_room
from tests.gateway.turn.shared_house import ENDS, NAMES, PLACES, House, cancel, until


def test_two_workers_let_in_as_many_turns_as_one_process() -> None:
    async def run() -> None:
        house = House()
        async with house.running() as workers:
            asked = [
                asyncio.create_task(house.turn(one.gate, one.engine, "w", f"{one.number}-{n}"))
                for n in range(10)
                for one in workers
            ]
            await until(lambda: len(house.gate._queue) == 2 * 10 - PLACES)
            await until(lambda: len(house.order) == PLACES)
            await until(lambda: house.fleet.engines[0].load.num_running == PLACES)
            assert len(house.gate._queue) == 2 * 10 - PLACES
            await cancel(asked)
            await until(lambda: not house.gate._queue)

    asyncio.run(run())


def test_the_order_over_two_workers_is_that_of_one_process() -> None:
    """A flood comes by the connections of both workers, and another workspace by one of them."""

    async def order(num_workers: int) -> list[str]:
        house, names = House(num_workers), count()
        async with house.running() as workers:
            tasks: list[asyncio.Task[None]] = []
            holders: list[tuple[int, str]] = []

            async def ask(index: int, workspace: str) -> None:
                worker, name = workers[index], str(next(names))
                begun = len(house.order) + len(house.gate._queue)

                async def turn() -> None:
                    await house.turn(worker.gate, worker.engine, workspace, name)
                    holders.append((index, name))

                tasks.append(asyncio.create_task(turn()))
                await until(lambda: len(house.order) + len(house.gate._queue) == begun + 1)

            for number in range(16):
                await ask(number % num_workers, "flood")
            for _ in range(4):
                await ask(num_workers - 1, "few")
            while holders:
                index, name = holders.pop(0)
                let_in = len(house.order)
                is_awaited = bool(house.gate._queue)
                house.end(workers[index], name)
                if is_awaited:
                    await until(lambda: len(house.order) == let_in + 1)  # noqa: B023
                    await until(lambda: bool(holders))
            await asyncio.gather(*tasks)
            return house.order

    alone, shared = asyncio.run(order(1)), asyncio.run(order(2))
    assert shared == alone
    assert shared[PLACES:].index("few") <= 1, shared
    last = max(index for index, workspace in enumerate(shared) if workspace == "few")
    assert last <= PLACES + 8, shared


def test_a_turn_that_meets_nobody_asks_nobody() -> None:
    async def run() -> None:
        house = House()
        async with house.running() as (one, _):
            begun = one.gate.enter(house.asked("w"))  # type: ignore[arg-type]
            with pytest.raises(StopIteration) as ended:
                begun.send(None)  # it never suspends
            with ended.value.value:
                await until(lambda: house.gate._passing.num == 1)
            await until(lambda: house.gate._passing.num == 0)

    asyncio.run(run())


def test_workers_that_look_at_the_same_room_never_take_more_than_there_is() -> None:
    """The parent counts what they took at some later time; meanwhile turns end."""
    draw = random.Random(1)
    num_taken = 0
    for _ in range(300):
        num_workers, most, most_tokens = draw.randint(2, 4), draw.randint(0, 12), 1000
        room = Room(make_room(num_workers), num_workers)
        own = [OwnRoom(room, number + 1) for number in range(num_workers)]
        running: list[int] = []
        counted = [0] * num_workers
        for _ in range(60):
            index = draw.randrange(num_workers)
            if draw.random() < 0.8:
                tokens = draw.randint(0, 300)
                if own[index].take(tokens):
                    running.append(tokens)
                    counted[index] += 1
                    num_taken += 1
            else:
                running = draw.sample(running, draw.randint(0, len(running)))
                room.tell(most - len(running), most_tokens - sum(running), counted)
            assert len(running) <= most and sum(running) <= most_tokens
    assert num_taken > 1000


def test_a_client_that_leaves_while_it_waits_leaves_nothing() -> None:
    async def run() -> None:
        house = House()
        async with house.running() as (one, other):
            for number in range(PLACES):
                await house.turn(one.gate, one.engine, "w", str(number))
            waiting = asyncio.create_task(house.turn(other.gate, other.engine, "w", "waits"))
            await until(lambda: len(house.gate._queue) == 1)
            await cancel([waiting])
            await until(lambda: not house.gate._queue)
            assert not other.link._waiting and not other.seat._waiting
            house.end(one, "0")
            await house.turn(other.gate, other.engine, "w", "next")
            assert house.gate._passing.num <= 1

    asyncio.run(run())


def test_a_turn_that_no_engine_takes_in_time_is_refused_with_a_time_to_come_again() -> None:
    async def run() -> None:
        house = House(wait_seconds=0.0)
        async with house.running() as (one, other):
            for number in range(PLACES):
                await house.turn(one.gate, one.engine, "w", str(number))
            with pytest.raises(Overloaded) as refused:
                await house.turn(other.gate, other.engine, "w", "late")
            assert 1 <= refused.value.retry_after <= 60

    asyncio.run(run())


def test_a_window_that_one_worker_narrowed_holds_turns_at_the_other() -> None:
    async def run() -> None:
        house = House()
        async with house.running() as (one, other):
            await house.turn(other.gate, other.engine, "neighbour", "n")
            left = [await one.gate.enter(house.asked("w")) for _ in range(2)]  # type: ignore[arg-type]
            for passing in left:
                assert passing.unanswered is not None
                with passing:
                    passing.unanswered.abandoned()
            await until(lambda: house.gate._windows.num_bounded == 1)
            for passing in left:
                assert passing.unanswered is not None
                passing.unanswered.ended()
            await until(lambda: house.gate._windows._accounts["w"].num == 0)
            first = await other.gate.enter(house.asked("w"))  # type: ignore[arg-type]
            held = asyncio.create_task(house.turn(one.gate, one.engine, "w", "held"))
            await until(lambda: len(house.gate._queue) == 1)
            assert first.unanswered is not None
            with first:
                first.unanswered.answered()
            await held

    asyncio.run(run())


def test_what_runs_at_one_worker_is_load_and_holdings_at_the_other_until_it_ends() -> None:
    async def run() -> None:
        house = House()
        async with house.running() as (one, other):
            await house.turn(one.gate, one.engine, "w", "t")
            load = other.engine.load
            await until(lambda: load.num_running == 1)
            assert load.num_waiting_tokens == 10 and load.has_unanswered("w")
            assert other.engine.holdings.coverage(ENDS, house.seconds).held == ENDS[-1].size
            one.engine.left("t", ENDS, has_started=False)
            await until(lambda: load.num_running == 0)
            assert load.num_waiting_tokens == 0
            assert other.engine.holdings.coverage(ENDS, house.seconds).held == 0
            assert not one.seat.running.told()

    asyncio.run(run())


def test_a_dead_workers_turns_are_over_at_the_parent_and_at_the_others() -> None:
    async def run() -> None:
        house = House()
        async with house.running() as (dead, other):
            for number in range(PLACES):
                await house.turn(dead.gate, dead.engine, "w", str(number))
            its = asyncio.create_task(house.turn(dead.gate, dead.engine, "w", "its"))
            waiting = asyncio.create_task(house.turn(other.gate, other.engine, "w", "waits"))
            await until(lambda: len(house.gate._queue) == 2)
            await dead.die()
            await waiting
            with pytest.raises(Overloaded):
                await its
            assert [one.turn for one in other.seat.running.told()] in ([], ["waits"])
            await until(lambda: other.engine.load.num_running == 1)
            await until(lambda: house.fleet.engines[0].load.num_running == 1)
            assert not house.gate._queue

    asyncio.run(run())


def test_an_engine_without_events_is_learned_from_answers_of_both() -> None:
    async def run() -> None:
        house = House()
        async with house.running() as (one, other):
            for worker in (one, other):
                worker.engine.learn()
            await house.turn(one.gate, one.engine, "w", "t")
            receipt = Receipt(name_tokens=[100, 200, 300], num_held=2)
            usage = InputUsage(input_tokens=300, computed_tokens=300)
            started = Started(
                request_id="t", epoch="e1", usage=usage, breakpoints=[], receipt=receipt
            )
            one.engine.started("t", started, NAMES)
            await until(lambda: len(other.engine.holdings) == 2)
            one.engine.left("t", ENDS, has_started=True)
            assert other.engine.holdings.coverage(ENDS, house.seconds + 3600).held == 200

    asyncio.run(run())


def test_turns_that_fail_at_any_worker_open_the_breaker_of_all() -> None:
    async def run() -> None:
        house = House()
        async with house.running() as (one, other):
            engines = [house.fleet.engines[0], one.engine, other.engine]
            for number in range(FAILURES):
                worker = (one, other)[number % 2]
                await house.turn(worker.gate, worker.engine, "w", str(number))
                worker.engine.broke(str(number))
                house.end(worker, str(number))
            await until(lambda: [each.breaker.num_opened for each in engines] == [1] * 3)
            assert {each.breaker.state(house.seconds) for each in engines} == {"open"}
            house.seconds += FIRST_PAUSE_SECONDS
            await house.turn(one.gate, one.engine, "w", "probe")
            await until(lambda: not other.engine.breaker.allows(house.seconds))
            one.engine.succeeded("probe")
            house.end(one, "probe")
            states = [("closed", 1)] * 3
            await until(lambda: [each.breaker.view(house.seconds) for each in engines] == states)

    asyncio.run(run())


def test_a_request_that_an_engine_refuses_is_an_answer_of_it_for_all_workers() -> None:
    async def run() -> None:
        house = House()
        async with house.running() as (one, other):
            for number in range(2 * FAILURES):
                await house.turn(one.gate, one.engine, "w", str(number))
                if number % 2:
                    one.engine.broke(str(number))
                else:
                    one.engine.succeeded(str(number))
                one.engine.returned(str(number))
                house.end(one, str(number))
            for engine in (house.fleet.engines[0], other.engine):
                await until(lambda: not engine.load.num_running)  # noqa: B023
                assert engine.breaker.view(house.seconds) == ("closed", 0)

    asyncio.run(run())
