"""The synthetic engine tells its steps' times by its settings, however long it slept."""

import asyncio
from functools import partial
from itertools import cycle

import pytest

from engine.backends.local import LocalBackend
from engine.backends.synthetic import load_synthetic
from engine.clock import ManualClock
from engine.errors import InvalidRequest
from engine.protocol import Breakpoint
from engine.settings import Settings
from gateway.base.token_time import slope
from tests.engine.backends.local import finish, prompt, request

PREFILL_US = 200
LENGTHS = (700, 1500, 2300, 3100, 900, 1700)
"""In words of the marked text. A read leaves a few tokens to be computed."""


@pytest.mark.anyio
async def test_the_time_of_a_token_is_that_of_the_setting_on_a_busy_machine() -> None:
    """Each sleep lasts another time too long, as on a machine that others keep busy."""
    clock = ManualClock()
    too_long = cycle((1.0, 1.4, 1.1, 2.5))

    def sleep(seconds: float) -> None:
        clock.advance(seconds * next(too_long) + 0.01)

    settings = Settings.model_validate(
        {
            "secret": "s" * 16,
            "synthetic_prefill_us": PREFILL_US,
            "synthetic_decode_ms": 2,
            "min_cache_tokens": 16,
        }
    )
    crashes: list[BaseException] = []
    engine = LocalBackend(settings, clock, partial(load_synthetic, sleep=sleep), crashes.append)
    await asyncio.to_thread(engine.load, lambda _stage, _fraction: None)
    try:
        for number, length in enumerate([*LENGTHS, *LENGTHS]):
            text = prompt("why?", system=(f"{length} " + "a rule. " * length,))
            turn = request(text, request_id=f"r{number}", breakpoints=[Breakpoint(0)])
            started = await finish(engine, turn)
            is_again = number >= len(LENGTHS)
            assert (started.usage.cache_read_tokens > 0) == is_again
        stats = await engine.stats()
        for seconds in (-1.0, 1e9):
            with pytest.raises(InvalidRequest, match="at least 0 and less than 1e9"):
                await engine.advance_clock(seconds)
    finally:
        await engine.stop()
    assert not crashes
    assert stats.prefill_times is not None
    assert stats.prefill_times.prefills > len(LENGTHS)
    assert slope(stats.prefill_times) == pytest.approx(PREFILL_US / 1e6, rel=0.02)
    assert stats.prefill_seconds > 1.2 * stats.prefill_times.seconds, "what was really waited for"
