"""What is next by a key that changes while things are in the order, such as their last use.

A heap whose items may be out of date. Taking the first costs O(log n) for each key that grew since
the item was pushed. A look at everything would cost a large cache milliseconds a step.
"""

from collections.abc import Callable, Hashable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

Key = tuple[float, float]
T = TypeVar("T", bound=Hashable)

_SLACK = 64


class Order(Generic[T]):
    """`key_of` gives an item's key now, None for an item that is no longer in the order.

    A key that grew is noticed when its item comes first. `push` must be called for all other
    changes: for an item that is new or comes back, and for a key that became less.
    """

    def __init__(self, key_of: Callable[[T], Key | None], items: Iterable[T] = ()) -> None:
        """The order begins as if each of `items` had been pushed. This takes linear time."""
        self._key_of = key_of
        keys = ((key_of(item), item) for item in items)
        self._heap: list[tuple[Key, int, T]] = [
            (key, number, item) for number, (key, item) in enumerate(keys, 1) if key is not None
        ]
        heapify(self._heap)
        self._pushes = len(self._heap)
        self._limit = 2 * len(self._heap) + _SLACK

    def push(self, item: T) -> None:
        """Nothing happens if the item has no key now."""
        key = self._key_of(item)
        if key is None:
            return
        self._pushes += 1
        heappush(self._heap, (key, self._pushes, item))
        if len(self._heap) > self._limit:  # keep one of each item
            numbers: dict[T, int] = {}
            for _, number, pushed in self._heap:
                numbers[pushed] = min(number, numbers.get(pushed, number))
            keys = ((self._key_of(pushed), number, pushed) for pushed, number in numbers.items())
            self._heap = [(key, number, pushed) for key, number, pushed in keys if key is not None]
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + _SLACK

    def first(self, *, until: float | None = None) -> T | None:
        """The item with the least key. Of equal keys the one that was pushed first comes first.

        With `until` the result is None unless the first number of the key is at most `until`.
        """
        while self._heap:
            pushed_key, number, item = self._heap[0]
            key = self._key_of(item)
            if key == pushed_key:
                return item if until is None or key[0] <= until else None
            if key is None or key < pushed_key:  # a lesser key was pushed again
                heappop(self._heap)
            else:
                heapreplace(self._heap, (key, number, item))
        return None

    def pop(self) -> T | None:
        """Take out the first."""
        item = self.first()
        if item is not None:
            heappop(self._heap)
        return item
