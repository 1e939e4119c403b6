"""How often a wrong key may be tried."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable

WINDOW_SECONDS = 60.0
MAX_FAILED = 8
MAX_ADDRESSES = 10_000


class Attempts:
    """Failed sign-ins of the last minute, by address. Bounded: the oldest address is forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_seconds(self, address: str) -> float:
        """How long until this address may try again; 0 where it may now."""
        times = self._failed.get(address)
        if times is None:
            return 0.0
        now = self._clock()
        while times and times[0] <= now - WINDOW_SECONDS:
            times.popleft()
        return 0.0 if len(times) < MAX_FAILED else times[0] + WINDOW_SECONDS - now

    def failed(self, address: str) -> None:
        self._failed.setdefault(address, deque(maxlen=MAX_FAILED)).append(self._clock())
        self._failed.move_to_end(address)
        while len(self._failed) > MAX_ADDRESSES:
            self._failed.popitem(last=False)
