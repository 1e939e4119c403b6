"""A slot is one taker's alone, whoever waits for it."""

import asyncio

import pytest

from engine.backends.upstream.slots.places import Slot, SlotBook

pytestmark = pytest.mark.anyio
PROMPT = b"abcd" * 8


async def test_a_slot_that_is_to_be_erased_goes_first_to_who_waited_for_it() -> None:
    """Who waits for a slot erases it. The eraser must not get it beside him."""
    book = SlotBook(1)
    first = await book.take("scope", b"")
    request = asyncio.create_task(book.take("scope", b""))
    await asyncio.sleep(0)
    book.condemn(None, b"")
    book.give(first)
    # The request has its slot, and has not run yet.
    assert book.take_condemned() is None
    slot = await request
    assert slot.is_condemned
    book.give(slot)
    assert book.take_condemned() is slot


async def test_an_eraser_that_finds_nothing_to_erase_takes_no_place() -> None:
    book = SlotBook(2)
    assert book.take_condemned() is None
    slots: list[Slot] = [await book.take("scope", b"") for _ in range(2)]
    assert len({slot.number for slot in slots}) == 2


async def test_a_slot_whose_answer_has_ended_is_waited_for_by_who_goes_on_from_it() -> None:
    """A client sends its next turn before `GET /slots` has shown the slot at rest."""
    book = SlotBook(2)
    slot = await book.take("scope", PROMPT)
    slot.scope = "scope"
    slot.content = PROMPT
    # As long as it answers it is not waited for.
    beside = await book.take("scope", PROMPT)
    assert beside is not slot
    book.give(beside)
    slot.is_leaving = True
    next_turn = asyncio.create_task(book.take("scope", PROMPT + PROMPT))
    foreign = await book.take("other", PROMPT)
    assert foreign is beside and not next_turn.done()
    book.give(slot)
    assert await next_turn is slot


@pytest.mark.parametrize("event", ["purge", "away"])
async def test_nobody_waits_for_a_slot_that_has_nothing_for_him_any_more(event: str) -> None:
    book = SlotBook(2)
    slot = await book.take("scope", PROMPT)
    slot.scope = "scope"
    slot.content = PROMPT
    slot.is_leaving = True
    next_turn = asyncio.create_task(book.take("scope", PROMPT))
    await asyncio.sleep(0)
    assert not next_turn.done()
    if event == "purge":
        book.condemn(None, b"")
    else:
        book.put_away(slot)
    assert await next_turn is not slot


async def test_who_leaves_while_waiting_takes_no_slot_with_him() -> None:
    """Before a slot is his, and in the same moment."""
    book = SlotBook(1)
    slot = await book.take("scope", b"")
    for is_given_first in (False, True):
        request = asyncio.create_task(book.take("scope", b""))
        await asyncio.sleep(0)
        if is_given_first:
            book.give(slot)
            request.cancel()
        else:
            request.cancel()
            book.give(slot)
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await asyncio.wait_for(book.take("scope", b""), 5) is slot
