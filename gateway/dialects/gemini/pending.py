"""The function calls of one turn that await their responses. Pure."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice


@dataclass(slots=True)
class PendingCalls:
    """In the order of the calls. Every step takes constant time over all calls of a request."""

    _calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    _by_id: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    _by_name: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    _num_added: int = 0

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call_id: str, name: str) -> None:
        self._calls[self._num_added] = call_id, name
        self._by_id[call_id].append(self._num_added)
        self._by_name[name].append(self._num_added)
        self._num_added += 1

    def answered(self, call_id: str | None, name: str) -> str | None:
        """The id of the call that a response answers: the first with its id, else with its name.

        None where no call awaits it. The call does not await one any more.
        """
        number = self._first(self._by_id, call_id) if call_id else None
        if number is None:
            number = self._first(self._by_name, name)
        return None if number is None else self._calls.pop(number)[0]

    def names(self, most: int) -> Iterator[str]:
        """The names of the first calls."""
        return (name for _, name in islice(self._calls.values(), most))

    def _first(self, calls: dict[str, deque[int]], key: str) -> int | None:
        numbers = calls.get(key)
        while numbers:
            if numbers[0] in self._calls:
                return numbers[0]
            numbers.popleft()
        return None
