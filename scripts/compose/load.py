"""What clients do meanwhile: the official SDK, a few at a time, without retries of its own."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2
from anthropic import Anthropic, APIConnectionError, APIError

from scripts.bench.load import body_of
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


class Load:
    def __init__(self, url: str, key: str, model: str) -> None:
        self._url, self._key, self._model = url, key, model
        self._outcomes = Outcomes()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def so_far(self) -> Outcomes:
        with self._lock:
            seen = self._outcomes
            return Outcomes(seen.done, seen.refused, seen.cut, Counter(seen.errors))

    def wait_for_more(self, count: int = 2 * CLIENTS) -> None:
        """Wait until so many further requests have been answered whole."""
        wanted = self.so_far().done + count
        wait_for("requests to be answered again", lambda: self.so_far().done >= wanted)

    @contextlib.contextmanager
    def running(self) -> Iterator["Load"]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, number) for number in range(CLIENTS)]
            try:
                yield self
            finally:
                self._ended.set()
        for client in clients:
            client.result()

    def _client(self, number: int) -> None:
        text = handbook(f"client {number}", 30)
        with Anthropic(
            base_url=self._url, api_key=self._key, max_retries=0, timeout=TIMEOUT_SECONDS
        ) as client:
            count = number
            while not self._ended.is_set():
                self._request(client, text, count)
                count += 1
                time.sleep(PAUSE_SECONDS)

    def _request(self, client: Anthropic, text: str, count: int) -> None:
        has_begun = False
        try:
            if count % 2:
                with client.messages.create(**self._body(text, count), stream=True) as events:
                    has_begun = True
                    kinds = [event.type for event in events]
                if kinds[-1:] != ["message_stop"]:
                    return self._note("cut", "no message_stop")
            else:
                client.messages.create(**self._body(text, count))
        except (APIError, httpx2.TransportError) as error:  # the SDK wraps none of a stream's
            is_cut = has_begun or (
                isinstance(error.__cause__, httpx2.RemoteProtocolError)
                and ("complete message body" in str(error.__cause__))
            )
            status = getattr(error, "status_code", "")
            name = f"{type(error).__name__} {status}".strip()
            if isinstance(error, APIConnectionError) and error.__cause__ is not None:
                name += f" ({type(error.__cause__).__name__})"
            return self._note("cut" if is_cut else "refused", name)
        self._note("done")

    def _body(self, text: str, count: int) -> dict[str, Any]:
        question = f"What is a lease? ({count})"
        return body_of(self._model, text, question, max_tokens=MAX_TOKENS)

    def _note(self, outcome: str, error: str = "") -> None:
        with self._lock:
            setattr(self._outcomes, outcome, getattr(self._outcomes, outcome) + 1)
            if error:
                self._outcomes.errors[error] += 1


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
