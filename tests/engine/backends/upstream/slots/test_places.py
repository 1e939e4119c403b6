"""A slot is one taker's alone, whoever waits for it."""

import asyncio

import pytest

from engine.backends.upstream.slots.places import Slot, SlotBook

pytestmark = pytest.mark.anyio


async def test_a_slot_that_is_to_be_erased_is_not_taken_beside_who_waited_for_it() -> None:
    """The eraser chose a slot and then waited behind a request, which got the same slot."""
    book = SlotBook(1)
    held = await book.take("scope", b"")
    request = asyncio.create_task(book.take("scope", b""))
    await asyncio.sleep(0)
    book.condemn(None, b"")
    book.give(held)
    # The request has been woken, and has not run yet.
    erasing = asyncio.create_task(book.take_condemned())
    slot = await request
    for _ in range(5):
        await asyncio.sleep(0)
    assert slot.is_busy and not erasing.done()
    book.give(slot)
    taken = await erasing
    assert taken is slot
    book.give(slot)


async def test_an_eraser_that_finds_nothing_to_erase_takes_no_place() -> None:
    book = SlotBook(2)
    assert await book.take_condemned() is None
    slots: list[Slot] = [await book.take("scope", b"") for _ in range(2)]
    assert len({slot.number for slot in slots}) == 2
