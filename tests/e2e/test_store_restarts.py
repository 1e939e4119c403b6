"""Restarts of an engine with a store on disk, killed and planned, under load with 1-hour leases.

A native engine computes the demo model. Clients send prompts with a 1-hour breakpoint. The engine
is killed (`kill -9`) or told to end while others are answered, and started again on the same
directory. After each start every lease that was told as stored before must be readable, by its
tokens. Every greedy answer must be that of an engine without any cache.
`scripts/long_tests restarts` does it 60 times.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

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
from scripts.stack import (
    ENGINE_SECRET,
    Server,
    engine_environment,
    free_port,
    python,
    start,
    stop,
    url_of,
)
from tests.faults.sizes import number

SCOPES = ("red", "green", "blue")
ANSWER_TOKENS = 12
WORDS = "the cache keeps what a prompt began with and tells to the token what it read again".split()
SETTLE_SECONDS = 120.0
COMPARED_OTHERS = 4
"""Of the answers to others before each restart."""
FRAME = msgspec.json.Decoder(Frame)
THREADS, CLIENTS = 1, 2


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


def serve(port: int, store: Path | None, log: Path) -> Server:
    settings = {
        "ENGINE_BACKEND": "native",
        "ENGINE_NUM_BLOCKS": "2048",
        "ENGINE_MIN_CACHE_TOKENS": "16",
        "OMP_NUM_THREADS": str(THREADS),
        "ENGINE_GRACE_SECONDS": "1",
    }
    if store is not None:
        settings["ENGINE_STORE"] = str(store)
    process = start(python("engine"), engine_environment(port, settings), log, append=True)
    return Server(url_of(port), process, log).wait()


@contextmanager
def serving(port: int, store: Path | None, log: Path) -> Iterator[tuple[Server, Client]]:
    """One life of an engine and its client. It may have been killed when this ends."""
    server = serve(port, store, log)
    client = Client(server.url)
    try:
        yield server, client
    finally:
        client.close()
        stop(server.process)


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

    def __init__(self, folder: Path, *, turns: int, words: int) -> None:
        """`turns` are prompts before and after each restart, of `words` at most."""
        self._folder = folder
        self._turns, self._words = turns, words
        self._rng = random.Random(1)
        self._port = free_port()
        self._expected: dict[str, str] = {}
        self._due: dict[str, tuple[str, str, int]] = {}
        self.report = Report()

    def run(self, plain: Client, kills: int, planned: int) -> Report:
        """`plain` is an engine without a store, for answers without any cache."""
        kinds = ["kill"] * kills + ["end"] * planned
        self._rng.shuffle(kinds)
        with ExitStack() as life:
            server, client = life.enter_context(self._life())
            for count, kind in enumerate(kinds, 1):
                self._load(client, plain)
                others = Others(server.url, CLIENTS, self._rng.randrange(2**32))
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
                print(f"{count}/{len(kinds)} {kind}: {self.report}", flush=True)
        return self.report

    def _life(self) -> AbstractContextManager[tuple[Server, Client]]:
        store, log = self._folder / "store", self._folder / "engine.log"
        return serving(self._port, store, log)

    def _load(self, client: Client, plain: Client) -> None:
        for _ in range(self._turns):
            scope = self._rng.choice(SCOPES)
            known = [text for text, (of, _, _) in self._due.items() if of == scope]
            if known and self._rng.random() < 0.4:
                text = self._rng.choice(known) + " " + prompt_of(self._rng, 5)
            else:
                text = prompt_of(self._rng, self._rng.randrange(30, self._words))
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
        for text in self._rng.sample(texts, min(len(texts), self._turns)):
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


def test_stored_leases_outlive_a_kill_and_a_planned_end(tmp_path: Path) -> None:
    kills, planned, turns = number((1, 1, 3), (50, 10, 6))
    with serving(free_port(), None, tmp_path / "plain.log") as (_, plain):
        report = Trial(tmp_path, turns=turns, words=60).run(plain, kills, planned)
    assert report.restarts == kills + planned and report.leases_due > 0 and report.answers > 0
    assert report.lost == report.unread == report.wrong == 0
    assert report.broken_streams > 0, "nobody was being answered when it ended"
    assert report.read_tokens > 0, "nothing of what the disk kept was read"
