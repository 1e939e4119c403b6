"""Restarts of an engine with a store on disk, killed and planned, under load with 1-hour leases.

A native engine computes the demo model. Clients send prompts with a 1-hour breakpoint. The engine
is killed (`kill -9`) or told to end while others are answered, and started again on the same
directory. After each start every lease that was told as stored before must be readable, by its
tokens. Every greedy answer must be that of an engine without any cache. In the end one long
prompt's time to its first token is compared: cold, and read from the store. Ends with 1 unless
every lease was there and no token of any answer was another.

`--damaged N` tries N damaged stores in place of that, with real files and a fake model whose
answers show which blocks they were computed from.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import httpx
import msgspec

from engine.protocol import (
    Breakpoint,
    Done,
    Failed,
    Frame,
    GenerateRequest,
    Prompt,
    Sampling,
    Started,
    TextDelta,
)
from engine.protocol.reports import EntryInfo, Stats
from scripts.setup.options import parse
from scripts.stack import (
    ENGINE_SECRET,
    ROOT,
    Server,
    engine_environment,
    free_port,
    python,
    start,
    stop,
    url_of,
)

SCOPES = ("red", "green", "blue")
ANSWER_TOKENS = 12
WORDS = "the cache keeps what a prompt began with and tells to the token what it read again".split()
SETTLE_SECONDS = 120.0
COMPARED_OTHERS = 4
"""Of the answers to others before each restart."""
FRAME = msgspec.json.Decoder(Frame)
Settings = Mapping[str, str]
NO_MORE: Settings = MappingProxyType({})


@dataclass
class Answer:
    started: Started
    text: str
    seconds_to_first: float


@dataclass
class Report:
    """What was seen. `wrong` counts other answers; `lost` leases that were stored and not there."""

    restarts: int = 0
    leases_due: int = 0
    lost: int = 0
    unread: int = 0
    not_yet_stored: int = 0
    wrong: int = 0
    answers: int = 0
    read_tokens: int = 0
    broken_streams: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Client:
    """One engine's callers."""

    def __init__(self, url: str) -> None:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=300, trust_env=False)
        self._num_sent = 0

    def ask(self, text: str, scope: str, *, is_marked: bool, max_tokens: int) -> Answer:
        """Raises httpx.HTTPError where the engine ends meanwhile."""
        self._num_sent += 1
        request = GenerateRequest(
            request_id=f"r{self._num_sent}-{time.time_ns()}",
            scope=scope,
            prompt=Prompt(messages=[], text=text),
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            breakpoints=[Breakpoint(0, "1h")] if is_marked else [],
            min_cache_tokens=16,
        )
        began, first, parts = time.monotonic(), 0.0, []
        started: Started | None = None
        with self._http.stream(
            "POST", "/v1/generate", content=msgspec.json.encode(request)
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line:
                    continue
                match FRAME.decode(line):
                    case Started() as frame:
                        started, first = frame, time.monotonic() - began
                    case TextDelta() as delta:
                        parts.append(delta.text)
                    case Failed() as failed:
                        raise RuntimeError(failed.message)
                    case Done():
                        break
        if started is None:
            raise httpx.RemoteProtocolError("the stream ended early")
        self._http.post("/v1/ack", json={"request_ids": [request.request_id]})
        return Answer(started, "".join(parts), first)

    def entries(self) -> list[EntryInfo]:
        answer = self._http.get("/v1/entries").raise_for_status()
        return msgspec.json.decode(answer.content, type=list[EntryInfo])

    def stats(self) -> Stats:
        answer = self._http.get("/v1/stats").raise_for_status()
        return msgspec.json.decode(answer.content, type=Stats)

    def close(self) -> None:
        self._http.close()

    def settle(self) -> None:
        """Wait until nothing waits to be written."""
        end = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < end:
            store = self.stats().store
            if store is None or (not store.pending_entries and not store.queued_bytes):
                return
            time.sleep(0.05)


def serve(port: int, store: Path | None, log: Path, threads: int, more: Settings) -> Server:
    settings = {
        "ENGINE_BACKEND": "native",
        "ENGINE_NUM_BLOCKS": "2048",
        "ENGINE_MIN_CACHE_TOKENS": "16",
        "OMP_NUM_THREADS": str(threads),
        "ENGINE_GRACE_SECONDS": "1",
        **more,
    }
    if store is not None:
        settings["ENGINE_STORE"] = str(store)
    process = start(python("engine"), engine_environment(port, settings), log, append=True)
    return Server(url_of(port), process, log).wait()


@contextmanager
def serving(
    port: int, store: Path | None, log: Path, threads: int, more: Settings = NO_MORE
) -> Iterator[tuple[Server, Client]]:
    """One life of an engine and its client. It may have been killed when this ends.

    `more` are settings of the engine beside the usual ones.
    """
    server = serve(port, store, log, threads, more)
    client = Client(server.url)
    try:
        yield server, client
    finally:
        client.close()
        stop(server.process)


@contextmanager
def plain_engine(folder: Path, threads: int) -> Iterator[Client]:
    """An engine without a store, for answers without any cache."""
    with serving(free_port(), None, folder / "plain.log", threads) as (_, client):
        yield client


def prompt_of(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


class Others:
    """Clients of their own scopes, who ask on until the engine is gone."""

    def __init__(self, url: str, num_clients: int, seed: int) -> None:
        self.answered: list[tuple[str, Answer]] = []
        self.num_broken = 0
        clients = [(Client(url), random.Random(seed + number)) for number in range(num_clients)]
        self._threads = [threading.Thread(target=self._ask_on, args=one) for one in clients]
        for thread in self._threads:
            thread.start()

    def wait_until_answered(self) -> None:
        """Until as many were answered as there are clients."""
        end = time.monotonic() + SETTLE_SECONDS
        while len(self.answered) < len(self._threads) and time.monotonic() < end:
            time.sleep(0.01)

    def join(self) -> None:
        """Wait for the end of all. The engine has ended."""
        for thread in self._threads:
            thread.join()

    def _ask_on(self, client: Client, rng: random.Random) -> None:
        scope = f"other {rng.random()}"
        try:
            while True:
                text = prompt_of(rng, rng.randrange(30, 200))
                told = client.ask(text, scope, is_marked=True, max_tokens=ANSWER_TOKENS)
                self.answered.append((text, told))
        except (httpx.HTTPError, RuntimeError):
            self.num_broken += 1
        finally:
            client.close()


class Trial:
    """One directory through many processes."""

    def __init__(self, folder: Path, options: Any) -> None:
        self._folder = folder
        self._options = options
        self._rng = random.Random(options.seed)
        self._port = free_port()
        self._expected: dict[str, str] = {}
        self._due: dict[str, tuple[str, str, int]] = {}
        self.report = Report()

    def run(self, plain: Client) -> Report:
        options = self._options
        kinds = ["kill"] * options.kills + ["end"] * options.planned
        self._rng.shuffle(kinds)
        with ExitStack() as life:
            server, client = life.enter_context(self._life())
            for number, kind in enumerate(kinds, 1):
                self._load(client, plain)
                others = Others(server.url, options.clients, self._rng.randrange(2**32))
                others.wait_until_answered()
                self._note_leases(client, is_planned=kind == "end")
                if kind == "kill":
                    server.process.kill()
                life.close()
                others.join()
                self.report.broken_streams += others.num_broken
                for text, answer in others.answered[:COMPARED_OTHERS]:
                    self._compare_answer(text, answer, plain)
                server, client = life.enter_context(self._life())
                self.report.restarts += 1
                self._check(client, plain)
                print(f"{number}/{len(kinds)} {kind}: {self.report}", flush=True)
        if options.long_words:
            self._compare()
        return self.report

    def _life(self) -> AbstractContextManager[tuple[Server, Client]]:
        store, log = self._folder / "store", self._folder / "engine.log"
        return serving(self._port, store, log, self._options.threads)

    def _load(self, client: Client, plain: Client) -> None:
        for _ in range(self._options.turns):
            scope = self._rng.choice(SCOPES)
            known = [text for text, (of, _, _) in self._due.items() if of == scope]
            if known and self._rng.random() < 0.4:
                text = self._rng.choice(known) + " " + prompt_of(self._rng, 5)
            else:
                text = prompt_of(self._rng, self._rng.randrange(30, self._options.words))
            answer = client.ask(text, scope, is_marked=True, max_tokens=ANSWER_TOKENS)
            self._compare_answer(text, answer, plain)
            report = answer.started.breakpoints[0]
            if report.state == "leased":
                self._due[text] = (scope, answer.started.epoch, report.tokens or 0)

    def _note_leases(self, client: Client, *, is_planned: bool) -> None:
        """Which leases must be there after the restart: all, or those that are stored by now."""
        held = client.entries()
        leases = [entry for entry in held if entry.state == "leased"]
        stored = [entry for entry in leases if entry.is_stored or is_planned]
        self.report.not_yet_stored += len(leases) - len(stored)
        self._stored = {(entry.scope, entry.entry): entry.tokens for entry in stored}
        self.report.leases_due += len(self._stored)

    def _check(self, client: Client, plain: Client) -> None:
        there = {(e.scope, e.entry): e.tokens for e in client.entries() if e.state == "leased"}
        self.report.lost += sum(there.get(key) != tokens for key, tokens in self._stored.items())
        tokens_there = {(scope, tokens) for (scope, _), tokens in there.items()}
        # An entry is told by its scope and tokens, so only where no other has as many.
        alike = Counter((scope, tokens) for scope, _, tokens in self._due.values())
        texts = [
            text
            for text, (scope, _, tokens) in self._due.items()
            if (scope, tokens) in tokens_there and alike[scope, tokens] == 1
        ]
        for text in self._rng.sample(texts, min(len(texts), self._options.turns)):
            scope, _, tokens = self._due[text]
            answer = client.ask(text, scope, is_marked=True, max_tokens=ANSWER_TOKENS)
            self._compare_answer(text, answer, plain)
            usage = answer.started.usage
            self.report.read_tokens += usage.cache_read_tokens
            # The last token is always computed.
            self.report.unread += usage.cache_read_tokens < min(tokens, usage.prompt_tokens - 1)

    def _compare_answer(self, text: str, answer: Answer, plain: Client) -> None:
        if text not in self._expected:
            scope = f"plain {len(self._expected)}"
            told = plain.ask(text, scope, is_marked=False, max_tokens=ANSWER_TOKENS)
            assert told.started.usage.automatic_tokens == 0
            self._expected[text] = told.text
        self.report.answers += 1
        self.report.wrong += answer.text != self._expected[text]

    def _compare(self) -> None:
        """One long prompt's time to its first token: cold, from the device, and from the disk.

        Another prompt goes before it in each life, since an engine's first prompt starts its
        prepare worker.
        """
        text = prompt_of(self._rng, self._options.long_words)
        with self._life() as (server, client):
            self._warm(client)
            cold = client.ask(text, "long", is_marked=True, max_tokens=1)
            warm = client.ask(text, "long", is_marked=True, max_tokens=1)
            client.settle()
            server.process.kill()
        with self._life() as (_, client):
            self._warm(client)
            stored = client.ask(text, "long", is_marked=True, max_tokens=1)
        self.report.seconds = {
            "prompt tokens": cold.started.usage.prompt_tokens,
            "cold": round(cold.seconds_to_first, 3),
            "device": round(warm.seconds_to_first, 3),
            "disk": round(stored.seconds_to_first, 3),
            "read from disk": stored.started.usage.cache_read_tokens,
        }

    def _warm(self, client: Client) -> None:
        client.ask(prompt_of(self._rng, 50), "warm", is_marked=False, max_tokens=4)


def try_damaged(count: int) -> int:
    """Damage `count` stores, one by one. Each is a test of its own, by its seed."""
    tests = "tests/engine/store/test_damage.py"
    command = [*python("pytest"), "-q", "-p", "no:randomly", "-k", "damaged", tests]
    environment = {**os.environ, "STORE_SEEDS": str(count)}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> int:
    options = parse(
        __doc__,
        kills=(50, "restarts by kill -9"),
        planned=(10, "restarts that were told"),
        turns=(6, "prompts before and after each restart"),
        words=(120, "words of a prompt at most"),
        clients=(2, "others that ask while it ends"),
        long_words=(7700, "words of the prompt whose times are compared: 8,192 tokens; 0 for none"),
        threads=(2, "CPU threads of each engine"),
        damaged=(0, "damaged stores to try in place of restarts"),
        seed=1,
    )
    if options.damaged:
        return try_damaged(options.damaged)
    with TemporaryDirectory(prefix="store-") as directory:
        folder = Path(directory)
        with plain_engine(folder, options.threads) as plain:
            report = Trial(folder, options).run(plain)
    print(json.dumps(msgspec.to_builtins(report), indent=1))
    is_good = not (report.lost or report.wrong or report.unread)
    print("every stored lease was there" if is_good else "NOT ALL WAS THERE")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
