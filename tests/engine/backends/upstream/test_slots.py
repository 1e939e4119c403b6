"""Who is sent to the server next, and into which slot: no place is lost or given twice."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable

from engine.backends.upstream.slots import Place, Places, Slots, common_length
from engine.cache.digests import pack
from engine.schedule.request import SequenceState
from tests.engine.schedule.harness import Harness

ONE, OTHER = [1, 2, 3, 4], [9, 8, 7]


class Waiters:
    """Choices at the places of a server; each keeps its place until it is let go."""

    def __init__(self, num_places: int) -> None:
        self.places = Places(num_places)
        self.order: list[str] = []
        self._harness = Harness(max_waiting=10_000, num_blocks=512)
        self._numbers = itertools.count()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    def come(self, scope: str, length: int = 10) -> str:
        """A request comes; its name is its scope and a number."""
        number = next(self._numbers)
        name = f"{scope}{number}"
        prompt = list(range(1000 * number, 1000 * number + length))
        sequence = self._harness.send(prompt, scope=scope).state.leader
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._hold(name, sequence))
        return name

    async def _hold(self, name: str, sequence: SequenceState) -> None:
        async with self.places.taken(sequence):
            self.order.append(name)
            await self._ends[name].wait()

    def let_go(self, name: str) -> None:
        self._ends[name].set()

    def cancel(self, name: str) -> None:
        self._tasks[name].cancel()

    async def let_all_go(self) -> None:
        """One after another, in the order in which they got their places."""
        for number in itertools.count():
            await settle()
            if number == len(self.order):
                break
            self.let_go(self.order[number])
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        assert self.places.num_taken == 0

    async def check_all_free(self, num_places: int) -> None:
        """All places can be taken again, and no more than those."""
        before = len(self.order)
        for _ in range(num_places + 1):
            self.come("z")
        await settle()
        assert len(self.order) - before == num_places
        await self.let_all_go()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def on_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(run())


def scopes(names: list[str]) -> str:
    return "".join(name[0] for name in names)


def test_a_scope_with_many_requests_lets_anothers_go_next() -> None:
    async def scenario() -> None:
        waiters = Waiters(1)
        for _ in range(6):
            waiters.come("a")
        await settle()
        waiters.come("b")
        await waiters.let_all_go()
        assert scopes(waiters.order) == "ab" + "a" * 5

    on_loop(scenario)


def test_turns_are_counted_in_tokens() -> None:
    async def scenario() -> None:
        waiters = Waiters(1)
        for _ in range(3):
            waiters.come("a", length=50)
        for _ in range(10):
            waiters.come("b", length=10)
        await waiters.let_all_go()
        long = [at for at, name in enumerate(waiters.order) if name[0] == "a"]
        between = scopes(waiters.order[long[1] + 1 : long[2]])
        assert between in ("bbbb", "bbbbb"), "short ones against one that is five times longer"

    on_loop(scenario)


def test_a_place_that_is_given_back_is_not_taken_by_one_that_comes_then() -> None:
    async def scenario() -> None:
        waiters = Waiters(1)
        first = waiters.come("a")
        await settle()
        waits = waiters.come("b")
        await settle()
        waiters.let_go(first)
        # The holder runs next and gives the place back; this one's task comes right behind it.
        late = waiters.come("c")
        await settle()
        assert waiters.order == [first, waits]
        waiters.let_go(waits)
        await settle()
        assert waiters.order == [first, waits, late]
        await waiters.let_all_go()

    on_loop(scenario)


def test_one_that_is_cancelled_in_the_moment_of_its_place_gives_it_on() -> None:
    async def scenario() -> None:
        waiters = Waiters(1)
        first = waiters.come("a")
        await settle()
        gone, stays = waiters.come("b"), waiters.come("b")
        await settle()
        waiters.let_go(first)
        await asyncio.sleep(0)  # the place is granted, and its task has not run yet
        assert waiters.places.num_taken == 0 and waiters.order == [first]
        waiters.cancel(gone)
        await settle()
        assert waiters.order == [first, stays]
        await waiters.let_all_go()
        await waiters.check_all_free(1)

    on_loop(scenario)


def test_no_place_is_lost_or_given_twice_however_requests_come_and_leave() -> None:
    async def scenario() -> None:
        for seed in range(40):
            draw = random.Random(seed)
            num_places = draw.randrange(1, 4)
            waiters, names = Waiters(num_places), list[str]()
            for _ in range(60):
                act = draw.random()
                if act < 0.45 or not names:
                    names.append(waiters.come(draw.choice("abc"), draw.randrange(1, 30)))
                elif act < 0.7:
                    waiters.cancel(draw.choice(names))
                else:
                    waiters.let_go(draw.choice(names))
                for _ in range(draw.randrange(3)):
                    await asyncio.sleep(0)
                assert 0 <= waiters.places.num_taken <= num_places
            for name in names:
                waiters.let_go(name)
            await waiters.let_all_go()
            await waiters.check_all_free(num_places)

    on_loop(scenario)


def test_a_scope_goes_back_to_the_slot_that_has_most_of_its_prompt() -> None:
    slots = Slots(3)
    first, second = slots.take("a", pack(ONE)), slots.take("a", pack(OTHER))
    assert first is not None and second is not None
    assert first.slot != second.slot and not (first.may_reuse or second.may_reuse)
    slots.give_back(first)
    slots.give_back(second)
    assert slots.take("a", pack([*OTHER, 6])) == Place(second.slot, True)
    assert slots.take("a", pack([*ONE, 5])) == Place(first.slot, True)


def test_what_another_scope_left_may_not_be_reused() -> None:
    slots = Slots(1)
    place = slots.take("a", pack(ONE))
    assert place is not None
    slots.give_back(place)
    assert slots.take("b", pack(ONE)) == Place(0, False)


def test_the_slot_that_was_used_least_lately_is_given_away() -> None:
    slots = Slots(2)
    for scope in ("a", "b", "a"):
        place = slots.take(scope, pack(ONE if scope == "a" else OTHER))
        assert place is not None
        slots.give_back(place)
    assert slots.take("c", pack(ONE)) == Place(1, False)


def test_while_all_are_busy_there_is_no_place() -> None:
    slots = Slots(1)
    place = slots.take("a", pack(ONE))
    assert place is not None and slots.take("a", pack(ONE)) is None
    slots.give_back(place)
    assert slots.take("a", pack(ONE)) == Place(0, True)


def test_prompts_begin_alike_up_to_the_first_token_that_differs() -> None:
    rng = random.Random(5)
    for _ in range(300):
        one = [rng.randrange(3) for _ in range(rng.randrange(12))]
        other = [rng.randrange(3) for _ in range(rng.randrange(12))]
        pairs = list(zip(one, other, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        assert common_length(pack(one), pack(other)) == same


def test_long_prompts_in_many_slots_do_not_hold_the_loop() -> None:
    """A hundred slots with a prompt of 100,000 tokens: seconds where tokens are compared singly."""
    slots, prompt = Slots(100), pack(range(100_000))
    places = [slots.take("a", prompt) for _ in range(100)]
    for place in places:
        assert place is not None
        slots.give_back(place)
    began = time.process_time()
    assert slots.take("a", prompt) is not None
    assert time.process_time() - began < 0.2
