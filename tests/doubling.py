"""How the CPU time of a piece of work grows when its size is doubled, up to the size's bound.

Times are the process's CPU time without the garbage collector, the best of several runs. Other
programs of the machine share its caches and make single runs slower. A pair of sizes that seems to
grow too fast is therefore measured again in turns, and the best times of the two sizes count. The
turns end early where these are clearly within the bound.

Megabytes do not fit into what others leave of a cache, so there any pass over twice the bytes takes
more than twice as long. Where a size is a number of bytes, reading a JSON text of as many bytes is
measured in the same turns, and what that grew beyond a doubling is no growth of the work. The best
of some rounds counts: what really grows too fast does so in each.

Every commit measures up to the first size that takes long. FAULTS=full goes up to the bound
(`scripts/long_tests doubling`).
"""

import ctypes
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from tests.faults import sizes

Work = Callable[[], object]

GROWTH = 2.3
"""Twice the work, and 15% for caches and allocators."""
_CLEAR_GROWTH = 2.15
"""Half of these 15%: after as many turns as the first measurement has runs, this needs no more."""
FLOOR_SECONDS = 0.002
"""Below this what does not grow, and the clock's steps, are most of it."""
_LEAST_SECONDS = 0.02
_HEAP_ROUNDS = 6000
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST_KEPT = 32 << 20
_POINTS = 3
"""So many sizes are compared."""
_SMALLEST = 6
"""The first size that is tried is the bound, halved so many times."""
_LEAST_SIZE = 32
_LONG_SECONDS = sizes.number(0.1, math.inf)
"""No size is tried above one that takes longer."""
_TRIES = 3
_MORE_TRIES = 20
_ROUNDS = 3
_MORE_ROUNDS = 15
_PAUSE_SECONDS = 1.0
_TOO_MUCH = 3.5
"""No other program makes the best of so many rounds grow so fast."""


@dataclass(frozen=True)
class Dimension:
    """`make(size)` prepares one piece of work of that size; `most` is its bound.

    `is_bytes`: a size is a number of bytes.
    """

    name: str
    most: int
    make: Callable[[int], Work]
    is_bytes: bool = False


@dataclass
class Curve:
    """CPU seconds of one dimension by size."""

    dimension: Dimension
    seconds: dict[int, float] = field(default_factory=dict)
    again: dict[int, float] = field(default_factory=dict)

    @property
    def growth(self) -> float:
        """The largest factor of a doubling above the floor; 0 without one."""
        return max((self.factor(size) for size in self._pairs()), default=0.0)

    def factor(self, size: int) -> float:
        return self.again.get(size, self.seconds[2 * size] / self.seconds[size])

    def measure(self) -> None:
        """The bound, or the first size that takes long, and those that come to it by doubling."""
        is_full = math.isinf(_LONG_SECONDS)
        for shift in reversed(range(_POINTS if is_full else _SMALLEST + 1)):
            size = self.dimension.most >> shift
            if shift >= _POINTS and size < _LEAST_SIZE:
                continue
            self.seconds[size] = min(self._runs(size, _TRIES))
            if self.seconds[size] > _LONG_SECONDS:
                break
        for size in sorted(self.seconds)[:-_POINTS]:
            del self.seconds[size]
        for size in self._pairs():
            self._measure_again(size)

    def _measure_again(self, size: int) -> None:
        """Rounds until one is within the bound.

        The last rounds are for a factor that other programs may explain. A pause lets these change.
        """
        for number in range(_MORE_ROUNDS):
            at_most = self.factor(size)
            if at_most <= GROWTH or (number >= _ROUNDS and at_most > _TOO_MUCH):
                return
            if number >= _ROUNDS:
                time.sleep(_PAUSE_SECONDS)
            again = self._factor_in_turns(size)
            self.again[size] = min(again, self.again.get(size, again))

    def _factor_in_turns(self, size: int) -> float:
        """The best time of the larger size by the best of the smaller, measured in turns."""
        works = [self.dimension.make(size), self.dimension.make(2 * size)]
        if self.dimension.is_bytes:
            works += [_reading(size), _reading(2 * size)]
        best = [math.inf] * len(works)
        factor = math.inf
        for turn in range(_MORE_TRIES):
            best = [min(time, cpu_seconds(work)) for time, work in zip(best, works, strict=True)]
            factor = best[1] / best[0]
            if self.dimension.is_bytes:
                factor /= max(best[3] / best[2] / 2, 1.0)
            if turn + 1 >= _TRIES and factor <= _CLEAR_GROWTH:
                break
        return factor

    def _pairs(self) -> list[int]:
        return [
            size
            for size in sorted(self.seconds)
            if 2 * size in self.seconds and self.seconds[size] >= FLOOR_SECONDS
        ]

    def _runs(self, size: int, count: int) -> list[float]:
        work = self.dimension.make(size)
        return [cpu_seconds(work) for _ in range(count)]


def _reading(num_bytes: int) -> Work:
    """As many bytes of JSON copied, read into text, and encoded: what every request touches."""
    text = b'"%s"' % (b"a b " * (num_bytes // 4))
    return lambda: msgspec.json.decode(text + b" ").encode()


def cpu_seconds(work: Work) -> float:
    """CPU seconds of one run. Short work runs many times, since the clock is coarse."""
    began = time.process_time()
    count = 0
    while (taken := time.process_time() - began) < _LEAST_SECONDS or not count:
        work()
        count += 1
    return taken / count


@contextmanager
def without_collector() -> Iterator[None]:
    """Without the garbage collector, and with a heap like that of a process that has run for long.

    Such a heap has holes that the work fits into. In a fresh heap each run would take pages from
    the system and give them back. The allocator does so for large blocks in any heap, by their
    size, so it is told to keep them.
    """
    gc.collect()
    gc.disable()
    _keep_freed_memory(is_kept=True)
    live_objects = [bytes(size) for _ in range(_HEAP_ROUNDS) for size in range(16, 496, 16)][::50]
    try:
        yield
    finally:
        live_objects.clear()
        _keep_freed_memory(is_kept=False)
        gc.enable()


def _keep_freed_memory(*, is_kept: bool) -> None:
    """mallopt(3) of glibc; elsewhere nothing. The second value is its default."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            libc.mallopt(option, _MOST_KEPT if is_kept else 128 * 1024)


def curve_of(dimension: Dimension) -> Curve:
    curve = Curve(dimension)
    with without_collector():
        curve.measure()
    return curve


def row(curve: Curve) -> str:
    sizes = sorted(curve.seconds)
    milliseconds = " ".join(f"{curve.seconds[size] * 1000:9.2f}" for size in sizes)
    growth = f"{curve.growth:5.2f}" if curve.growth else "    -"
    return f"{curve.dimension.name:44} {sizes[-1]:>9} {growth} {milliseconds}"
