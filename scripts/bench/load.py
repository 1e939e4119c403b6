"""One request and its answer: the client of the benchmarks, the fault runs and the tests."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

MESSAGES = "/v1/messages"


@dataclass(slots=True)
class Answer:
    """An answer, or as much of it as came. Times are seconds from its beginning."""

    # The time of its beginning, by `time.perf_counter`.
    begun: float = field(default_factory=time.perf_counter)
    status: int = 0
    # The first object of the answer.
    message: dict[str, Any] = field(default_factory=dict)
    # The counts, under the names of the dialect.
    usage: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    first_seconds: float | None = None
    seconds: float = 0.0
    events: list[str] = field(default_factory=list)
    is_whole: bool = False
    # Empty for a whole answer. Else the gateway's words or, if the connection broke, the name of
    # the exception.
    error: str = ""

    @property
    def id(self) -> str:
        """The turn's id without the prefix of a dialect. It is empty if nothing of the answer
        came."""
        name = str(self.message.get("id", ""))
        return "msg_" + name.removeprefix("chatcmpl-") if name.startswith("chatcmpl-") else name

    def take(self, line: str) -> None:
        """Read one line of a stream of server-sent events, of either dialect."""
        if not line.startswith("data: "):
            return
        if line.startswith("data: [DONE]"):
            self.is_whole = not self.error
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.error = json.dumps(event["error"])
        match event.get("type"):
            case None:
                self.message = self.message or event
                self.usage = event.get("usage") or self.usage
                for choice in event.get("choices", ()):
                    self._add(choice["delta"].get("content") or "")
                return
            case "message_start":
                self.message = event["message"]
                self.usage = dict(event["message"]["usage"])
            case "content_block_delta":
                self._add(event["delta"].get("text", ""))
            case "message_delta":
                self.usage |= event["usage"]
            case "message_stop":
                self.is_whole = not self.error
        self.events.append(event["type"])

    def _add(self, text: str) -> None:
        if text and self.first_seconds is None:
            self.first_seconds = time.perf_counter() - self.begun
        self.text += text

    def begin(self, reply: httpx.Response) -> bool:
        """Whether a stream follows."""
        self.status = reply.status_code
        kind = reply.headers.get("content-type", "")
        return self.status == 200 and kind.startswith("text/event-stream")

    def take_whole(self, body: bytes) -> None:
        """Read a body that is no stream: a whole answer, or an error."""
        if self.status != 200:
            self.error = body.decode()[:300]
            return
        self.message = json.loads(body)
        self.is_whole = True
        self.usage = self.message.get("usage") or {}

    def end(self, broken: httpx.TransportError | None = None) -> "Answer":
        self.seconds = time.perf_counter() - self.begun
        if not self.is_whole and not self.error:
            self.error = type(broken).__name__ if broken else "the stream ended early"
        return self


def body_of(
    model: str, system: str | list[dict[str, Any]], question: str, **changes: Any
) -> dict[str, Any]:
    """A body of the Messages API: one question behind a system prompt, which is marked if it is a
    text."""
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
    """Headers of the Messages API. Chat Completions takes them too."""
    return {"x-api-key": key, "anthropic-version": "2023-06-01"}


async def ask(
    http: httpx.AsyncClient,
    body: Mapping[str, Any],
    url: str = MESSAGES,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a body and read the answer to its end. A fault of the connection is the answer's
    `error`."""
    answer = Answer()
    try:
        async with http.stream("POST", url, json=body, headers=headers) as reply:
            if answer.begin(reply):
                async for line in reply.aiter_lines():
                    answer.take(line)
            else:
                answer.take_whole(await reply.aread())
    except httpx.TransportError as error:
        return answer.end(error)
    return answer.end()


def ask_now(http: httpx.Client, body: Mapping[str, Any]) -> Answer:
    """Like `ask`, for the Messages API and for programs that are not asynchronous."""
    answer = Answer()
    try:
        with http.stream("POST", MESSAGES, json=body) as reply:
            if answer.begin(reply):
                for line in reply.iter_lines():
                    answer.take(line)
            else:
                answer.take_whole(reply.read())
    except httpx.TransportError as error:
        return answer.end(error)
    return answer.end()
