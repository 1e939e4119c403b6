"""Answers that are costly to make and often asked for. Each is made once and kept for a while."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Answer = TypeVar("Answer")
MAX_KEPT = 64


@dataclass(slots=True)
class _Place(Generic[Answer]):
    """`made` is the answer and when it was asked for."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    made: tuple[float, Answer] | None = None


class Kept(Generic[Answer]):
    """The newest answers by what they are about. Used from one event loop."""

    def __init__(self, seconds: float, max_kept: int = MAX_KEPT) -> None:
        self._seconds = seconds
        self._max_kept = max_kept
        self._places: OrderedDict[Hashable, _Place[Answer]] = OrderedDict()

    async def get(
        self, about: Hashable, now: float, make: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """The kept answer if it is young enough, else a new one.

        `now` is in seconds of a monotonic clock.
        One caller at a time makes it and the others wait. If that caller is cancelled or fails, the
        next one makes it.
        """
        place = self._places.setdefault(about, _Place())
        self._places.move_to_end(about)
        while len(self._places) > self._max_kept:
            self._places.popitem(last=False)
        async with place.lock:
            if place.made is not None and now - place.made[0] < self._seconds:
                return place.made[1]
            answer = await make()
            place.made = now, answer
            return answer
