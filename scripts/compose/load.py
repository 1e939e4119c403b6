"""What clients see meanwhile, a few at a time, without retries; and a story by the official SDK."""

import contextlib
import copy
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
from anthropic import Anthropic

from scripts.bench.load import Answer, ask_now, body_of, headers_of
from scripts.compose.project import ComposeError, wait_for
from scripts.runner.example_prompt import handbook

CLIENTS = 4
PAUSE_SECONDS = 0.1
TIMEOUT_SECONDS = 120
MAX_TOKENS = 12


@dataclass(slots=True)
class Outcomes:
    """How requests ended: `refused` before a byte of the answer had come, `cut` after that."""

    done: int = 0
    refused: int = 0
    cut: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def since(self, earlier: "Outcomes") -> "Outcomes":
        return Outcomes(
            self.done - earlier.done,
            self.refused - earlier.refused,
            self.cut - earlier.cut,
            self.errors - earlier.errors,
        )

    def __str__(self) -> str:
        text = f"{self.done} done, {self.refused} refused, {self.cut} cut"
        if self.errors:
            text += " (" + ", ".join(f"{n} {name}" for name, n in self.errors.items()) + ")"
        return text


class Clients:
    """A few threads that keep asking, streams and single answers in turns."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self._http = httpx.Client(
            base_url=url, headers=headers_of(key), timeout=TIMEOUT_SECONDS, trust_env=False
        )
        self._model = model
        self._outcomes = Outcomes()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def so_far(self) -> Outcomes:
        with self._lock:
            return copy.deepcopy(self._outcomes)

    def wait_for_more(self, count: int = 2 * CLIENTS) -> None:
        """Wait until so many further requests have been answered whole."""
        wanted = self.so_far().done + count
        wait_for("requests to be answered again", lambda: self.so_far().done >= wanted)

    @contextlib.contextmanager
    def running(self) -> Iterator["Clients"]:
        with self._http, ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._keep_asking, number) for number in range(CLIENTS)]
            try:
                yield self
            finally:
                self._ended.set()
        for client in clients:
            client.result()

    def _keep_asking(self, number: int) -> None:
        text = handbook(f"client {number}", 30)
        for count in itertools.count(number):
            question = f"What is a lease? ({count})"
            changes = {"max_tokens": MAX_TOKENS, "stream": bool(count % 2)}
            self._note(ask_now(self._http, body_of(self._model, text, question, **changes)))
            if self._ended.wait(PAUSE_SECONDS):
                return

    def _note(self, answer: Answer) -> None:
        with self._lock:
            if answer.is_whole:
                self._outcomes.done += 1
                return
            if answer.status == 200:
                self._outcomes.cut += 1
            else:
                self._outcomes.refused += 1
            is_told = answer.status in (0, 200)
            self._outcomes.errors[answer.error if is_told else str(answer.status)] += 1


def story(url: str, key: str, topic: str) -> str:
    """The same marked request three times: written, read, and read as a stream."""
    with Anthropic(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT_SECONDS) as client:
        model = client.models.list().data[0].id
        body = body_of(model, handbook(topic), "What is a lease?", max_tokens=48)
        started = time.monotonic()
        first = client.messages.create(**body)
        between = time.monotonic()
        second = client.messages.create(**body)
        ended = time.monotonic()
        with client.messages.stream(**body) as stream:
            third = stream.get_final_message()
    written = first.usage.cache_creation_input_tokens
    reads = [answer.usage.cache_read_input_tokens for answer in (first, second, third)]
    if not written or reads != [0, written, written]:
        raise ComposeError(f"written {written} tokens, then read {reads}")
    return (
        f"{model}: written {written:,} tokens ({between - started:.1f} s), read {reads[1]:,}"
        f" ({ended - between:.1f} s), read {reads[2]:,} streamed"
    )
