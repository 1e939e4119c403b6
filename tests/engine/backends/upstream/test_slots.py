"""Into which slot a request goes, and when: no place is lost or given twice."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest

from engine.backends.upstream.server import Place, Slots
from engine.cache.digests import TOKEN_BYTES, pack
from engine.text.template.boundaries import common_length

ONE, OTHER = [1, 2, 3, 4], [9, 8, 7]


def on_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(run())


async def used(slots: Slots, scope: str, tokens: list[int]) -> Place:
    async with slots.taken(scope, pack(tokens)) as place:
        return place


def test_requests_get_places_in_their_order_and_leave_none_behind() -> None:
    async def scenario() -> None:
        for seed in range(40):
            draw = random.Random(seed)
            slots, order = Slots(draw.randrange(1, 4)), list[int]()
            ends = [asyncio.Event() for _ in range(30)]

            async def hold(
                number: int, slots: Slots = slots, ends: list[asyncio.Event] = ends
            ) -> None:
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

    on_loop(scenario)


def test_while_all_are_busy_a_request_waits() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        async with slots.taken("a", pack(ONE)):
            assert slots.num_taken == 1
            with suppress(TimeoutError):
                await asyncio.wait_for(used(slots, "a", ONE), 0.05)
                pytest.fail("it got a place")
        assert await used(slots, "a", ONE) == Place(0, True)

    on_loop(scenario)


def test_a_scope_goes_back_to_the_slot_that_has_most_of_its_prompt() -> None:
    async def scenario() -> None:
        slots = Slots(3)
        async with slots.taken("a", pack(ONE)) as first, slots.taken("a", pack(OTHER)) as second:
            assert first.slot != second.slot and not (first.may_reuse or second.may_reuse)
        assert await used(slots, "a", [*OTHER, 6]) == Place(second.slot, True)
        assert await used(slots, "a", [*ONE, 5]) == Place(first.slot, True)

    on_loop(scenario)


def test_what_another_scope_left_may_not_be_reused() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        await used(slots, "a", ONE)
        assert await used(slots, "b", ONE) == Place(0, False)

    on_loop(scenario)


def test_the_slot_that_was_used_least_lately_is_given_away() -> None:
    async def scenario() -> None:
        slots = Slots(2)
        for scope in ("a", "b", "a"):
            await used(slots, scope, ONE if scope == "a" else OTHER)
        assert await used(slots, "c", ONE) == Place(1, False)

    on_loop(scenario)


def test_prompts_begin_alike_up_to_the_first_token_that_differs() -> None:
    rng = random.Random(5)
    for _ in range(300):
        one = [rng.randrange(3) for _ in range(rng.randrange(12))]
        other = [rng.randrange(3) for _ in range(rng.randrange(12))]
        pairs = list(zip(one, other, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        assert common_length(pack(one), pack(other), TOKEN_BYTES) == same


def test_long_prompts_in_many_slots_do_not_hold_the_loop() -> None:
    """A hundred slots with a prompt of 100,000 tokens: seconds where tokens are compared singly."""

    async def scenario() -> None:
        slots, prompt = Slots(100), pack(range(100_000))
        async with AsyncExitStack() as taken:
            for _ in range(100):
                await taken.enter_async_context(slots.taken("a", prompt))
        began = time.process_time()
        async with slots.taken("a", prompt) as place:
            assert place.may_reuse
        assert time.process_time() - began < 0.2

    on_loop(scenario)
