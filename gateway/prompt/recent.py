"""What was made lately, so that it is not made again. Pure, and bounded."""

from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class Recent(Generic[ValueT]):
    """Values by key: at least the last `most` that were used, and at most twice as many.

    There are two generations, and the older one is forgotten as a whole. Threads may share it,
    since each step is one operation on a dictionary; at worst a value is made twice.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._young: dict[str, ValueT] = {}
        self._old: dict[str, ValueT] = {}

    def get(self, key: str) -> ValueT | None:
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: str, value: ValueT) -> None:
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
