"""Clients that keep asking through the official SDKs, without retries, and note what each was told.

Of four kinds: Messages and Chat Completions, each as a stream and as one answer.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import openai
from anthropic.types import Usage
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionStreamOptionsParam

from scripts.stack import API_KEY
from tests.gateway.serving import eventually

NUM_PREFIXES = 12
TIMEOUT_SECONDS = 600.0
PAUSE_SECONDS = 0.1


@dataclass(slots=True)
class Told:
    """What a client knows of one turn that began to answer.

    `usage` has the ledger's names; `prompt_tokens` is all of the input, None where not told.
    """

    turn_id: str
    usage: dict[str, int]
    prompt_tokens: int | None = None
    is_final: bool = False
    has_error_event: bool = False


@dataclass
class SdkClients:
    """`early` are failures before the first byte of the answer, `silent` streams that ended without
    their last event and without an error event: neither may happen."""

    url: str
    model: str
    max_tokens: int
    rng: random.Random
    told: dict[str, Told] = field(default_factory=dict)
    num_asked: int = 0
    early: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def broken(self) -> list[Told]:
        return [answer for answer in self.told.values() if answer.has_error_event]

    async def begun(self, num_more: int) -> None:
        """Wait until so many more turns have begun to answer."""
        enough = len(self.told) + num_more
        await asyncio.to_thread(eventually, lambda: len(self.told) >= enough)

    async def run(self, count: int) -> None:
        """Keep `count` clients busy until stopping; each ends the turn that it has begun."""
        options: Any = {"api_key": API_KEY, "timeout": TIMEOUT_SECONDS, "max_retries": 0}
        async with (
            anthropic.AsyncAnthropic(base_url=self.url, **options) as messages,
            openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options) as chat,
        ):
            kinds = (
                lambda: self._message_stream(messages),
                lambda: self._chat_stream(chat),
                lambda: self._message(messages),
                lambda: self._chat(chat),
            )
            await asyncio.gather(*(self._client(kinds[i % 4]) for i in range(count)))

    async def _client(self, ask: Any) -> None:
        while not self.stopping.is_set():
            self.num_asked += 1
            await ask()

    def _prompt(self) -> tuple[list[Any], str]:
        """One of a few marked system prompts, so that there are reads, and a new question."""
        number = self.rng.randrange(NUM_PREFIXES)
        text = f"Handbook {number}. " + " ".join(f"Rule {i} of {number}." for i in range(60))
        control = {"type": "ephemeral", "ttl": "1h" if number % 2 else "5m"}
        question = f"What is rule {self.rng.randrange(10**9)}?"
        return [{"type": "text", "text": text, "cache_control": control}], question

    def _message_fields(self) -> dict[str, Any]:
        system, question = self._prompt()
        messages = [{"role": "user", "content": question}]
        return {**self._common(), "system": system, "messages": messages}

    def _chat_fields(self) -> dict[str, Any]:
        roles = zip(("system", "user"), self._prompt(), strict=True)
        messages = [{"role": role, "content": content} for role, content in roles]
        return {**self._common(), "messages": messages}

    def _common(self) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": self.rng.randint(1, self.max_tokens)}

    async def _message_stream(self, client: anthropic.AsyncAnthropic) -> None:
        answer = None
        try:
            async with await client.messages.create(
                **self._message_fields(), stream=True
            ) as events:
                async for event in events:
                    if event.type == "message_start":
                        usage = event.message.usage
                        answer = self._begin(Told(event.message.id, _classes(usage)))
                    elif answer is not None and event.type == "message_delta":
                        answer.usage["output_tokens"] = event.usage.output_tokens
                    elif answer is not None and event.type == "message_stop":
                        answer.is_final = True
        except (anthropic.APIError, httpx2.TransportError) as error:
            # The SDK makes one from an `error` event, and none of a connection that breaks later.
            await self._failed("messages stream", error, answer, _is_event(error))
        else:
            self._ended("messages stream", answer)

    async def _chat_stream(self, client: openai.AsyncOpenAI) -> None:
        answer = None
        options: ChatCompletionStreamOptionsParam = {"include_usage": True}
        try:
            async with await client.chat.completions.create(
                **self._chat_fields(), stream=True, stream_options=options
            ) as chunks:
                async for chunk in chunks:
                    if answer is None:
                        answer = self._begin(Told(_turn_id(chunk.id), {}))
                    if chunk.usage is not None:
                        _take(answer, chunk.usage)
        except (openai.APIError, httpx2.TransportError) as error:
            await self._failed("chat stream", error, answer, _is_event(error))
        else:
            self._ended("chat stream", answer)

    async def _message(self, client: anthropic.AsyncAnthropic) -> None:
        try:
            message = await client.messages.create(**self._message_fields())
        except anthropic.APIError as error:
            await self._failed("messages", error, None, False)
        else:
            usage = {**_classes(message.usage), "output_tokens": message.usage.output_tokens}
            self._begin(Told(message.id, usage, is_final=True))

    async def _chat(self, client: openai.AsyncOpenAI) -> None:
        try:
            completion = await client.chat.completions.create(**self._chat_fields())
        except openai.APIError as error:
            await self._failed("chat", error, None, False)
        else:
            answer = self._begin(Told(_turn_id(completion.id), {}))
            _take(answer, completion.usage)

    def _begin(self, answer: Told) -> Told:
        self.told[answer.turn_id] = answer
        return answer

    async def _failed(
        self, kind: str, error: Exception, answer: Told | None, is_event: bool
    ) -> None:
        what = f"{kind}: {type(error).__name__}: {error}"[:200]
        if answer is None:
            self.early[what] += 1
        elif is_event:
            answer.has_error_event = True
        else:
            self.silent[what] += 1
        await asyncio.sleep(PAUSE_SECONDS)

    def _ended(self, kind: str, answer: Told | None) -> None:
        if answer is None:
            self.early[f"{kind}: ended without an event"] += 1
        elif not answer.is_final:
            self.silent[f"{kind}: ended without its last event"] += 1


def _is_event(error: Exception) -> bool:
    """Whether it came as an event of the stream, in the dialect's own shape."""
    match error:
        case anthropic.APIConnectionError() | openai.APIConnectionError():
            return False
        case anthropic.APIError(body={"type": "error", "error": {"type": str(), "message": str()}}):
            return True
        case openai.APIError(body={"message": str(), "type": str(), "code": _}):
            return True
        case _:
            return False


def _turn_id(completion_id: str) -> str:
    return "msg_" + completion_id.removeprefix("chatcmpl-")


def _take(answer: Told, usage: CompletionUsage | None) -> None:
    """Chat Completions tells usage once, at the end."""
    assert usage is not None
    answer.usage["output_tokens"] = usage.completion_tokens
    answer.prompt_tokens = usage.prompt_tokens
    answer.is_final = True


def _classes(usage: Usage) -> dict[str, int]:
    cache_creation = usage.cache_creation
    assert cache_creation is not None
    return {
        "input_tokens": usage.input_tokens,
        "cache_read_tokens": usage.cache_read_input_tokens or 0,
        "cache_write_5m_tokens": cache_creation.ephemeral_5m_input_tokens,
        "cache_write_1h_tokens": cache_creation.ephemeral_1h_input_tokens,
    }
