"""Clients of a gateway that may die at any moment: what each was told, and nothing more.

Of three kinds: a stream of the Messages API, one answer of it, a stream of Chat Completions.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.stack import API_KEY

MESSAGES_HEADERS = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
CHAT_HEADERS = {"authorization": f"Bearer {API_KEY}"}
NUM_PREFIXES = 12
PAUSE_SECONDS = 0.1


@dataclass(slots=True)
class Told:
    """What a client knows of one turn. `usage` has the ledger's names; `is_final` once it saw the
    last event."""

    turn_id: str
    usage: dict[str, int]
    is_final: bool = False


@dataclass
class Clients:
    """`told` has every turn that began to answer, by id. `refused` counts statuses that are not 200
    and `broken` the connections that ended too early."""

    url: str
    model: str
    max_tokens: int
    rng: random.Random
    told: dict[str, Told] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    broken: int = 0
    num_running: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, count: int) -> None:
        """Keep `count` clients busy until stopping; each ends the turn that it has begun."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(count)))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        kind = (self._stream, self._stream, self._answer, self._chat)[number % 4]
        while not self.stopping.is_set():
            self.num_running += 1
            try:
                await kind(http)
            except httpx.TransportError:
                self.broken += 1
                await asyncio.sleep(PAUSE_SECONDS)
            finally:
                self.num_running -= 1

    def _prompt(self) -> tuple[list[dict[str, Any]], str]:
        """One of a few marked system prompts, so that there are reads, and a new question."""
        number = self.rng.randrange(NUM_PREFIXES)
        ttl = "1h" if number % 2 else "5m"
        text = f"Handbook {number}. " + " ".join(f"Rule {i} of {number}." for i in range(60))
        control = {"type": "ephemeral", "ttl": ttl}
        question = f"What is rule {self.rng.randrange(10**9)}?"
        return [{"type": "text", "text": text, "cache_control": control}], question

    def _messages_body(self, *, stream: bool) -> dict[str, Any]:
        system, question = self._prompt()
        return {
            "model": self.model,
            "max_tokens": self.rng.randint(1, self.max_tokens),
            "stream": stream,
            "system": system,
            "messages": [{"role": "user", "content": question}],
        }

    async def _stream(self, http: httpx.AsyncClient) -> None:
        body, told = self._messages_body(stream=True), None
        url = f"{self.url}/v1/messages"
        async with http.stream("POST", url, json=body, headers=MESSAGES_HEADERS) as response:
            if not await self._is_taken(response):
                return
            async for event in _events(response):
                if event["type"] == "message_start":
                    told = self._begin(event["message"]["id"], event["message"]["usage"])
                elif event["type"] == "message_delta" and told is not None:
                    told.usage["output_tokens"] = event["usage"]["output_tokens"]
                elif event["type"] == "message_stop" and told is not None:
                    told.is_final = True

    async def _answer(self, http: httpx.AsyncClient) -> None:
        body = self._messages_body(stream=False)
        url = f"{self.url}/v1/messages"
        response = await http.post(url, json=body, headers=MESSAGES_HEADERS)
        if await self._is_taken(response):
            message = response.json()
            told = self._begin(message["id"], message["usage"])
            told.usage["output_tokens"] = message["usage"]["output_tokens"]
            told.is_final = True

    async def _chat(self, http: httpx.AsyncClient) -> None:
        system, question = self._prompt()
        body = {
            "model": self.model,
            "max_tokens": self.rng.randint(1, self.max_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ],
        }
        url, usage, turn_id = f"{self.url}/v1/chat/completions", None, ""
        async with http.stream("POST", url, json=body, headers=CHAT_HEADERS) as response:
            if not await self._is_taken(response):
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]" and usage is not None:
                    counts = {"output_tokens": usage["completion_tokens"]}
                    self.told[turn_id] = Told(turn_id, counts, is_final=True)
                elif line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    turn_id = "msg_" + chunk.get("id", "").removeprefix("chatcmpl-")
                    usage = chunk.get("usage") or usage

    async def _is_taken(self, response: httpx.Response) -> bool:
        if response.status_code == 200:
            return True
        self.refused[response.status_code] = self.refused.get(response.status_code, 0) + 1
        await asyncio.sleep(PAUSE_SECONDS)
        return False

    def _begin(self, turn_id: str, usage: Mapping[str, Any]) -> Told:
        written = usage["cache_creation"]
        counts = {
            "input_tokens": usage["input_tokens"],
            "cache_read_tokens": usage["cache_read_input_tokens"],
            "cache_write_5m_tokens": written["ephemeral_5m_input_tokens"],
            "cache_write_1h_tokens": written["ephemeral_1h_input_tokens"],
        }
        self.told[turn_id] = Told(turn_id, counts)
        return self.told[turn_id]


async def _events(response: httpx.Response) -> Any:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
