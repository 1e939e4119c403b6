"""What a workspace or an address may do in a minute, and hold at one time. Pure, on a clock that is
handed in.

The buckets are our own code because a turn's use is known only when it ends: its estimate is
corrected later, upwards or into debt. throttled-py (3.5) can do neither, and `limits` has only
windows.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakValueDictionary

from gateway.base.bounds import Tuning
from gateway.base.errors import Overloaded, RateLimited

LARGE_BYTES = 1 << 20
MAX_WAIT_SECONDS = 10.0
_MINUTE_SECONDS = 60.0
# Many small refills add up rounding errors. A client that waited for the announced time must not be
# refused because of them.
_ROUNDING = 1e-6
_MAX_KEYS = 10_000
_RETRY_SECONDS = 2


@dataclass(slots=True)
class TokenBucket:
    """A bucket that is refilled evenly, `per_minute` in a minute, and holds at most that.

    Every `now` is in seconds on one monotonic clock. A `now` before the last one changes nothing.
    """

    per_minute: int
    # What can be taken; a debt is negative.
    level: float
    # When `level` was right.
    at: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> "TokenBucket":
        return cls(per_minute, float(per_minute), now)

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken; 0 if it can be now. An amount above `per_minute`
        counts as `per_minute`."""
        self._refill(now)
        missing = min(amount, self.per_minute) - self.level
        return missing * _MINUTE_SECONDS / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, into debt if necessary. A negative amount gives back."""
        self._refill(now)
        self.level = min(self.level - amount, float(self.per_minute))

    def remaining(self, now: float) -> int:
        self._refill(now)
        return max(0, int(self.level + _ROUNDING))

    def full_in(self, now: float) -> float:
        """Seconds until the bucket is full, if nothing more is taken."""
        return self.wait(self.per_minute, now)

    def resize(self, per_minute: int, now: float) -> None:
        """Set another limit. What was used stays used, and so does a debt. A lower limit makes no
        new debt, because paying it off at the lower rate could take hours."""
        self._refill(now)
        self.level = max(self.level + per_minute - self.per_minute, min(self.level, 0.0))
        self.per_minute = per_minute

    def _refill(self, now: float) -> None:
        elapsed = max(0.0, now - self.at)
        level = self.level + elapsed * self.per_minute / _MINUTE_SECONDS
        self.level = min(level, float(self.per_minute))
        self.at = max(now, self.at)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets of one size, by key: at most _MAX_KEYS. The longest unused one is forgotten first."""

    per_minute: int
    monotonic: Callable[[], float]
    buckets: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict)

    def wait(self, key: str, amount: int) -> float:
        """Seconds until the key may take so much."""
        return self._of(key).wait(amount, self.monotonic())

    def take(self, key: str, amount: int) -> None:
        self._of(key).take(amount, self.monotonic())

    def _of(self, key: str) -> TokenBucket:
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = TokenBucket.full(self.per_minute, self.monotonic())
            self.buckets[key] = bucket
            if len(self.buckets) > _MAX_KEYS:
                self.buckets.popitem(last=False)
        self.buckets.move_to_end(key)
        return bucket


class Counting:
    """The limits of `count_tokens` for each workspace: requests and bytes a minute, calls at one
    time. A count makes no turn, so no limit of turns bounds it."""

    def __init__(self, bounds: Tuning, monotonic: Callable[[], float]) -> None:
        self._most = bounds.count_concurrency
        self._requests = Buckets(bounds.count_requests_per_minute, monotonic)
        self._num_bytes = Buckets(bounds.count_bytes_per_minute, monotonic)
        self._running: Counter[str] = Counter()

    @contextmanager
    def admitted(self, workspace: str, num_bytes: int) -> Iterator[None]:
        """Hold a place for one call with a body of `num_bytes`. Raise RateLimited, with nothing
        taken. Requests and bytes are not given back: an abandoned call costs as much."""
        if self._running[workspace] >= self._most:
            raise RateLimited("concurrent calls of count_tokens", self._most, 1)
        costs = (
            (self._requests, 1, "calls of count_tokens per minute"),
            (self._num_bytes, num_bytes, "bytes in count_tokens per minute"),
        )
        for buckets, amount, what in costs:
            seconds = buckets.wait(workspace, amount)
            if seconds > 0:
                raise RateLimited(what, buckets.per_minute, math.ceil(seconds))
        for buckets, amount, _ in costs:
            buckets.take(workspace, amount)
        self._running[workspace] += 1
        try:
            yield
        finally:
            self._running[workspace] -= 1
            if not self._running[workspace]:
                del self._running[workspace]


