"""CPU time that a turn costs the gateway, beside the floor of its libraries, in one run.

    python -m scripts.bench.gateway_cpu

Both servers run all the time and take turns, so that what else the machine does falls on both. CPU
time is that of all threads, from the scheduler's own counts; ours counts until the ledger has every
turn. Our gateway runs as shipped (keys, journal, ledger, metrics), before the stub of
`gateway_engine.py`. Printed are medians of the rounds, and their ratio to the floor:

- *at 32*, *at 1*: a turn of 8 KB over so many connections;
- *message*: what each further message of a conversation costs, from sessions that grow by two
  messages of 400 bytes with every turn, short ones and ones that are 200 messages longer.
"""

import asyncio
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from scripts.bench.gateway import Subject, conversation_of, prompt, text
from scripts.bench.gateway_rig import (
    OTHER_CORE,
    PinnedServer,
    RawRequest,
    drive,
    engine_stub,
    libraries,
    our_gateway,
)
from scripts.setup.options import parse
from scripts.stack import family

_SHORT, _LONG = 10, 210
_SESSION_TURNS = 40
Row = dict[str, float]


def main() -> int:
    options = parse(
        __doc__,
        rounds=5,
        requests=(1000, "of 8 KB at 32 connections in each round; a third of them at one"),
        data=(Path, "where our journal and ledger lie (default: /tmp)"),
        chat=(False, "also Chat Completions"),
    )
    os.sched_setaffinity(0, {OTHER_CORE})
    with (
        TemporaryDirectory(prefix="bench-gateway-", dir=options.data) as directory,
        ExitStack() as stack,
    ):
        engine = stack.enter_context(engine_stub())
        data = Path(directory)
        subjects = [
            Subject("Litestar, aiohttp alone", lambda: libraries(engine)),
            Subject(
                "holdfast, Messages",
                lambda: our_gateway(engine, data / "messages"),
                speaks_messages=True,
                is_ours=True,
            ),
        ]
        if options.chat:
            started = our_gateway(engine, data / "chat")
            subjects.append(Subject("holdfast, Chat Completions", lambda: started, is_ours=True))
        running = [(each, stack.enter_context(each.start())) for each in subjects]
        uvloop.run(_compare(running, options.rounds, options.requests))
    return 0


async def _compare(
    running: list[tuple[Subject, PinnedServer]], num_rounds: int, num_requests: int
) -> None:
    rows: dict[str, list[Row]] = {subject.name: [] for subject, _ in running}
    for subject, server in running:
        await _used(subject, server, _small(subject, server), 32, 400)
    for number in range(num_rounds):
        for subject, server in running:
            small = _small(subject, server)
            at_32, threads = await _used(subject, server, small, 32, num_requests)
            at_1, _ = await _used(subject, server, small, 1, num_requests // 3)
            found = {"at 32": at_32, "others at 32": threads, "at 1": at_1}
            if subject.is_ours:
                found["message"] = await _each_message(subject, server, number)
            rows[subject.name].append(found)
    floor = _medians(rows[running[0][0].name])
    for subject, _ in running:
        seen = _medians(rows[subject.name])
        told = [f"{name} {us:6.1f} us" for name, us in seen.items()]
        ratios = [f"{name} {seen[name] / floor[name]:.2f} x" for name in ("at 32", "at 1")]
        print(f"{subject.name:28}{', '.join(told)}; of the floor {', '.join(ratios)}", flush=True)


def _medians(rows: list[Row]) -> Row:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _small(subject: Subject, server: PinnedServer) -> list[RawRequest]:
    return [subject.request(server, prompt(subject, 8 << 10, n)) for n in range(64)]


async def _each_message(subject: Subject, server: PinnedServer, number: int) -> float:
    """Microseconds for each further message: long sessions less short ones, over their lengths."""
    seconds = {}
    for first in (_SHORT, _LONG):
        turns = list(_session(subject, server, first, f"{number}-{first}"))
        seconds[first], _ = await _used(subject, server, turns, 1, len(turns))
    return (seconds[_LONG] - seconds[_SHORT]) / (_LONG - _SHORT)


def _session(subject: Subject, server: PinnedServer, first: int, name: str) -> Iterator[RawRequest]:
    """A conversation that grows by two messages a turn."""
    said = [f"{name}: message {n}. {text(380)}" for n in range(first + 2 * _SESSION_TURNS)]
    for turn in range(_SESSION_TURNS):
        upto = first + 1 + 2 * turn
        body: dict[str, Any] = conversation_of(subject, text(8 << 10), said[:upto])
        yield subject.request(server, body)


async def _used(
    subject: Subject,
    server: PinnedServer,
    requests: list[RawRequest],
    connections: int,
    number: int,
) -> tuple[float, float]:
    """Microseconds of CPU a request, of all threads and of all but the main thread."""
    main, others = _threads(server.pid)
    load = await drive(server.port, requests, connections, number)
    while subject.is_ours and server.backlog():
        await asyncio.sleep(0.05)
    main_now, others_now = _threads(server.pid)
    done = len(load.seconds)
    beside = (others_now - others) / done * 1e6
    return (main_now - main) / done * 1e6 + beside, beside


def _threads(pid: int) -> tuple[float, float]:
    """CPU seconds of the main thread, and of the other threads and the process's children."""
    main = others = 0.0
    for member in family(pid):
        for task in Path(f"/proc/{member}/task").iterdir():
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            if member == pid and task.name == str(pid):
                main += seconds
            else:
                others += seconds
    return main, others


if __name__ == "__main__":
    sys.exit(main())
