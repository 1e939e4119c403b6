"""Large bodies of one workspace have a rate: beyond it they wait, and then are refused."""

import asyncio
import time
from typing import Any

import pytest

from gateway.base.errors import RateLimited
from gateway.http.bodies import BodyDeadline
from gateway.limits.bodies import BodyBytes
from gateway.limits.large_bodies import MAX_WAIT_SECONDS, LargeBodies
from gateway.limits.reading import ReadLimit

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


@pytest.mark.parametrize("num_bytes", [3 * MEBIBYTE, MEBIBYTE])
def test_a_large_body_is_left_in_the_socket_and_a_small_one_never(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def take(app: BodyDeadline, declared: int) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"x", "more_body": False}

        scope: Any = {
            "type": "http",
            "headers": [(b"content-length", str(declared).encode())],
            "user": None,
        }
        await app(scope, receive, None)  # type: ignore[arg-type]

    async def app_itself(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def run() -> None:
        large = LargeBodies(240 * MEBIBYTE, lambda: 0.0)
        app = BodyDeadline(app_itself, 60, BodyBytes(1 << 40), large)
        await take(app, 240 * MEBIBYTE)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await take(app, num_bytes)

    asyncio.run(run())
    assert waits == ([pytest.approx(0.75)] if num_bytes > MEBIBYTE else [])


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
