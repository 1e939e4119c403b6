"""Clients of a gateway that may die at any moment: what each was told, and nothing more.

Of three kinds: a stream of the Messages API, one answer of it, a stream of Chat Completions.
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.bench.load import CHAT, MESSAGES, Answer, ask, body_of, headers_of, marked
from scripts.stack import API_KEY

MESSAGES_HEADERS = headers_of(API_KEY)
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
        while not self.stopping.is_set():
            self.num_running += 1
            try:
                answer = await self._turn(http, number % 4)
            finally:
                self.num_running -= 1
            if answer.is_broken:
                self.broken += 1
            elif answer.status != 200:
                self.refused[answer.status] = self.refused.get(answer.status, 0) + 1
            if answer.is_broken or answer.status != 200:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _turn(self, http: httpx.AsyncClient, kind: int) -> Answer:
        return await (self._chat(http) if kind == 3 else self._message(http, stream=kind < 2))

    def _prompt(self) -> tuple[list[dict[str, Any]], str]:
        """One of a few marked system prompts, so that there are reads, and a new question."""
        number = self.rng.randrange(NUM_PREFIXES)
        text = f"Handbook {number}. " + " ".join(f"Rule {i} of {number}." for i in range(60))
        question = f"What is rule {self.rng.randrange(10**9)}?"
        return marked(text, "1h" if number % 2 else "5m"), question

    async def _message(self, http: httpx.AsyncClient, *, stream: bool) -> Answer:
        system, question = self._prompt()
        limit = self.rng.randint(1, self.max_tokens)
        body = body_of(self.model, system, question, max_tokens=limit, stream=stream)
        answer = await ask(http, body, f"{self.url}{MESSAGES}", MESSAGES_HEADERS, self._begin)
        if answer.id:
            told = self._begin(answer)
            told.is_final = answer.is_whole
            if answer.is_whole or "message_delta" in answer.events:
                told.usage["output_tokens"] = answer.usage["output_tokens"]
        return answer

    async def _chat(self, http: httpx.AsyncClient) -> Answer:
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
        answer = await ask(http, body, f"{self.url}{CHAT}", CHAT_HEADERS)
        if answer.is_whole and answer.usage:
            counts = {"output_tokens": answer.usage["completion_tokens"]}
            self.told[answer.id] = Told(answer.id, counts, is_final=True)
        return answer

    def _begin(self, answer: Answer) -> Told:
        usage, written = answer.usage, answer.usage["cache_creation"]
        counts = {
            "input_tokens": usage["input_tokens"],
            "cache_read_tokens": usage["cache_read_input_tokens"],
            "cache_write_5m_tokens": written["ephemeral_5m_input_tokens"],
            "cache_write_1h_tokens": written["ephemeral_1h_input_tokens"],
        }
        self.told[answer.id] = Told(answer.id, counts)
        return self.told[answer.id]
