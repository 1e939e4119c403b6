"""How the CPU time of a piece of work grows from a quarter of its bound to its bound.

Linear work takes four times as long, quadratic work sixteen times. MOST_GROWTH lies between, with
twice as much for processor caches and allocators. Times are the process's CPU time without the
garbage collector, the best of several runs, since other programs of the machine share its caches.
"""

import gc
import math
import time
from collections.abc import Callable
from typing import NamedTuple

Work = Callable[[], object]

MOST_GROWTH = 8.0
FLOOR_SECONDS = 0.002
"""Below this what does not grow, and the clock's steps, are most of it."""
_LEAST_SECONDS = 0.02
_MAX_ROUNDS = 20


class Dimension(NamedTuple):
    """`make(size)` prepares one piece of work of that size; `most` is its bound."""

    name: str
    most: int
    make: Callable[[int], Work]


def growth(dimension: Dimension) -> float:
    """How many times as long the bound takes as its quarter, measured in turns.

    The turns end early where the factor is within MOST_GROWTH.
    """
    works = [dimension.make(dimension.most // 4), dimension.make(dimension.most)]
    best, factor = [math.inf, math.inf], math.inf
    gc.collect()
    gc.disable()
    try:
        for _ in range(_MAX_ROUNDS):
            best = [min(now, _cpu_seconds(work)) for now, work in zip(best, works, strict=True)]
            factor = best[1] / max(best[0], FLOOR_SECONDS)
            if factor <= MOST_GROWTH:
                break
    finally:
        gc.enable()
    print(f"{dimension.name:44} {dimension.most:>9} {factor:5.2f} {best[1] * 1000:9.2f} ms")
    return factor


def _cpu_seconds(work: Work) -> float:
    """CPU seconds of one run. Short work runs many times, since the clock is coarse."""
    began, count = time.process_time(), 0
    while (taken := time.process_time() - began) < _LEAST_SECONDS or not count:
        work()
        count += 1
    return taken / count
