"""What the gateway itself costs: CPU, added latency and throughput, in front of a fixed-reply stub.

The stub (`gateway_engine.py`) answers at once from bytes that were made before; it is no
engine. Our gateway runs as shipped: keys, journal (synced), ledger and metrics. Whatever is
measured has core 0 to itself, stub and load share core 1. CPU time is user and system time of the
measured process and its children from /proc, which neighbours hardly change; ours counts until the
ledger has every turn. Peers (`--peers`, an environment with the dependency group `peers`) get the
same prompts and answers over Chat Completions; they keep no journal.

- *8 KB*: a marked system prompt of 8 KB and a question, answered by 1 KB of JSON; over 32
  connections and over one. What a turn adds is its p50 over one connection less that of the stub
  alone. Ours has a row on the machine's disk and one on tmpfs, whose syncs cost nothing: the
  difference is what the disk's syncs take.
- *chunks*: streams of 200 deltas, each sent by itself; at full speed (64 streams at once, 32,000 a
  second offered), and paced (100 streams, 50 a second each), where no two can share a write.
- *100k*: 400 KB, a system prompt and 100 messages of which all but the last question came before.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from scripts.bench.gateway_rig import (
    OTHER_CORE,
    PinnedServer,
    RawRequest,
    drive,
    engine_stub,
    libraries,
    litellm,
    our_gateway,
    peer,
    post,
    rust_router,
)
from scripts.bench.load import Measured, marked, rss_bytes
from scripts.setup.options import parse
from scripts.stack import cpu_seconds, family

CONNECTIONS, STREAMS = 32, 64
_SHM = Path("/dev/shm")
NUM_CHUNKS = 200
PEERS = ("vllm-router", "sglang-router")
Rounds = list[dict[str, float]]
"""A subject's measurements, a value a round; CPU in seconds, rates by second."""
SENTENCE = "Leases end when their time is over, and no sooner. "


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured and how it is asked. `is_ours`: its CPU counts until its ledger is whole.

    `is_slow` gets an eighth of the requests, or it would take most of an hour.
    """

    name: str
    start: Callable[[], AbstractContextManager[PinnedServer]]
    speaks_messages: bool = False
    is_ours: bool = False
    is_slow: bool = False

    def request(self, server: PinnedServer, prompt: dict[str, Any], **changes: Any) -> RawRequest:
        body = {"model": "holdfast-demo", "max_tokens": 64, **prompt, **changes}
        path = "/v1/messages" if self.speaks_messages else "/v1/chat/completions"
        headers = {"content-type": "application/json", **server.headers}
        if self.speaks_messages and "seed" in body:
            body["top_k"] = body.pop("seed")
        streams = bool(body.get("stream"))
        mark = b'"word ' if streams else b"A fixed answer. "
        return post(path, headers, json.dumps(body).encode(), mark, NUM_CHUNKS if streams else 64)


def main() -> int:
    options = parse(
        __doc__,
        peers=(Path, "virtual environment with the group `peers`"),
        rounds=3,
        requests=(4000, "of 8 KB, in each round"),
        data=(Path, "where our journal and ledger lie (default: /tmp)"),
        only=(str, "measure only what has this in its name"),
    )
    os.sched_setaffinity(0, {OTHER_CORE})
    with ExitStack() as stack:
        engine, disks = stack.enter_context(engine_stub()), _disks(options.data, stack)
        direct = uvloop.run(_latency(Subject("direct", engine_stub), engine, 600))
        floor: dict[str, float] | None = None
        p50, p99 = direct.percentile(0.5) * 1e3, direct.percentile(0.99) * 1e3
        print(f"direct: p50 {p50:.3f} ms, p99 {p99:.3f} ms")
        print(HEADINGS)
        for subject in _subjects(engine, options.peers, disks):
            if options.only is None or options.only in subject.name:
                with subject.start() as server:
                    rounds = uvloop.run(_measure(subject, server, options))
                    seen = {name: median(each[name] for each in rounds) for name in rounds[0]}
                    floor = floor or seen
                    print(_row(subject.name, seen, floor, direct, server), flush=True)
    return 0


def _disks(data: Path | None, stack: ExitStack) -> dict[str, Path]:
    """A folder on the machine's disk, and one on tmpfs where the machine has it."""
    places = {"disk": data} | ({"tmpfs": _SHM} if _SHM.is_dir() else {})
    return {
        name: Path(stack.enter_context(TemporaryDirectory(prefix="bench-gateway-", dir=place)))
        for name, place in places.items()
    }


def _subjects(engine: PinnedServer, peers: Path | None, disks: dict[str, Path]) -> list[Subject]:
    data = disks["disk"]
    found = [Subject("Litestar, aiohttp alone", partial(libraries, engine))]
    for name, folder in disks.items():
        messages = partial(our_gateway, engine, folder / "messages")
        found.append(Subject(f"Messages, {name}", messages, speaks_messages=True, is_ours=True))
    chat = partial(our_gateway, engine, data / "chat")
    found.append(Subject("Chat Completions, disk", chat, is_ours=True))
    if peers is not None:
        routers = {name: rust_router(name, venv=peers, key="") for name in PEERS}
        found += [Subject(name, partial(peer, router, engine, data))
                  for name, router in routers.items()]  # fmt: skip
        slow = litellm("holdfast-demo", venv=peers, key="none")
        found.append(Subject("litellm", partial(peer, slow, engine, data), is_slow=True))
    return found


