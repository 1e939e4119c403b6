"""What both servers share: memory that goes back to the system, connections that are accepted."""

import asyncio
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.asgi import ACCEPTS_A_ROUND, SteadyServer

NUM_CONNECTIONS = 80

FLOOD = """
import psutil
from engine.heap import trim_heap

process = psutil.Process()
blocks = [bytes(4000) for _ in range(50_000)]
kept = blocks[::50]
before = process.memory_info().rss
del blocks
held = process.memory_info().rss
trim_heap()
print(before, held, process.memory_info().rss, len(kept))
"""


def test_pages_between_blocks_that_are_in_use_go_back_to_the_system() -> None:
    """200 MB of small blocks were freed but for 2 %, and all of it stayed with the process."""
    command = [sys.executable, "-c", FLOOD]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, while_held, after, _ = (int(word) for word in text.split())
    assert while_held > 0.9 * before, "by itself it does not come back"
    assert before - after > 150_000_000


class Counting(HttpToolsProtocol):
    """Counts the connections that were accepted in each round of the loop."""

    def __init__(self, rounds: list[int], **options: Any) -> None:
        super().__init__(**options)
        self._rounds = rounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._rounds[-1] += 1


async def accepted_by_round() -> list[int]:
    """How many connections each round accepts while NUM_CONNECTIONS wait."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise NotImplementedError

    rounds = [0]
    protocol: Any = partial(Counting, rounds)
    config = uvicorn.Config(app, port=0, http=protocol, lifespan="off", log_config=None)
    server = SteadyServer(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    address = server.servers[0].sockets[0].getsockname()
    with ExitStack() as stack:
        for _ in range(NUM_CONNECTIONS):
            stack.enter_context(socket.create_connection(address, 30))
        async with asyncio.timeout(60):
            while sum(rounds) < NUM_CONNECTIONS:
                rounds.append(0)
                await asyncio.sleep(0)
    server.should_exit = True
    await serving
    return [count for count in rounds if count]


def test_several_connections_are_accepted_in_a_round() -> None:
    """It was one, so that a newcomer waited for an answer to each connection before it."""
    counts = uvloop.run(accepted_by_round())
    assert max(counts) == ACCEPTS_A_ROUND
    assert len(counts) < NUM_CONNECTIONS // 2
