"""Large bodies of one workspace have a rate: beyond it they wait, and then are refused."""

import asyncio
import time

import pytest

from gateway.admission.rates import MAX_WAIT_SECONDS, LargeBodies, ReadLimit
from gateway.base.errors import RateLimited

MEBIBYTE = 1 << 20


def test_a_body_waits_as_long_as_the_rate_needs_and_a_long_wait_ends_in_a_refusal() -> None:
    now = 0.0
    large = LargeBodies(60 * MEBIBYTE, lambda: now)
    assert large.take("a", 60 * MEBIBYTE).seconds == 0, "a minute's bytes may come at once"
    wait = large.take("a", 4 * MEBIBYTE)
    assert wait.seconds == pytest.approx(4) and wait.refusal is None
    assert large.take("b", 32 * MEBIBYTE).seconds == 0, "another workspace does not wait"
    late = large.take("a", 30 * MEBIBYTE)
    assert late.seconds == MAX_WAIT_SECONDS and isinstance(late.refusal, RateLimited)
    now = 6.0
    assert large.take("a", 2 * MEBIBYTE).seconds == pytest.approx(0), "a refused one is not counted"


def test_a_key_that_reads_all_the_time_leaves_most_of_the_time_to_others() -> None:
    """A read computes for 2 ms on the loop; its place rests for three times as long."""

    async def run() -> float:
        limit, busy = ReadLimit(per_key=1, rest=3.0), 0.0
        until = time.monotonic() + 0.5

        async def read_all_the_time() -> None:
            nonlocal busy
            while time.monotonic() < until:
                async with limit.taken("k"):
                    begun = time.monotonic()
                    while time.monotonic() < begun + 0.002:
                        pass
                    busy += 0.002

        begun = time.monotonic()
        await asyncio.gather(*(read_all_the_time() for _ in range(8)))
        return busy / (time.monotonic() - begun)

    assert asyncio.run(run()) < 0.35
