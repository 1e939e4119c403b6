"""What a flood of connections took comes back: within 50 MB of before, a minute after it."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from scripts.stack import serving_engine
from tests.faults.sizes import number, told
from tests.faults.test_stalled_readers import MIB, watched
from tests.gateway.serving import eventually

NUM_HEADS = number(2000, 10_000)
NUM_AT_ONCE = 200
MAX_GROWTH = 50 * MIB
_HEADERS = b"".join(b"x-%d: %b\r\n" % (place, b"a" * 590) for place in range(100))
_CLOSE = b"host: x\r\nconnection: close\r\n"


@contextmanager
def gateway() -> Iterator[tuple[str, psutil.Process]]:
    with tempfile.TemporaryDirectory() as data, watched(Path(data)) as site:
        yield site.url, site.process


@contextmanager
def engine() -> Iterator[tuple[str, psutil.Process]]:
    with tempfile.TemporaryDirectory() as data:
        settings = {"ENGINE_LOG_LEVEL": "error"}
        with serving_engine("synthetic", settings, Path(data) / "log") as served:
            yield served.wait().url, psutil.Process(served.pid)


async def flood(url: str, data: bytes, count: int) -> None:
    """So many connections that send this and read until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    numbers = iter(range(count))

    async def come_and_go() -> None:
        for _ in numbers:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                while await reader.read(65536):
                    pass
                writer.close()
            except OSError:
                continue

    await asyncio.gather(*(come_and_go() for _ in range(NUM_AT_ONCE)))


@pytest.mark.parametrize("server", [gateway, engine])
def test_memory_comes_back_after_floods_without_a_key(
    server: Callable[[], AbstractContextManager[tuple[str, psutil.Process]]],
) -> None:
    with server() as (url, process):
        asyncio.run(flood(url, b"GET /healthz HTTP/1.1\r\n" + _CLOSE + b"\r\n", NUM_AT_ONCE))
        before = process.memory_info().rss
        long = b"POST /v1/count HTTP/1.1\r\n" + _CLOSE + _HEADERS + b"content-length: 0\r\n\r\n"
        asyncio.run(flood(url, long, NUM_HEADS))
        asyncio.run(flood(url, b"GET /v1/models HTTP/1.1\r\n" + _CLOSE + b"\r\n", 2 * NUM_HEADS))
        most = process.memory_info().rss
        eventually(lambda: process.memory_info().rss - before < MAX_GROWTH, 60)
        assert httpx.get(f"{url}/healthz", timeout=120).status_code == 200
        growth = process.memory_info().rss - before
        told("memory", at_once=(most - before) // MIB, in_a_minute=growth // MIB)
