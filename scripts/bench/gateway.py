"""What the gateway itself costs: CPU, added latency and throughput, in front of a fixed-reply stub.

The stub (`gateway_engine.py`) is no engine: it answers at once from bytes that were made before.
Our gateway runs as shipped: keys, journal (synced), ledger and metrics. Whatever is measured has
core 0 to itself, and stub and load share core 1. CPU time is the user and system time of the
measured process and its children, from /proc. Neighbours hardly change it. Our gateway's counts
until its ledger has every turn. Thread switches are how often one of its threads waited, for each
turn.

- *8 KB*: a marked system prompt of 8 KB and a question, answered by 1 KB of JSON, over 32
  connections and over one. A turn adds its p50 over one connection less that of the stub alone.
  Ours has a row on the machine's disk and one on tmpfs, whose syncs cost nothing.
- *chunks*: 64 streams at once of 200 deltas, each sent by itself. 32,000 a second are offered.
- *100k*: 400 KB: a system prompt and 100 messages, of which only the last question is new.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from gateway.journal.file import rows_in
from gateway.journal.table import ASIDE
from scripts import stack
from scripts.bench.load import marked
from scripts.bench.report import percentile
from scripts.setup.options import parse
from scripts.stack import API_HEADERS, cpu_seconds, free_port, python, url_of

SERVER_CORE = 0
OTHER_CORE = 1
CONNECTIONS = 32
STREAMS = 64
NUM_CHUNKS = 200
MODEL = "holdfast-demo"
SENTENCE = "Leases end when their time is over, and no sooner. "
Rounds = list[dict[str, float]]
"""A subject's figures, by their names, for each round. CPU is in seconds, rates are a second."""


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request that is ready to be sent."""

    data: bytes
    # The answer must contain `mark` this many times.
    mark: bytes
    num_marks: int


@dataclass(slots=True)
class Measured:
    """The times of one measurement."""

    # The time of every answer, in the order of their ends.
    seconds: list[float] = field(default_factory=list)
    # The time of the whole measurement.
    wall_seconds: float = 0.0
    # How often a thread of the server waited and gave way to another.
    switches: int = 0

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.seconds) / self.wall_seconds

    def percentile(self, share: float) -> float:
        """A percentile of the answers' times, in seconds."""
        return percentile(self.seconds, share)


class RawConnection(asyncio.Protocol):
    """HTTP/1.1 over a raw socket. It takes little CPU from the measured server."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._parts: list[bytes] = []
        self._missing: int | None = None
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the connection was lost"))

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._missing is None:
            head, end, data = b"".join(self._parts).partition(b"\r\n\r\n")
            if not end:
                return
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._missing = int(length or -1)  # below 0 where the body is chunked
        if self._missing >= 0:
            self._missing -= len(data)
            is_over = self._missing <= 0
        else:
            tail = data if len(data) >= 5 else b"".join(self._parts[-5:])
            is_over = tail.endswith(b"0\r\n\r\n")
        if is_over and self._answer is not None and not self._answer.done():
            self._answer.set_result(b"".join(self._parts))

    async def ask(self, request: RawRequest) -> None:
        """Send a request and read its answer. Raise RuntimeError if it is not the stub's answer."""
        self._parts = []
        self._missing = None
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request.data)
        answer = await asyncio.wait_for(self._answer, 60)
        is_whole = answer.count(request.mark) == request.num_marks
        if not answer.startswith(b"HTTP/1.1 200 ") or not is_whole:
            raise RuntimeError(f"not the stub's answer: {answer[:2000]!r}")


async def drive(
    port: int, requests: Sequence[RawRequest], num_connections: int, num_requests: int
) -> Measured:
    """Ask `num_requests` times. Each connection asks again as soon as it has its answer."""
    loop = asyncio.get_running_loop()
    measured = Measured()
    numbers = iter(range(num_requests))

    async def work(connection: RawConnection) -> None:
        for number in numbers:
            begun = time.perf_counter()
            await connection.ask(requests[number % len(requests)])
            measured.seconds.append(time.perf_counter() - begun)

    connections = []
    try:
        for _ in range(num_connections):
            pair = await loop.create_connection(RawConnection, "127.0.0.1", port)
            connections.append(pair[1])
        begun = time.perf_counter()
        await asyncio.gather(*map(work, connections))
        measured.wall_seconds = time.perf_counter() - begun
    finally:
        for connection in connections:
            connection.transport.close()
    return measured


