"""One request, and what came of it: the client of the benchmarks, the fault runs and the tests.

An answer is read line by line, in either dialect, so that any HTTP client will do: httpx by `ask`
and `ask_now`, another by giving its lines to `Answer.take`.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from scripts.bench.report import percentile

if TYPE_CHECKING:
    from anthropic import Anthropic

Asker = TypeVar("Asker")

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"


@dataclass(slots=True)
class Answer:
    """An answer as far as it came; times are seconds from `begun` (`time.perf_counter`).

    `usage` has the names of the dialect. `message` is the answer's first object. `error` is empty
    for a whole answer. Else it is what the gateway said, or, where the connection broke
    (`is_broken`), the exception's name.
    """

    begun: float = field(default_factory=time.perf_counter)
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    message: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    first_seconds: float | None = None
    seconds: float = 0.0
    events: list[str] = field(default_factory=list)
    is_whole: bool = False
    is_broken: bool = False
    error: str = ""

    @property
    def id(self) -> str:
        """The turn's, whatever the dialect; empty where nothing of it came."""
        name = str(self.message.get("id", ""))
        return "msg_" + name.removeprefix("chatcmpl-") if name.startswith("chatcmpl-") else name

    def take(self, line: str | bytes) -> None:
        """Read one line of a stream of server-sent events."""
        line = line.decode() if isinstance(line, bytes) else line
        if not line.startswith("data: "):
            return
        if line.startswith("data: [DONE]"):
            self.is_whole = not self.error
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.error = json.dumps(event["error"])
        if "type" in event:
            self._take_event(event)
        else:
            self.message = self.message or event
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices", ()):
                self._add(choice["delta"].get("content") or "")

    def _take_event(self, event: dict[str, Any]) -> None:
        self.events.append(event["type"])
        if event["type"] == "message_start":
            self.message, self.usage = event["message"], dict(event["message"]["usage"])
        elif event["type"] == "content_block_delta":
            self._add(event["delta"].get("text", ""))
        elif event["type"] == "message_delta":
            self.usage |= event["usage"]
        elif event["type"] == "message_stop":
            self.is_whole = not self.error

    def _add(self, text: str) -> None:
        if text and self.first_seconds is None:
            self.first_seconds = time.perf_counter() - self.begun
        self.text += text

    def take_whole(self, body: str) -> None:
        """Read a body that is no stream: a whole answer, or an error."""
        if self.status != 200:
            self.error = body[:300]
            return
        self.message, self.is_whole = json.loads(body), True
        self.usage = self.message.get("usage") or {}

    def _begin(self, reply: httpx.Response) -> bool:
        """Whether a stream follows."""
        self.status, self.headers = reply.status_code, reply.headers
        kind = reply.headers.get("content-type", "")
        return self.status == 200 and kind.startswith("text/event-stream")

    def _end(self, error: str = "") -> None:
        self.seconds = time.perf_counter() - self.begun
        if not self.is_whole and not self.error:
            self.error = error or "the stream ended early"


def body_of(
    model: str, system: str | list[dict[str, Any]], question: str, **changes: Any
) -> dict[str, Any]:
    """A body of the Messages API: one question behind a system prompt; a text is marked."""
    return {
        "model": model,
        "max_tokens": 8,
        "system": marked(system) if isinstance(system, str) else system,
        "messages": [{"role": "user", "content": question}],
        **changes,
    }


def marked(text: str, ttl: str = "5m") -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}]


def headers_of(key: str) -> dict[str, str]:
    """Of the Messages API; Chat Completions takes them too."""
    return {"x-api-key": key, "anthropic-version": "2023-06-01"}


async def ask(
    http: httpx.AsyncClient,
    body: Mapping[str, Any],
    url: str = MESSAGES,
    headers: Mapping[str, str] | None = None,
    begun: Callable[[Answer], object] = bool,
) -> Answer:
    """Send a body and read what comes to its end; a connection's fault is the answer's `error`.

    `begun` hears of the answer as soon as it has an id.
    """
    answer = Answer()
    try:
        async with http.stream("POST", url, json=body, headers=headers) as reply:
            if answer._begin(reply):
                async for line in reply.aiter_lines():
                    is_new = not answer.id
                    answer.take(line)
                    if is_new and answer.id:
                        begun(answer)
            else:
                answer.take_whole((await reply.aread()).decode())
    except httpx.TransportError as error:
        answer.is_broken = True
        answer._end(type(error).__name__)
    answer._end()
    return answer


def ask_now(http: httpx.Client, body: Mapping[str, Any], url: str = MESSAGES) -> Answer:
    """As `ask`, for programs that are not asynchronous."""
    answer = Answer()
    try:
        with http.stream("POST", url, json=body) as reply:
            if answer._begin(reply):
                for line in reply.iter_lines():
                    answer.take(line)
            else:
                answer.take_whole(reply.read().decode())
    except httpx.TransportError as error:
        answer.is_broken = True
        answer._end(type(error).__name__)
    answer._end()
    return answer


def ask_by_sdk(client: "Anthropic", body: Mapping[str, Any]) -> Answer:
    """As `ask_now`, by the official SDK. `first_seconds` is the time to any first content block."""
    answer = Answer()
    with client.messages.stream(**body) as stream:
        for event in stream:
            if event.type == "content_block_start" and answer.first_seconds is None:
                answer.first_seconds = time.perf_counter() - answer.begun
        final = stream.get_final_message()
    answer.usage, answer.is_whole = final.usage.model_dump(), True
    answer._end()
    return answer


@dataclass(slots=True)
class Measured:
    """Seconds of every answer in the order of their ends, and of the whole measurement."""

    seconds: list[float] = field(default_factory=list)
    wall_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Answers in a second."""
        return len(self.seconds) / self.wall_seconds

    def percentile(self, share: float) -> float:
        """In seconds."""
        return percentile(self.seconds, share)


async def closed_loop(
    askers: Sequence[Asker], num_requests: int, ask: Callable[[Asker, int], Awaitable[object]]
) -> Measured:
    """Each asker asks again as soon as it has its answer, until all requests are taken."""
    measured, numbers = Measured(), iter(range(num_requests))

    async def work(asker: Asker) -> None:
        for number in numbers:
            begun = time.perf_counter()
            await ask(asker, number)
            measured.seconds.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*map(work, askers))
    measured.wall_seconds = time.perf_counter() - begun
    return measured


def rss_bytes(pids: Iterable[int]) -> int:
    """Bytes that these processes have in RAM; a process that has ended has none."""
    pages = 0
    for pid in pids:
        with suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