class LargeBodies:
    """How fast one workspace may send large bodies. Each takes tens of milliseconds of the GIL.

    A body beyond the rate is left in the socket until there is room, because a refused client would
    send it again at once. Only a wait that would be too long is refused.
    """

    def __init__(self, bytes_per_minute: int, monotonic: Callable[[], float]) -> None:
        self._rate = Buckets(bytes_per_minute, monotonic)

    async def wait(self, workspace: str, num_bytes: int) -> float:
        """Count a large body, and return how many seconds it was left in the socket. If that would
        be too long, wait for MAX_WAIT_SECONDS and raise RateLimited, with nothing counted."""
        seconds = self._rate.wait(workspace, num_bytes)
        is_late = seconds > MAX_WAIT_SECONDS
        if not is_late:
            self._rate.take(workspace, num_bytes)
        await asyncio.sleep(min(seconds, MAX_WAIT_SECONDS))
        if is_late:
            what = f"bytes of bodies above {LARGE_BYTES} per minute"
            late = math.ceil(seconds - MAX_WAIT_SECONDS)
            raise RateLimited(what, self._rate.per_minute, late)
        return seconds


class BodyBytes:
    """How many bytes of request bodies may be held at one time.

    A workspace may hold as many bytes as are still free (dynamic thresholds, Choudhury and Hahne
    1998). So one workspace gets half, n workspaces get 1 / (n + 1) each, and as much stays free for
    the next workspace.
    """

    def __init__(self, most: int) -> None:
        self.total = 0
        self._most = most
        self._held: Counter[str] = Counter()

    def take(self, workspace: str, num_bytes: int) -> None:
        """Hold the bytes. Raise Overloaded where all bytes are held, and RateLimited where the
        workspace's part is held, with nothing taken."""
        num_free = self._most - self.total
        num_held = self._held[workspace]
        if num_bytes > num_free:
            raise Overloaded("too many bytes of requests are held", _RETRY_SECONDS)
        if num_held and num_held + num_bytes > num_free:
            raise RateLimited("bytes of requests held at one time", num_free, _RETRY_SECONDS)
        self._held[workspace] = num_held + num_bytes
        self.total += num_bytes

    def give_back(self, workspace: str, num_bytes: int) -> None:
        self.total -= num_bytes
        self._held[workspace] -= num_bytes
        if not self._held[workspace]:
            del self._held[workspace]


ReadKind = Literal["read", "export", "plan", "planner", "store"]
"""`plan` is a key's request for a plan, `planner` a process that makes one."""
READS_PER_KEY = 6
EXPORTS_PER_KEY = 1
PLANS_PER_KEY = 1
PLANNERS = 2
READ_REST = 2.0
EXPORT_REST = 6.0
"""How long a read's place stays taken after it, as a multiple of the read's time."""
STORE_CALLS_PER_WORKSPACE = 3
STORE_REST = 1.0
MAX_REST_SECONDS = 1.0
WAIT_SECONDS = 10.0
PLANNER_WAIT_SECONDS = 60.0


@dataclass(slots=True)
class ReadLimit:
    """Bounds the reads of a key at one time."""

    per_key: int = READS_PER_KEY
    # How long a read's place stays taken after it, as a multiple of the read's time.
    rest: float = READ_REST
    # The name of what is bounded, for the refusal.
    what: str = "reads at once"
    wait_seconds: float = WAIT_SECONDS
    # A key's semaphore lives while a read holds it, waits for it, or rests.
    _places: WeakValueDictionary[str, asyncio.Semaphore] = field(
        default_factory=WeakValueDictionary
    )

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[None]:
        """Hold one of the key's places. Raise RateLimited if none is free in time."""
        free = self._places.setdefault(key, asyncio.Semaphore(self.per_key))
        try:
            async with asyncio.timeout(self.wait_seconds):
                await free.acquire()
        except TimeoutError:
            raise RateLimited(self.what, self.per_key, 5) from None
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            rest_seconds = min(self.rest * (loop.time() - began), MAX_REST_SECONDS)
            loop.call_later(rest_seconds, free.release)


def read_limits() -> Mapping[ReadKind, ReadLimit]:
    """The limits of one gateway."""
    return {
        "read": ReadLimit(),
        "export": ReadLimit(EXPORTS_PER_KEY, EXPORT_REST),
        "plan": ReadLimit(PLANS_PER_KEY),
        "planner": ReadLimit(PLANNERS, 0.0, "plans at once", PLANNER_WAIT_SECONDS),
        "store": ReadLimit(
            STORE_CALLS_PER_WORKSPACE,
            STORE_REST,
            "calls of batches, cached contents and entries at once",
        ),
    }
