"""Kept answers: made once for all who ask, and by the next one where the first leaves."""

import asyncio

import pytest

from gateway.base.background import Kept

pytestmark = pytest.mark.anyio


class Maker:
    def __init__(self, *, may_end: bool = True) -> None:
        self.num_made = 0
        self.may_end = asyncio.Event()
        if may_end:
            self.may_end.set()

    async def make(self) -> int:
        self.num_made += 1
        number = self.num_made
        await self.may_end.wait()
        return number


async def test_one_answer_for_all_who_ask_at_once_until_it_is_old() -> None:
    kept, maker = Kept[int](60), Maker()
    asking = [asyncio.create_task(kept.get("a", 0, maker.make)) for _ in range(5)]
    assert await asyncio.gather(*asking) == [1] * 5
    assert [await kept.get("a", now, maker.make) for now in (59, 60, 61)] == [1, 2, 2]
    assert await kept.get("b", 61, maker.make) == 3


async def test_the_next_one_makes_it_where_the_first_leaves() -> None:
    kept, maker = Kept[int](60), Maker(may_end=False)
    first = asyncio.create_task(kept.get("a", 0, maker.make))
    second = asyncio.create_task(kept.get("a", 0, maker.make))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    maker.may_end.set()
    assert await second == 2


async def test_the_answers_that_were_asked_for_longest_ago_are_forgotten() -> None:
    kept, maker = Kept[int](60, max_kept=2), Maker()
    found = [await kept.get(about, 0, maker.make) for about in ("a", "b", "a", "c", "a", "b")]
    assert found == [1, 2, 1, 3, 1, 4]