def post(
    path: str, headers: dict[str, str], body: bytes, mark: bytes, num_marks: int
) -> RawRequest:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return RawRequest("\r\n".join([*lines, "", ""]).encode() + body, mark, num_marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured: how it is started, and how it is asked."""

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    ready: str = "/readyz"
    core: int = SERVER_CORE
    speaks_messages: bool = False
    # A gateway's of ours. Its CPU counts until its ledger is whole.
    journal: Path | None = None

    @contextmanager
    def running(self) -> Iterator[int]:
        """The id of its process, once it is ready. Raises StartError if it never gets ready."""
        pinned = ["taskset", "-c", str(self.core), *self.command]
        base = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        with stack.serving(
            pinned, self.environment, self.port, ready=self.ready, base=base, quiet=True
        ) as server:
            yield server.wait().pid

    def request(self, system: str, turns: Sequence[str], **changes: Any) -> RawRequest:
        """A marked system prompt and messages, of the user and the assistant in turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 64, **changes}
        if self.speaks_messages:
            path = "/v1/messages"
            body["system"] = marked(system)
            body["messages"] = messages
        else:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "system", "content": system}, *messages]
        streams = bool(body.get("stream"))
        headers = {"content-type": "application/json", **self.headers}
        mark = b'"word ' if streams else b"A fixed answer. "
        return post(path, headers, json.dumps(body).encode(), mark, NUM_CHUNKS if streams else 64)

    def questions(self, num_bytes: int, **changes: Any) -> list[RawRequest]:
        """64 with the same system prompt of that many bytes, and a question of its own each."""
        questions = (f"Question {number}: when does a lease end?" for number in range(64))
        return [self.request(text(num_bytes), [question], **changes) for question in questions]

    async def watched(
        self, pid: int, requests: Sequence[RawRequest], connections: int, number: int
    ) -> tuple[Measured, float]:
        """The load, and the CPU seconds that the server used for it."""
        before = cpu_seconds(pid)
        switches = thread_switches(pid)
        load = await drive(self.port, requests, connections, number)
        load.switches = thread_switches(pid) - switches
        # The journal's files tell, since a look at its metrics costs it as much CPU as five turns.
        while self.journal and any(row.state != ASIDE for row in rows_in(self.journal)):
            await asyncio.sleep(0.2)
        return load, cpu_seconds(pid) - before


