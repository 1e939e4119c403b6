"""Who waits to be accepted, beside a crowd that connects anew for each request."""

import asyncio
import multiprocessing
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from scripts.stack import Server, free_port, gateway_environment, migrate, python, start, stop
from scripts.stack import url_of as url_of_port
from tests.gateway.process import new_key
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import serve

DESCRIPTORS = 1024
NUM_CROWD = 200
NUM_ASKED = 21
NUM_AT_ONCE = 500
FIRST_RESEND_SECONDS = 1.0
"""Of a client whose first packet was dropped."""


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Server]:
    with serve(ScriptedEngine()) as engine:
        port = free_port()
        environment = gateway_environment(port, tmp_path, [engine], {})
        migrate(environment)
        log = tmp_path / "gateway.log"
        command = [*python("gateway"), "serve"]
        process = start(command, environment, log, before_exec=few_descriptors)
        try:
            yield Server(url_of_port(port), process, log).wait()
        finally:
            process.send_signal(signal.SIGCONT)
            stop(process)


def address_of(gateway: Server) -> tuple[str, int]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return host, int(port)


def models(key: str) -> bytes:
    head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-api-key: {key}"
    return f"{head}\r\n\r\n".encode()


def status_on(client: socket.socket) -> bytes:
    """Of the answer, which ends the connection."""
    answer = b""
    while piece := client.recv(1 << 16):
        answer += piece
    return answer[9:12]


def ask_anew(address: tuple[str, int], request: bytes) -> bytes:
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(request)
        return status_on(client)


def crowd_of(address: tuple[str, int], request: bytes, answers: Any) -> None:
    """So many clients that connect for each request, until the process is ended."""

    async def ask_again_and_again() -> None:
        while True:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request)
            await reader.read()
            answers.value += 1
            writer.close()

    async def ask() -> None:
        await asyncio.gather(*(ask_again_and_again() for _ in range(NUM_CROWD)))

    asyncio.run(ask())


def test_who_connects_waits_for_few_answers_to_a_crowd(gateway: Server, tmp_path: Path) -> None:
    """The kernel's queue was emptied as slowly as requests began, so each new connection waited for
    an answer to most of the crowd."""
    address = address_of(gateway)
    crowd_key = new_key(tmp_path, "crowd")[1]
    request = models(new_key(tmp_path, "victim")[1])
    ask_anew(address, request)
    context = multiprocessing.get_context("spawn")
    answers = context.Value("q", 0, lock=False)
    crowd = context.Process(target=crowd_of, args=(address, models(crowd_key), answers))
    crowd.start()
    beside = []
    try:
        while answers.value < 5 * NUM_CROWD:
            time.sleep(0.01)
        for _ in range(NUM_ASKED):
            before = answers.value
            assert ask_anew(address, request) == b"200"
            beside.append(answers.value - before)
            time.sleep(0.03)
    finally:
        crowd.kill()
        crowd.join()
    # Of some this process was late to see the answer, as others took the processor.
    assert sorted(beside)[NUM_ASKED // 4] < NUM_CROWD / 5, beside


def test_a_crowd_that_connects_at_once_has_no_packet_dropped(
    gateway: Server, tmp_path: Path
) -> None:
    """While the gateway does something else. Of a queue of 64, whoever came behind it connected
    a second later, whoever it was."""
    address = address_of(gateway)
    request = models(new_key(tmp_path, "crowd")[1])
    ask_anew(address, request)
    gateway.process.send_signal(signal.SIGSTOP)
    with ExitStack() as stack:
        clients = []
        for _ in range(NUM_AT_ONCE):
            client = socket.create_connection(address, timeout=FIRST_RESEND_SECONDS / 2)
            clients.append(stack.enter_context(client))
            client.sendall(request)
        gateway.process.send_signal(signal.SIGCONT)
        for client in clients:
            client.settimeout(60)
        assert {status_on(client) for client in clients} == {b"200"}
