"""Large bodies of one workspace have a rate: beyond it they wait, and then are refused."""

import asyncio
import time

from gateway.admission.rates import ReadLimit


def test_a_key_that_reads_all_the_time_leaves_most_of_the_time_to_others() -> None:
    """A read computes for 2 ms on the loop; its place rests for three times as long."""

    async def run() -> float:
        limit = ReadLimit(per_key=1, rest=3.0)
        busy = 0.0
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
