"""A small soak; tests/faults/soak.py is the long one."""

import asyncio
from pathlib import Path

from scripts.stack import API_KEY
from tests.e2e.fleet import running_fleet
from tests.e2e.soaking import (
    ENGINE,
    GATEWAY,
    SPARE_FDS,
    Target,
    idle_readings,
    run_soak,
    run_streams,
)

STREAMS = 60
FAST = {**ENGINE, "ENGINE_SYNTHETIC_DECODE_MS": "20"}


def test_all_streams_are_whole_and_leave_nothing(tmp_path: Path) -> None:
    """The same streams twice, of which the second time opens no more descriptors.

    Gateways keep idle connections to engines for 30 s, engines for 75 s: nobody waits for that.
    """
    with running_fleet(tmp_path, 3, 2, FAST, GATEWAY) as fleet:
        urls = [gateway.url for gateway in fleet.gateways]
        target = Target(urls, fleet.engines, API_KEY, "synthetic")
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
