"""What the gateway itself costs: CPU, added latency and throughput, in front of a fixed-reply stub.

The stub (`gateway_engine.py`) answers at once from bytes that were made before; it is no
engine. Our gateway runs as shipped: keys, journal (synced), ledger and metrics. Whatever is
measured has core 0 to itself, stub and load share core 1. CPU time is user and system time of the
measured process and its children from /proc, which neighbours hardly change; ours counts until the
ledger has every turn. Peers (`--peers`, an environment with the dependency group `peers`) get the
same prompts and answers over Chat Completions; they keep no journal.

- *8 KB*: a marked system prompt of 8 KB and a question, answered by 1 KB of JSON.
- *chunks*: streams of 200 deltas, each sent by itself; at full speed (64 streams at once, 32,000 a
  second offered), and paced (100 streams, 50 a second each), where no two can share a write.
- *100k*: 400 KB, a system prompt and 100 messages of which all but the last question came before.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from scripts.bench.gateway_load import RawRequest, drive, post
from scripts.bench.gateway_profile import profile
from scripts.bench.gateway_servers import (
    OTHER_CORE,
    PinnedServer,
    engine_stub,
    libraries,
    our_gateway,
    peer,
)
from scripts.bench.load import Measured, marked, rss_bytes
from scripts.bench.routers import litellm, rust_router
from scripts.setup.options import parse
from scripts.stack import cpu_seconds, family

CONNECTIONS, STREAMS = 32, 64
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
        verbose=(False, "also what each round was"),
        profile=(False, "where our CPU goes, with py-spy"),
        only=(str, "measure only what has this in its name"),
    )
    os.sched_setaffinity(0, {OTHER_CORE})
    with (
        TemporaryDirectory(prefix="bench-gateway-", dir=options.data) as directory,
        engine_stub() as engine,
    ):
        sync = sync_seconds(Path(directory)) * 1e3
        print(f"one sync of 8 KB to this disk: {sync:.2f} ms (median); our turns wait for two")
        direct = uvloop.run(_latency(Subject("direct", engine_stub), engine, 600))
        p50, p99 = direct.percentile(0.5) * 1e3, direct.percentile(0.99) * 1e3
        print(f"direct: p50 {p50:.3f} ms, p99 {p99:.3f} ms")
        print(HEADINGS)
        for subject in _subjects(engine, options.peers, Path(directory)):
            if options.only is None or options.only in subject.name:
                with subject.start() as server:
                    rounds = uvloop.run(_measure(subject, server, options))
                    print(_row(subject.name, rounds, direct, server), flush=True)
                    if options.profile and subject.is_ours:
                        print(uvloop.run(_profile(subject, server, Path(directory))), flush=True)
    return 0


def _subjects(engine: PinnedServer, peers: Path | None, data: Path) -> list[Subject]:
    messages, chat = partial(our_gateway, engine, data / "messages"), data / "chat"
    found = [
        Subject("holdfast, Messages", messages, speaks_messages=True, is_ours=True),
        Subject("holdfast, Chat Completions", partial(our_gateway, engine, chat), is_ours=True),
        Subject("Litestar, aiohttp alone", partial(libraries, engine)),
    ]
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
        load = await _latency(subject, server, 600 // share)
        seen["p50"], seen["p99"] = load.percentile(0.5), load.percentile(0.99)
        load, _ = await _streams(subject, server, STREAMS, 640 // share)
        seen["chunks"] = load.rate * NUM_CHUNKS
        load, used = await _streams(subject, server, 100, 100, seed=1)
        seen["paced"] = used / (len(load.seconds) * NUM_CHUNKS)
        await drive(server.port, large, 1, 5)
        load, used = await _watched(subject, server, large, 1, 50)
        seen["large"] = used / len(load.seconds)
        rounds.append(seen)
        if options.verbose:
            print(f"  {seen}", file=sys.stderr)
    return rounds


async def _profile(subject: Subject, server: PinnedServer, data: Path) -> str:
    """Of 8 KB at 32 connections."""
    small = [subject.request(server, prompt(subject, 8 << 10, n)) for n in range(64)]
    path = data / "samples"
    return await profile(server.pid, path, 8, lambda: drive(server.port, small, CONNECTIONS, 500))


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


def sync_seconds(directory: Path) -> float:
    """The median of 100 writes of 8 KB, each synced.

    They overwrite a file of that length, as a write-ahead log does once it has wrapped around.
    """
    seconds = []
    with (directory / "sync").open("w+b", buffering=0) as file:
        file.write(bytes(100 * 8192))
        os.fsync(file.fileno())
        file.seek(0)
        for _ in range(100):
            file.write(bytes(8192))
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


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


HEADINGS = (
    f"{'':28}{'us CPU':>8}{'req/s':>8}{'added p50':>11}{'p99':>8}{'chunks/s':>10}"
    f"{'us CPU':>8}{'100k':>9}{'RSS':>7}\n"
    f"{'':28}{'/8 KB':>8}{'at 32':>8}{'ms':>11}{'ms':>8}{'at 64':>10}"
    f"{'/chunk':>8}{'ms CPU':>9}{'MB':>7}"
)


def _row(name: str, rounds: Rounds, direct: Measured, server: PinnedServer) -> str:
    seen = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    p50, p99 = seen["p50"] - direct.percentile(0.5), seen["p99"] - direct.percentile(0.99)
    return (
        f"{name:28}{seen['cpu'] * 1e6:8.0f}{seen['rate']:8.0f}{p50 * 1e3:11.2f}"
        f"{p99 * 1e3:8.2f}{seen['chunks']:10.0f}{seen['paced'] * 1e6:8.1f}"
        f"{seen['large'] * 1e3:9.2f}{rss_bytes(family(server.pid)) / 1e6:7.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
