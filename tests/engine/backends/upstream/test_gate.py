"""Which slot an order gets."""

import random
import time

from engine.backends.upstream.gate import Place, Slots, common_length
from engine.cache.digests import pack

ONE, OTHER = [1, 2, 3, 4], [9, 8, 7]


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
