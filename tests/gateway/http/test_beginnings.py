"""A crowd of one key's connections beside the turns of another key."""

import asyncio
import multiprocessing
import socket
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from gateway.base.bounds import Tuning
from gateway.http.beginnings import BATCH, Beginnings
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.serving import HEADERS

NUM_REQUESTS = 500
NUM_STEPS = 20
NUM_CROWD = 200
NUM_TURNS = 9


async def begin(beginnings: Beginnings, key: str, order: list[str], workspace: str = "w") -> None:
    await beginnings.wait(workspace, key)
    order.append(key)


@pytest.mark.anyio
async def test_few_of_a_crowd_begin_between_two_steps_of_another_request() -> None:
    beginnings = Beginnings()
    order: list[str] = []
    crowd = [asyncio.create_task(begin(beginnings, "crowd", order)) for _ in range(NUM_REQUESTS)]
    await asyncio.sleep(0)
    num_before = len(order)
    for _ in range(NUM_STEPS):
        await asyncio.sleep(0)
    assert 0 < len(order) - num_before <= BATCH * (NUM_STEPS + 1)
    await asyncio.gather(*crowd)
    assert len(order) == NUM_REQUESTS


@pytest.mark.anyio
async def test_keys_take_turns_and_who_left_is_passed_over() -> None:
    beginnings = Beginnings()
    order: list[str] = []
    crowd = [asyncio.create_task(begin(beginnings, "crowd", order)) for _ in range(NUM_REQUESTS)]
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(begin(beginnings, key, order)) for key in "abc"]
    crowd[BATCH + 2].cancel()
    await asyncio.gather(*tasks)
    assert len(order) <= 8 * BATCH and [key for key in order if key != "crowd"] == list("abc")
    await asyncio.gather(*crowd, return_exceptions=True)
    assert len(order) == NUM_REQUESTS + 2, "all but the one that was cancelled"
    await asyncio.sleep(0)
    await begin(beginnings, "later", order)
    assert order[-1] == "later", "where nobody waits, a request begins at once"


@pytest.mark.anyio
async def test_a_workspace_of_many_keys_has_as_many_turns_as_one_of_a_single_key() -> None:
    beginnings = Beginnings()
    order: list[str] = []
    many = [
        asyncio.create_task(begin(beginnings, f"many {number}", order, "many"))
        for number in range(NUM_REQUESTS)
    ]
    few = [asyncio.create_task(begin(beginnings, "few", order, "few")) for _ in range(NUM_STEPS)]
    await asyncio.gather(*few, *many)
    last_few = max(place for place, key in enumerate(order) if key == "few")
    assert last_few <= 2 * (NUM_STEPS + BATCH), "in turn, though the one has 500 keys"
    assert len(order) == NUM_REQUESTS + NUM_STEPS


async def ask_again_and_again(url: str, request: bytes, answers: Any) -> None:
    """On one connection; count the answers."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    while True:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        answers.value += 1


def crowd_of(url: str, request: bytes, answers: Any) -> None:
    """Until the process is ended."""

    async def ask() -> None:
        await asyncio.gather(
            *(ask_again_and_again(url, request, answers) for _ in range(NUM_CROWD))
        )

    asyncio.run(ask())


def answers_beside(url: str, request: bytes, key: str) -> list[int]:
    """The answers that a crowd got during each of another key's turns. It has its own process:
    what it has still to read holds up no turn."""
    context = multiprocessing.get_context("spawn")
    answers = context.Value("q", 0, lock=False)
    crowd = context.Process(target=crowd_of, args=(url, request, answers), daemon=True)
    crowd.start()
    beside = []
    try:
        with httpx.Client(base_url=url, headers={**HEADERS, "x-api-key": key}, timeout=300) as http:
            while answers.value < NUM_CROWD:
                time.sleep(0.01)
            for _ in range(NUM_TURNS):
                before = answers.value
                reply = http.post("/v1/messages", json=body())
                beside.append(answers.value - before)
                assert reply.status_code == 200, reply.text
    finally:
        crowd.kill()
        crowd.join()
    return beside


def test_a_turn_passes_by_while_a_crowd_of_another_key_gets_few_answers(shared: Stack) -> None:
    """Each step of the turn waited for an answer to every connection: 2,200 answers a turn."""
    admin = Admin(shared.url)
    crowd, victim = (admin.make_key("default")[1] for _ in range(2))
    request = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {crowd}\r\n\r\n".encode()
    beside = answers_beside(shared.url, request, victim)
    # While the turn waits for its engine, the crowd is answered: more so on a busy machine.
    assert sorted(beside)[NUM_TURNS // 2] < 5 * NUM_CROWD, beside


def test_who_shows_a_known_key_has_its_place_before_its_request_begins(shared: Stack) -> None:
    """More connections of one address than may be there without a key, such as those of a proxy.
    Those that waited for their beginning were turned away with a 503."""
    key = Admin(shared.url).make_key("default")[1]
    request = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n\r\n".encode()
    host, port = shared.url.removeprefix("http://").split(":")
    httpx.get(f"{shared.url}/v1/models", headers={"x-api-key": key})
    with ExitStack() as stack:
        clients = []
        for _ in range(2 * Tuning().connections_per_address):
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            client.sendall(request)
            clients.append(client)
        statuses = {client.recv(1 << 16).partition(b"\r\n")[0] for client in clients}
    assert statuses == {b"HTTP/1.1 200 OK"}
