"""Places and turns of those who show no key, beside those who do."""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.places import STRANGERS_SHARE, Strangers
from scripts.stack import (
    Server,
    free_port,
    gateway_environment,
    migrate,
    python,
    start,
    stop,
    url_of,
)
from tests.gateway.bodies import body
from tests.gateway.process import new_key
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import HEADERS, serve

WORK_SECONDS = 0.002
NUM_TURNS = 50
DESCRIPTORS = 512


def compute() -> None:
    until = time.perf_counter() + WORK_SECONDS
    while time.perf_counter() < until:
        pass


async def answer(strangers: Strangers, address: str, order: list[str]) -> None:
    await strangers.wait(address)
    order.append(address)
    compute()


@pytest.mark.anyio
async def test_strangers_get_a_part_of_the_loop_while_others_are_answered() -> None:
    strangers = Strangers()
    order: list[str] = []
    began = time.perf_counter()
    with strangers.known:
        await asyncio.gather(*(answer(strangers, "a", order) for _ in range(NUM_TURNS)))
    seconds = time.perf_counter() - began
    assert seconds > 0.9 * (NUM_TURNS - 1) * WORK_SECONDS / STRANGERS_SHARE
    assert len(order) == NUM_TURNS


@pytest.mark.anyio
async def test_addresses_take_turns_and_who_left_is_passed_over() -> None:
    strangers = Strangers()
    order: list[str] = []
    many = [asyncio.create_task(answer(strangers, "many", order)) for _ in range(NUM_TURNS)]
    await asyncio.sleep(0)
    few = asyncio.create_task(answer(strangers, "few", order))
    many[2].cancel()
    await asyncio.gather(*many, few, return_exceptions=True)
    assert order.index("few") < 4
    assert len(order) == NUM_TURNS, "all but the one that was cancelled"


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


async def come(url: str, key: str, statuses: Counter[str], leaving: asyncio.Event) -> None:
    """Ask once on a connection that stays; count the status, or that there was none."""
    host, port = url.removeprefix("http://").split(":")
    status = "none"
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n\r\n".encode())
        status = (await reader.readline()).decode().partition(" ")[2][:3] or "none"
        if status == "503":
            assert b"\r\nretry-after: 1\r\n" in await reader.readuntil(b"\r\n\r\n")
    except OSError:
        pass
    statuses[status] += 1
    await leaving.wait()
    if writer is not None:
        writer.close()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[str]:
    """The URL of a gateway with few descriptors."""
    with serve(ScriptedEngine()) as engine:
        port = free_port()
        environment = gateway_environment(port, tmp_path, [engine], {})
        migrate(environment)
        log = tmp_path / "gateway.log"
        command = [*python("gateway"), "serve"]
        process = start(command, environment, log, before_exec=few_descriptors)
        try:
            yield Server(url_of(port), process, log).wait().url
        finally:
            stop(process)


async def visit(url: str, key: str, victim: dict[str, str]) -> Counter[str]:
    """Twice as many connections of one key as there are descriptors, and turns of another."""
    statuses: Counter[str] = Counter()
    leaving = asyncio.Event()
    visits = []
    for number in range(1, 2 * DESCRIPTORS + 1):
        visits.append(asyncio.create_task(come(url, key, statuses, leaving)))
        if number % 8 == 0:
            await asyncio.sleep(0.05)
        if number % 128 == 0:
            async with httpx.AsyncClient(headers=victim, timeout=120) as client:
                reply = await client.post(f"{url}/v1/messages", json=body())
            assert reply.status_code == 200, reply.text
    leaving.set()
    await asyncio.gather(*visits)
    return statuses


def test_where_places_run_out_each_request_has_a_status_and_turns_go_on(
    gateway: str, tmp_path: Path
) -> None:
    """1,437 of 3,503 requests of one key ended in a reset, and everybody else got a 503."""
    key = new_key(tmp_path, "many")[1]
    victim = {**HEADERS, "x-api-key": new_key(tmp_path, "victim")[1]}
    statuses = asyncio.run(visit(gateway, key, victim))
    assert statuses["none"] == 0 and set(statuses) <= {"200", "503"}, statuses
