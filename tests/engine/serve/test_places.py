"""Who does not show the engine's secret keeps no gateway out."""

import asyncio
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.asgi import raise_descriptor_limit
from scripts.stack import (
    Server,
    engine_environment,
    free_port,
    python,
    serving_gateway,
    start,
    stop,
    url_of,
)
from tests.gateway.bodies import body
from tests.gateway.serving import HEADERS

DESCRIPTORS = 1024
NUM_STRANGERS = 2000
SENT = [
    b"",
    b"GET /v1/describe HTTP/1.1\r\nhost: x\r\n",
    b"GET /v1/describe HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n\r\n",
    b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
]
"""What strangers send before they stay: nothing, half a head, a wrong secret, none, a probe."""


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an engine with few descriptors."""
    port = free_port()
    settings = {"ENGINE_LOG_LEVEL": "error", "ENGINE_SYNTHETIC_PREFILL_US": "0"}
    log = tmp_path_factory.mktemp("engine") / "log"
    command = [*python("engine"), "--backend", "synthetic"]
    environment = engine_environment(port, settings)
    process = start(command, environment, log, before_exec=few_descriptors)
    try:
        yield Server(url_of(port), process, log).wait().url
    finally:
        stop(process)


async def stay(url: str, head: bytes, ends: Counter[str], leaving: asyncio.Event) -> None:
    """Send this and read until the engine ends the connection; count the last status."""
    host, port = url.removeprefix("http://").split(":")
    answer = b""
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        reading = asyncio.create_task(reader.read())
        departure = asyncio.create_task(leaving.wait())
        await asyncio.wait([reading, departure], return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            ends["stayed"] += 1
            reading.cancel()
        else:
            answer = reading.result()
        departure.cancel()
        writer.close()
    except OSError:
        pass
    if not leaving.is_set():
        ends[answer.rpartition(b"HTTP/1.1 ")[2][:3].decode() or "none"] += 1


async def turns(gateway: str, count: int) -> list[int]:
    """The statuses of so many turns at once: each needs a connection to the engine."""
    async with httpx.AsyncClient(base_url=gateway, headers=HEADERS, timeout=120) as http:
        replies = (http.post("/v1/messages", json=body(max_tokens=20)) for _ in range(count))
        return [reply.status_code for reply in await asyncio.gather(*replies)]


async def visit(engine: str, gateway: str) -> Counter[str]:
    ends: Counter[str] = Counter()
    leaving = asyncio.Event()
    visits = []
    for number in range(1, NUM_STRANGERS + 1):
        head = SENT[number % len(SENT)]
        visits.append(asyncio.create_task(stay(engine, head, ends, leaving)))
        if number % 16 == 0:
            await asyncio.sleep(0.05)
        if number % 500 == 0:
            # More each time, so that some come on new connections.
            assert await turns(gateway, number // 50) == [200] * (number // 50)
    leaving.set()
    await asyncio.gather(*visits)
    return ends


def test_connections_without_the_secret_keep_no_gateway_out(engine: str, tmp_path: Path) -> None:
    """They had all places for 30 to 75 s, and a gateway's new connections were closed unread."""
    raise_descriptor_limit()
    with serving_gateway(tmp_path, [engine], {"HOLDFAST_LOG_LEVEL": "error"}) as gateway:
        ends = asyncio.run(visit(engine, gateway.wait().url))
    assert ends["503"] > NUM_STRANGERS // 10, ends
    assert ends["none"] == 0, ends
    assert ends["stayed"] > DESCRIPTORS // 2, ends