def thread_switches(pid: int) -> int:
    """How often the process's threads have waited so far (`voluntary_ctxt_switches`, proc(5)).
    Unlike CPU time it is nearly the same on a busy machine."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text("ascii", "replace").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


def text(num_bytes: int) -> str:
    return (SENTENCE * (num_bytes // len(SENTENCE) + 1))[:num_bytes]


def main() -> int:
    options = parse(
        __doc__,
        rounds=3,
        requests=(4000, "of 8 KB, in each round"),
        data=(Path, "where our journal and ledger lie (default: /tmp)"),
        only=(str, "measure only what has this in its name"),
    )
    os.sched_setaffinity(0, {OTHER_CORE})
    port = free_port()
    command = [*python("scripts.bench.gateway_engine"), str(port)]
    engine = Subject(name="direct", command=command, port=port, core=OTHER_CORE)
    places = {"disk": options.data, "tmpfs": Path("/dev/shm")}
    with ExitStack() as contexts:
        contexts.enter_context(engine.running())
        folders = {
            name: Path(
                contexts.enter_context(TemporaryDirectory(prefix="bench-gateway-", dir=place))
            )
            for name, place in places.items()
            if place is None or place.is_dir()
        }
        direct = uvloop.run(_latency(engine))
        p50 = direct.percentile(0.5)
        p99 = direct.percentile(0.99)
        print(f"direct: p50 {p50 * 1e3:.3f} ms, p99 {p99 * 1e3:.3f} ms")
        print("| subject | " + " | ".join(COLUMNS) + " |\n|---|" + "--:|" * len(COLUMNS))
        floor: dict[str, float] | None = None
        for subject in _subjects(url_of(port), folders):
            if options.only is None or options.only in subject.name:
                with subject.running() as pid:
                    rounds = uvloop.run(_measure(subject, pid, options))
                    medians = {
                        name: median(figures[name] for figures in rounds) for name in rounds[0]
                    }
                    medians["added"] = medians["p50"] - p50
                floor = floor or medians
                medians["of floor"] = medians["cpu"] / floor["cpu"]
                cells = (
                    f"{medians[figure] * factor:,.{decimals}f}"
                    for figure, factor, decimals in COLUMNS.values()
                )
                print(f"| {subject.name} | {' | '.join(cells)} |", flush=True)
    return 0


COLUMNS = {
    "us CPU, 32": ("cpu", 1e6, 0),
    "us CPU, 1": ("single", 1e6, 0),
    "thread switches, 32": ("switches", 1, 2),
    "of the floor, 32": ("of floor", 1, 2),
    "turns/s, 32": ("rate", 1, 0),
    "p50 ms, 32": ("many_p50", 1e3, 2),
    "p99 ms, 32": ("many_p99", 1e3, 2),
    "added p50 ms, 1": ("added", 1e3, 2),
    "p50 ms, 1": ("p50", 1e3, 2),
    "p99 ms, 1": ("p99", 1e3, 2),
    "chunks/s, 64": ("chunks", 1, 0),
    "ms CPU, 100k": ("large", 1e3, 2),
}
"""By heading: a figure, a factor for it, and how many decimals are printed. A number behind a comma
in a heading is that of connections. The floor is the first subject."""


def _subjects(engine: str, folders: dict[str, Path]) -> Iterator[Subject]:
    port = free_port()
    name = "Litestar, aiohttp alone"
    command = [*python("scripts.bench.gateway_floor"), str(port), engine]
    yield Subject(name=name, command=command, port=port)
    for name, folder in folders.items():
        yield _ours(f"Messages, {name}", engine, folder / "messages", speaks_messages=True)
    yield _ours("Chat Completions, disk", engine, folders["disk"] / "chat", speaks_messages=False)


def _ours(name: str, engine: str, data: Path, *, speaks_messages: bool) -> Subject:
    """Our gateway as shipped: SQLite for journal and ledger, a key, metrics, log level info."""
    port = free_port()
    settings = stack.gateway_environment(port, data, [engine])
    stack.migrate(settings)
    return Subject(
        name=name,
        command=[*python("gateway"), "serve"],
        port=port,
        environment=settings,
        headers=API_HEADERS,
        speaks_messages=speaks_messages,
        journal=data / "journal",
    )


async def _latency(engine: Subject) -> Measured:
    requests = engine.questions(8 << 10)
    await drive(engine.port, requests, 1, 50)
    return await drive(engine.port, requests, 1, 600)


async def _measure(subject: Subject, pid: int, options: argparse.Namespace) -> Rounds:
    rounds = Rounds()
    small = subject.questions(8 << 10)
    streams = subject.questions(512, stream=True, max_tokens=200)
    # These are requests of a long session: only the last message is new each time.
    turns = [f"Turn {turn}. {text(3000)}" for turn in range(100)]
    conversations = ([*turns, f"Question {number}: and then?"] for number in range(50))
    large = [subject.request(text(100_000), conversation) for conversation in conversations]
    await drive(subject.port, small, CONNECTIONS, 512)
    for _ in range(options.rounds):
        figures: dict[str, float] = {}
        load, cpu = await subject.watched(pid, small, CONNECTIONS, options.requests)
        figures["cpu"] = cpu / len(load.seconds)
        figures["switches"] = load.switches / len(load.seconds)
        figures["rate"] = load.rate
        figures["many_p50"] = load.percentile(0.5)
        figures["many_p99"] = load.percentile(0.99)
        await drive(subject.port, small, 1, 50)
        load, cpu = await subject.watched(pid, small, 1, 600)
        figures["single"] = cpu / len(load.seconds)
        figures["p50"] = load.percentile(0.5)
        figures["p99"] = load.percentile(0.99)
        load, _ = await subject.watched(pid, streams, STREAMS, 640)
        figures["chunks"] = load.rate * NUM_CHUNKS
        await drive(subject.port, large, 1, 5)
        load, cpu = await subject.watched(pid, large, 1, 50)
        figures["large"] = cpu / len(load.seconds)
        rounds.append(figures)
    return rounds


if __name__ == "__main__":
    sys.exit(main())
