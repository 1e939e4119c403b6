"""A small soak; tests/faults/soak.py is the long one."""

import asyncio
import os
from pathlib import Path

from scripts.stack import API_KEY
from tests.e2e.fleet import running_fleet
from tests.e2e.soaking import (
    SPARE_FDS,
    Target,
    idle_readings,
    run_soak,
    run_streams,
)

ENGINE = {
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_MAX_RUNNING": "512",
    "ENGINE_MAX_WAITING": "1024",
    "ENGINE_SYNTHETIC_DECODE_MS": "20",
    "ENGINE_LOG_LEVEL": "error",
}
GATEWAY = {"HOLDFAST_LOG_LEVEL": "error", "HOLDFAST_QUEUE_SECONDS": "120"}
# SOAK_STREAMS raises it (scripts/long_tests soak).
IS_LONG = "SOAK_STREAMS" in os.environ
STREAMS = int(os.environ.get("SOAK_STREAMS", "60"))


def test_all_streams_are_whole_and_leave_nothing(tmp_path: Path) -> None:
    """Descriptors are compared with those before any stream where there is time for that.

    Gateways keep idle connections to engines for 30 s, engines for 75 s. A commit does not wait
    until they are gone: it has the same streams twice, and the second time opens no more.
    """
    with running_fleet(tmp_path, 3, 2, ENGINE, GATEWAY) as fleet:
        urls = [gateway.url for gateway in fleet.gateways]
        target = Target(urls, fleet.engines, API_KEY, "synthetic")
        before = asyncio.run(idle_readings(target))
        if not IS_LONG:
            asyncio.run(run_streams(target, STREAMS, 40))
            before = asyncio.run(idle_readings(target))
        streams = asyncio.run(run_streams(target, STREAMS, 40))
        assert not streams.wrong, streams.wrong[:3]
        assert len(streams.first) == STREAMS and streams.num_open_at_once > STREAMS / 2
        soak = asyncio.run(run_soak(target, 5, 8, 1))
        assert not soak.unexpected, soak.unexpected[:3]
        kinds = {name.split()[0] for name in soak.asked}
        assert kinds == {"hit", "miss", "abort", "error"}
        after = asyncio.run(idle_readings(target, before))
    for url, end in after.items():
        assert end.fds - before[url].fds <= SPARE_FDS, url
