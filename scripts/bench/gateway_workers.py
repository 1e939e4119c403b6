"""Turns a second and CPU of a gateway with one process and with several workers.

    python -m scripts.bench.gateway_workers [--workers 1 2]

The gateway runs as shipped (keys, journal, ledger, metrics) before the stub of `gateway_engine.py`,
with turns of 8 KB over 32 connections. Gateway and load are pinned to no core, and the stub to one:
turns a second say what this machine does with all three. CPU comes from /proc, until the ledger
has every turn. *The busiest process* bounds what a machine with a core for each can do: its CPU of
a turn, if it ran all turns that it ran here, is the time below which no turn can come after
another. *Limited* is a workspace with limits, for which a worker asks its parent. The last columns
are of one connection, whose turns come one after another: what a question costs is the difference
to one process.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx
import uvloop

from gateway.http.machine import journal_of
from scripts.bench.gateway import Subject, prompt
from scripts.bench.gateway_load import RawRequest, drive
from scripts.bench.gateway_servers import PinnedServer, engine_stub
from scripts.bench.load import Measured
from scripts.setup.options import parse
from scripts.stack import ADMIN_KEY, API_HEADERS, Server, cpu_seconds, family, serving_gateway

_CONNECTIONS = 32
_SINGLE_REQUESTS = 500
_MANY = 1_000_000_000
_LIMITS = {"requests_per_minute": _MANY, "tokens_per_minute": _MANY, "max_concurrency": 10_000}


class Round(NamedTuple):
    """One measurement. CPU is in seconds of a turn; `busiest` that of the busiest process.

    `single_*` are of one connection.
    """

    rate: float
    p50: float
    cpu: float
    busiest: float
    parent: float
    single_p50: float
    single_p99: float
    single_cpu: float
    single_parent: float


def main() -> int:
    options = parse(
        __doc__,
        workers=([1, 2], "of the gateway, one measurement for each"),
        rounds=5,
        requests=(3000, "of 8 KB in each round"),
        data=(Path, "where journals and ledger lie (default: /tmp)"),
    )
    print(
        f"{'workers':>8}{'limited':>9}{'turns/s':>9}{'p50 ms':>8}{'us CPU a turn':>15}"
        f"{'busiest process':>17}{'parent':>8}"
        f"{'one connection: p50 ms':>24}{'p99 ms':>8}{'us CPU a turn':>15}{'parent':>8}"
    )
    with engine_stub() as engine:
        for num_workers in options.workers:
            with (
                TemporaryDirectory(prefix="bench-workers-", dir=options.data) as directory,
                _gateway(engine, Path(directory), num_workers) as server,
            ):
                journals = [journal_of(Path(directory), n + 1) for n in range(num_workers)]
                for is_limited in (False, True):
                    _limit(server.url, is_limited)
                    rounds = [
                        _measure(server, journals, options.requests) for _ in range(options.rounds)
                    ]
                    print(_row(num_workers, is_limited, rounds), flush=True)
    return 0


@contextmanager
def _gateway(engine: PinnedServer, data: Path, num_workers: int) -> Iterator[Server]:
    settings = {"HOLDFAST_WORKERS": str(num_workers)}
    engines = [f"http://127.0.0.1:{engine.port}"]
    with serving_gateway(data, engines, settings, data / "gateway.log") as server:
        server.wait()
        while num_workers > 1 and not _all_run(server.url):
            time.sleep(0.1)
        uvloop.run(_drive(server, 600, _CONNECTIONS))
        yield server


def _all_run(url: str) -> bool:
    workers = httpx.get(f"{url}/readyz", timeout=60, trust_env=False).json()["workers"]
    return all(worker["is_running"] for worker in workers)


def _limit(url: str, is_limited: bool) -> None:
    answer = httpx.post(
        f"{url}/admin/v1/workspaces/default",
        json=_LIMITS if is_limited else dict.fromkeys(_LIMITS),
        headers={"x-api-key": ADMIN_KEY},
        timeout=60,
        trust_env=False,
    )
    answer.raise_for_status()


def _measure(server: Server, journals: Sequence[Path], num_requests: int) -> Round:
    many = _load(server, journals, num_requests, _CONNECTIONS)
    single = _load(server, journals, _SINGLE_REQUESTS, 1)
    return Round(
        many.measured.rate,
        many.measured.percentile(0.5),
        sum(many.used),
        max(many.used),
        many.parent,
        single.measured.percentile(0.5),
        single.measured.percentile(0.99),
        sum(single.used),
        single.parent,
    )


class _Load(NamedTuple):
    """`used` is each process's CPU in seconds of a turn; of several the first is the parent."""

    measured: Measured
    used: list[float]

    @property
    def parent(self) -> float:
        return self.used[0] if len(self.used) > 1 else 0.0


def _load(
    server: Server, journals: Sequence[Path], num_requests: int, num_connections: int
) -> _Load:
    processes = family(server.pid)
    before = [_own_cpu(pid) for pid in processes]
    measured = uvloop.run(_drive(server, num_requests, num_connections))
    while any(_pinned(server, path).backlog() for path in journals):
        time.sleep(0.1)
    used = [(_own_cpu(pid) - b) / num_requests for pid, b in zip(processes, before, strict=True)]
    return _Load(measured, used)


async def _drive(server: Server, num_requests: int, num_connections: int) -> Measured:
    subject = Subject("holdfast", engine_stub, speaks_messages=True)
    small: list[RawRequest] = [
        subject.request(_pinned(server), prompt(subject, 8 << 10, number)) for number in range(64)
    ]
    return await drive(server.port, small, num_connections, num_requests)


def _pinned(server: Server, journal: Path | None = None) -> PinnedServer:
    return PinnedServer(server.pid, server.port, API_HEADERS, journal)


def _own_cpu(pid: int) -> float:
    """CPU seconds of a process without its family."""
    return cpu_seconds(pid) - sum(cpu_seconds(one) for one in family(pid)[1:])


def _row(num_workers: int, is_limited: bool, rounds: Sequence[Round]) -> str:
    found = Round(*map(statistics.median, zip(*rounds, strict=True)))
    return (
        f"{num_workers:8}{'yes' if is_limited else 'no':>9}{found.rate:9.0f}{found.p50 * 1e3:8.1f}"
        f"{found.cpu * 1e6:15.0f}{found.busiest * 1e6:17.0f}{found.parent * 1e6:8.0f}"
        f"{found.single_p50 * 1e3:24.2f}{found.single_p99 * 1e3:8.2f}"
        f"{found.single_cpu * 1e6:15.0f}{found.single_parent * 1e6:8.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
