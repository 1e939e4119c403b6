"""Which slot an order gets."""

from engine.backends.upstream.gate import Place, Slots

ONE, OTHER = [1, 2, 3, 4], [9, 8, 7]


def test_a_scope_goes_back_to_the_slot_that_has_most_of_its_prompt() -> None:
    slots = Slots(3)
    first, second = slots.take("a", ONE), slots.take("a", OTHER)
    assert first is not None and second is not None
    assert first.slot != second.slot and not (first.may_reuse or second.may_reuse)
    slots.give_back(first)
    slots.give_back(second)
    assert slots.take("a", [*OTHER, 6]) == Place(second.slot, True)
    assert slots.take("a", [*ONE, 5]) == Place(first.slot, True)


def test_what_another_scope_left_may_not_be_reused() -> None:
    slots = Slots(1)
    place = slots.take("a", ONE)
    assert place is not None
    slots.give_back(place)
    assert slots.take("b", ONE) == Place(0, False)


def test_the_slot_that_was_used_least_lately_is_given_away() -> None:
    slots = Slots(2)
    for scope in ("a", "b", "a"):
        place = slots.take(scope, ONE if scope == "a" else OTHER)
        assert place is not None
        slots.give_back(place)
    assert slots.take("c", ONE) == Place(1, False)


def test_while_all_are_busy_there_is_no_place() -> None:
    slots = Slots(1)
    assert slots.take("a", ONE) is not None
    assert (slots.take("a", ONE), slots.num_busy) == (None, 1)