async def _measure(subject: Subject, server: PinnedServer, options: argparse.Namespace) -> Rounds:
    rounds, share = Rounds(), 8 if subject.is_slow else 1
    small = [subject.request(server, prompt(subject, 8 << 10, n)) for n in range(64)]
    large = [subject.request(server, conversation(subject, n)) for n in range(50)]
    await drive(server.port, small, CONNECTIONS, 512 // share)
    for _ in range(options.rounds):
        seen: dict[str, float] = {}
        load, used = await _watched(subject, server, small, CONNECTIONS, options.requests // share)
        seen["cpu"], seen["rate"] = used / len(load.seconds), load.rate
        seen["many_p50"], seen["many_p99"] = load.percentile(0.5), load.percentile(0.99)
        await drive(server.port, small, 1, 50)
        load, used = await _watched(subject, server, small, 1, 600 // share)
        seen["single"] = used / len(load.seconds)
        seen["p50"], seen["p99"] = load.percentile(0.5), load.percentile(0.99)
        load, _ = await _streams(subject, server, STREAMS, 640 // share)
        seen["chunks"] = load.rate * NUM_CHUNKS
        load, used = await _streams(subject, server, 100, 100, seed=1)
        seen["paced"] = used / (len(load.seconds) * NUM_CHUNKS)
        await drive(server.port, large, 1, 5)
        load, used = await _watched(subject, server, large, 1, 50)
        seen["large"] = used / len(load.seconds)
        rounds.append(seen)
    return rounds


async def _streams(
    subject: Subject, server: PinnedServer, num_streams: int, num_requests: int, **changes: Any
) -> tuple[Measured, float]:
    requests = [
        subject.request(server, prompt(subject, 512, n), stream=True, max_tokens=200, **changes)
        for n in range(64)
    ]
    return await _watched(subject, server, requests, num_streams, num_requests)


async def _latency(subject: Subject, server: PinnedServer, number: int) -> Measured:
    requests = [subject.request(server, prompt(subject, 8 << 10, n)) for n in range(64)]
    await drive(server.port, requests, 1, 50)
    return await drive(server.port, requests, 1, number)


async def _watched(
    subject: Subject,
    server: PinnedServer,
    requests: list[RawRequest],
    connections: int,
    number: int,
) -> tuple[Measured, float]:
    """The load, and the CPU seconds that the server used for it."""
    before = cpu_seconds(server.pid)
    load = await drive(server.port, requests, connections, number)
    while subject.is_ours and server.backlog():
        await asyncio.sleep(0.2)
    return load, cpu_seconds(server.pid) - before


def prompt(subject: Subject, num_bytes: int, number: int) -> dict[str, Any]:
    """A marked system prompt of that many bytes, the same for all, and a question of its own."""
    return conversation_of(subject, text(num_bytes), [f"Question {number}: when does a lease end?"])


def conversation(subject: Subject, number: int) -> dict[str, Any]:
    """400 KB, as a long session sends them; only the last message is another one each time."""
    turns = [f"Turn {turn}. {text(3000)}" for turn in range(100)]
    return conversation_of(subject, text(100_000), [*turns, f"Question {number}: and then?"])


def conversation_of(subject: Subject, system: str, turns: list[str]) -> dict[str, Any]:
    """A marked system prompt and messages, of the user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
    if not subject.speaks_messages:
        return {"messages": [{"role": "system", "content": system}, *messages]}
    return {"system": marked(system), "messages": messages}


def text(num_bytes: int) -> str:
    return (SENTENCE * (num_bytes // len(SENTENCE) + 1))[:num_bytes]


COLUMNS = {
    "us CPU, 32": 1e6,
    "us CPU, 1": 1e6,
    "of the floor, 32": 1e3,
    "turns/s, 32": 1,
    "p50 ms, 32": 1e3,
    "p99 ms, 32": 1e3,
    "added p50 ms, 1": 1e3,
    "p50 ms, 1": 1e3,
    "p99 ms, 1": 1e3,
    "chunks/s, 64": 1,
    "us CPU a chunk": 1e6,
    "ms CPU, 100k": 1e3,
    "MB": 1e-6,
}
"""What is printed of each subject, and by what its seconds or bytes are multiplied; a number behind
a comma is that of connections."""
HEADINGS = "| subject | " + " | ".join(COLUMNS) + " |\n|---|" + "--:|" * len(COLUMNS)


def _row(
    name: str,
    seen: dict[str, float],
    floor: dict[str, float],
    direct: Measured,
    server: PinnedServer,
) -> str:
    """A row of a Markdown table, of medians; `floor` is the first subject's, the libraries'."""
    figures = [seen["cpu"], seen["single"], seen["cpu"] / floor["cpu"] * 1e-3, seen["rate"]]
    figures += [seen["many_p50"], seen["many_p99"]]
    figures += [seen["p50"] - direct.percentile(0.5), seen["p50"], seen["p99"]]
    figures += [seen["chunks"], seen["paced"], seen["large"], rss_bytes(family(server.pid))]
    factors = zip(figures, COLUMNS.values(), strict=True)
    told = (f"{figure * factor:,.{2 if factor == 1e3 else 0}f}" for figure, factor in factors)
    return f"| {name} | {' | '.join(told)} |"


if __name__ == "__main__":
    sys.exit(main())
