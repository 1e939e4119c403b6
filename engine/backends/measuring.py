"""Measures how far approximate answers are from exact ones, behind what is served.

Measuring takes a model as much time as some hundred steps. It is done on the engine's thread, a
slice between two steps, so exact turns are answered from the start. While requests run a slice is
followed by a pause, so that they keep most of the time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from engine.approximate.asking import Approximations

SLICE_SECONDS = 0.05
"""A slice ends with the first bounded part after so many seconds."""
PAUSES = 4
"""A pause is so many times as long as the slice before."""

log = structlog.get_logger()


def measure_slice(approximate: Approximations) -> float | None:
    """Measure for a slice, on the engine's thread. Return the seconds that it took; None if all is
    measured."""
    begun = time.perf_counter()
    took = 0.0
    while took < SLICE_SECONDS:
        if not approximate.measure_part():
            return None
        took = time.perf_counter() - begun
    return took


async def measure_behind(
    approximate: Approximations,
    call: Callable[[Callable[[], float | None]], Awaitable[float | None]],
    is_busy: Callable[[], bool],
) -> None:
    """Measure all that is not measured yet.

    `call` runs a function between two steps. `is_busy` says whether requests run or wait.
    """
    begun = time.perf_counter()
    while (took := await call(lambda: measure_slice(approximate))) is not None:
        await asyncio.sleep(took * PAUSES if is_busy() else 0)
    allowed = [technique for technique in approximate.techniques if technique.is_allowed]
    log.info(
        "approximations measured",
        seconds=round(time.perf_counter() - begun, 1),
        techniques=len(approximate.techniques),
        allowed=len(allowed),
    )
