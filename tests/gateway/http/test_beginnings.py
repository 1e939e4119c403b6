"""A crowd of one key's connections beside the turns of another key."""

import asyncio
from contextlib import suppress

import httpx
import pytest

from gateway.http.beginnings import Beginnings
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.serving import HEADERS

NUM_REQUESTS = 500
NUM_STEPS = 20
NUM_CONNECTIONS = 200
NUM_TURNS = 5


async def begin(beginnings: Beginnings, key: str, order: list[str]) -> None:
    await beginnings.wait(key)
    order.append(key)


@pytest.mark.anyio
async def test_one_of_a_crowd_begins_between_two_steps_of_another_request() -> None:
    beginnings = Beginnings()
    order: list[str] = []
    crowd = [asyncio.create_task(begin(beginnings, "crowd", order)) for _ in range(NUM_REQUESTS)]
    await asyncio.sleep(0)
    num_before = len(order)
    for _ in range(NUM_STEPS):
        await asyncio.sleep(0)
    assert 0 < len(order) - num_before <= NUM_STEPS + 1
    await asyncio.gather(*crowd)
    assert len(order) == NUM_REQUESTS


@pytest.mark.anyio
async def test_keys_take_turns_and_who_left_is_passed_over() -> None:
    beginnings = Beginnings()
    order: list[str] = []
    crowd = [asyncio.create_task(begin(beginnings, "crowd", order)) for _ in range(NUM_REQUESTS)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(begin(beginnings, key, order)) for key in "abc"]
    crowd[2].cancel()
    await asyncio.gather(*others)
    assert len(order) <= 8 and [key for key in order if key != "crowd"] == list("abc")
    await asyncio.gather(*crowd, return_exceptions=True)
    assert len(order) == NUM_REQUESTS + 2, "all but the one that was cancelled"
    await asyncio.sleep(0)
    await begin(beginnings, "later", order)
    assert order[-1] == "later", "where nobody waits, a request begins at once"


async def ask_again_and_again(url: str, sent: bytes, answers: list[int]) -> None:
    """On one connection; count the answers."""
    host, port = url.removeprefix("http://").split(":")
    num_sent = sent.count(b"\r\n\r\n")
    with suppress(OSError, asyncio.IncompleteReadError):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            while True:
                writer.write(sent)
                for _ in range(num_sent):
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                    await reader.readexactly(int(length))
                    answers[0] += 1
        finally:
            writer.close()


async def answers_beside(url: str, sent: bytes, key: str) -> list[int]:
    """The answers that a crowd got during each of another key's turns."""
    answers = [0]
    crowd = [
        asyncio.create_task(ask_again_and_again(url, sent, answers)) for _ in range(NUM_CONNECTIONS)
    ]
    beside = []
    headers = {**HEADERS, "x-api-key": key}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300) as http:
        while answers[0] < NUM_CONNECTIONS:
            await asyncio.sleep(0.01)
        for _ in range(NUM_TURNS):
            before = answers[0]
            reply = await http.post("/v1/messages", json=body())
            beside.append(answers[0] - before)
            assert reply.status_code == 200, reply.text
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    return beside


@pytest.mark.parametrize("num_at_once", [1, 8])
def test_a_turn_passes_by_while_a_crowd_of_another_key_gets_few_answers(
    shared: Stack, num_at_once: int
) -> None:
    """Each step of the turn waited for an answer to every connection: 1,800 answers a turn."""
    admin = Admin(shared.url)
    crowd, victim = (admin.make_key("default")[1] for _ in range(2))
    sent = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {crowd}\r\n\r\n".encode()
    beside = asyncio.run(answers_beside(shared.url, sent * num_at_once, victim))
    assert sorted(beside)[NUM_TURNS // 2] < 2 * NUM_CONNECTIONS, beside
