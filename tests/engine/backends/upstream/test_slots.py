"""Into which slot a request goes, and when: no place is lost or given twice."""

import asyncio
import random
import time
from contextlib import AsyncExitStack

import pytest

from engine.backends.upstream.server import Place, Slots
from engine.cache.digests import pack

pytestmark = pytest.mark.anyio
ONE = [1, 2, 3, 4]
OTHER = [9, 8, 7]


async def used(slots: Slots, scope: str, tokens: list[int]) -> Place:
    async with slots.taken(scope, pack(tokens)) as place:
        return place


async def test_requests_get_places_in_their_order_and_leave_none_behind() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        slots = Slots(draw.randrange(1, 4))
        order = list[int]()
        ends = [asyncio.Event() for _ in range(30)]

        async def hold(number: int, slots: Slots = slots, ends: list[asyncio.Event] = ends) -> None:
            async with slots.taken("a", pack(ONE)):
                order.append(number)  # noqa: B023 - the task ends within this round
                await ends[number].wait()

        tasks = []
        for number in range(30):
            tasks.append(asyncio.create_task(hold(number)))
            if draw.random() < 0.3:
                draw.choice(tasks).cancel()
            if draw.random() < 0.3:
                ends[draw.randrange(number + 1)].set()
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
        for end in ends:
            end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == sorted(order) and slots.num_taken == 0


async def test_a_scope_goes_back_to_the_slot_that_has_most_of_its_prompt() -> None:
    slots = Slots(3)
    async with slots.taken("a", pack(ONE)) as first, slots.taken("a", pack(OTHER)) as second:
        assert first.slot != second.slot and not (first.may_reuse or second.may_reuse)
    assert await used(slots, "a", [*OTHER, 6]) == Place(second.slot, True)
    assert await used(slots, "a", [*ONE, 5]) == Place(first.slot, True)


async def test_the_slot_that_was_used_least_lately_is_given_away() -> None:
    slots = Slots(2)
    for scope in ("a", "b", "a"):
        await used(slots, scope, ONE if scope == "a" else OTHER)
    assert await used(slots, "c", ONE) == Place(1, False)


async def test_long_prompts_in_many_slots_do_not_hold_the_loop() -> None:
    """A hundred slots with a prompt of 100,000 tokens: seconds where tokens are compared singly."""
    slots = Slots(100)
    prompt = pack(range(100_000))
    async with AsyncExitStack() as taken:
        for _ in range(100):
            await taken.enter_async_context(slots.taken("a", prompt))
    began = time.process_time()
    async with slots.taken("a", prompt) as place:
        assert place.may_reuse
    assert time.process_time() - began < 0.2
