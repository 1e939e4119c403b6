"""Restarts of an engine with a store on disk, killed and planned, under load with 1-hour leases.

A native engine computes the demo model. Engines send prompts with a 1-hour breakpoint. The engine
is killed (`kill -9`) or told to end while others are answered, and started again on the same
directory. After each start every lease that was told as stored before must be readable, by its
tokens. Every greedy answer must be that of an engine without any cache.
`scripts/long_tests restarts` does it 60 times.
"""

import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from engine.protocol import Done, Prompt, Ttl
from engine.protocol.reports import EntryInfo
from tests.conformance.engines import Answer, Engine, Refused, running_engine
from tests.faults.sizes import number

SCOPES = ("red", "green", "blue")
ANSWER_TOKENS = 12
WORDS = "the cache keeps what a prompt began with and tells to the token what it read again".split()
SETTLE_SECONDS = 120.0
COMPARED_OTHERS = 4
"""Of the answers to others before each restart."""
CLIENTS = 2
SETTINGS = {"NUM_BLOCKS": 2048, "MIN_CACHE_TOKENS": 16, "GRACE_SECONDS": 1}
MARK: tuple[int, Ttl] = (0, "1h")


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


def ask(engine: Engine, text: str, scope: str, *marks: tuple[int, Ttl]) -> Answer:
    """Raise httpx.HTTPError or Refused where the engine ends meanwhile."""
    prompt = Prompt(messages=[], text=text)
    options = {"max_tokens": ANSWER_TOKENS, "minimum": 16, "ignore_eos": True}
    answer = engine.ask(prompt, scope, *marks, **options)
    if not answer.frames or not isinstance(answer.frames[-1], Done):
        raise httpx.RemoteProtocolError("the stream ended early")
    engine.acknowledge(answer.last.request_id)
    return answer


def leases_of(engine: Engine) -> list[EntryInfo]:
    return [entry for entry in engine.get("entries", list[EntryInfo]) if entry.state == "leased"]


def prompt_of(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


class Others:
    """Clients of their own scopes, who ask on until the engine is gone."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.answered: list[tuple[str, Answer]] = []
        self.num_broken = 0
        draws = [random.Random(seed + number) for number in range(CLIENTS)]
        self._threads = [threading.Thread(target=self._ask_on, args=(engine, d)) for d in draws]
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

    def _ask_on(self, engine: Engine, rng: random.Random) -> None:
        scope = f"other {rng.random()}"
        try:
            while True:
                text = prompt_of(rng, rng.randrange(30, 200))
                self.answered.append((text, ask(engine, text, scope, MARK)))
        except (httpx.HTTPError, Refused):
            self.num_broken += 1


class Trial:
    """One directory through many processes."""

    def __init__(self, folder: Path, *, turns: int, words: int) -> None:
        """`turns` are prompts before and after each restart, of `words` at most."""
        self._settings = {**SETTINGS, "STORE": str(folder / "store")}
        self._turns = turns
        self._words = words
        self._rng = random.Random(1)
        self._expected: dict[str, str] = {}
        self._due: dict[str, tuple[str, str, int]] = {}
        self.report = Report()

    def run(self, plain: Engine, kills: int, planned: int) -> Report:
        """`plain` is an engine without a store, for answers without any cache."""
        kinds = ["kill"] * kills + ["end"] * planned
        self._rng.shuffle(kinds)
        with ExitStack() as life:
            engine = life.enter_context(running_engine("native", self._settings))
            for count, kind in enumerate(kinds, 1):
                self._load(engine, plain)
                others = Others(engine, self._rng.randrange(2**32))
                others.wait_until_answered()
                self._note_leases(engine, is_planned=kind == "end")
                end = engine.process.kill if kind == "kill" else engine.process.terminate
                end()
                engine.process.wait(SETTLE_SECONDS)
                others.join()
                life.close()
                self.report.broken_streams += others.num_broken
                for text, answer in others.answered[:COMPARED_OTHERS]:
                    self._compare_answer(text, answer, plain)
                engine = life.enter_context(running_engine("native", self._settings))
                self.report.restarts += 1
                self._check(engine, plain)
                print(f"{count}/{len(kinds)} {kind}: {self.report}", flush=True)
        return self.report

    def _load(self, engine: Engine, plain: Engine) -> None:
        for _ in range(self._turns):
            scope = self._rng.choice(SCOPES)
            known = [text for text, (of, _, _) in self._due.items() if of == scope]
            if known and self._rng.random() < 0.4:
                text = self._rng.choice(known) + " " + prompt_of(self._rng, 5)
            else:
                text = prompt_of(self._rng, self._rng.randrange(30, self._words))
            answer = ask(engine, text, scope, MARK)
            self._compare_answer(text, answer, plain)
            report = answer.started.breakpoints[0]
            if report.state == "leased":
                self._due[text] = (scope, answer.started.epoch, report.tokens or 0)

    def _note_leases(self, engine: Engine, *, is_planned: bool) -> None:
        """Which leases must be there after the restart: all, or those that are stored by now."""
        leases = leases_of(engine)
        stored = [entry for entry in leases if entry.is_stored or is_planned]
        self.report.not_yet_stored += len(leases) - len(stored)
        self._stored = {(entry.scope, entry.entry): entry.tokens for entry in stored}
        self.report.leases_due += len(self._stored)

    def _check(self, engine: Engine, plain: Engine) -> None:
        there = {(e.scope, e.entry): e.tokens for e in leases_of(engine)}
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
            answer = ask(engine, text, scope, MARK)
            self._compare_answer(text, answer, plain)
            usage = answer.started.usage
            self.report.read_tokens += usage.cache_read_tokens
            # The last token is always computed.
            self.report.unread += usage.cache_read_tokens < min(tokens, usage.prompt_tokens - 1)

    def _compare_answer(self, text: str, answer: Answer, plain: Engine) -> None:
        if text not in self._expected:
            scope = f"plain {len(self._expected)}"
            result = ask(plain, text, scope)
            assert result.started.usage.automatic_tokens == 0
            self._expected[text] = result.text()
        self.report.answers += 1
        self.report.wrong += answer.text() != self._expected[text]


def test_stored_leases_outlive_a_kill_and_a_planned_end(tmp_path: Path) -> None:
    kills, planned, turns = number((1, 1, 3), (50, 10, 6))
    with running_engine("native", SETTINGS) as plain:
        report = Trial(tmp_path, turns=turns, words=60).run(plain, kills, planned)
    assert report.restarts == kills + planned and report.leases_due > 0 and report.answers > 0
    assert report.lost == report.unread == report.wrong == 0
    assert report.broken_streams > 0, "nobody was being answered when it ended"
    assert report.read_tokens > 0, "nothing of what the disk kept was read"
