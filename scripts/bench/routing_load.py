"""The client of scripts.bench.routing, and what an infinite cache would have held.

Between the questions of a conversation stand the answers that really came. A fixed number of
conversations runs at once, each to its end; then the next one begins.
"""

import asyncio
import itertools
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import httpx

from engine.backends.synthetic_renderer import BYTES_PER_TOKEN, SyntheticRenderer
from engine.protocol import Message, Prompt, TextPart
from scripts.bench.load import CHAT, Answer, ask, marked
from scripts.bench.routing_scripts import Script, Workload

BLOCK_TOKENS = 16
REQUEST_SECONDS = 120.0

Marks = Literal["none", "system", "conversation"]
"""Which parts carry `cache_control`: none, the system prompt, or that and the last question."""

Texts = list[str]
"""The system prompt, then question and answer by turns; the last is a question."""


@dataclass(slots=True)
class Observed:
    """What the client saw. Times in seconds, `prompts` in the order in which they were sent."""

    first_token: list[float] = field(default_factory=list)
    prompts: list[Texts] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


def body_of_talk(texts: Texts, marks: Marks, max_tokens: int) -> dict[str, Any]:
    """A streamed chat completion of a conversation so far."""
    last = len(texts) - 1
    ends = {"none": (), "system": (0,), "conversation": (0, last)}[marks]
    messages = []
    for index, text in enumerate(texts):
        role = "system" if index == 0 else "user" if index % 2 else "assistant"
        messages.append({"role": role, "content": marked(text) if index in ends else text})
    return {"model": "synthetic", "messages": messages, "max_tokens": max_tokens, "stream": True}


async def run_load(workload: Workload, urls: Sequence[str], key: str, marks: Marks) -> Observed:
    """Ask `urls` in turn until every conversation is over."""
    observed, turns = Observed(), itertools.cycle(f"{url}{CHAT}" for url in urls)
    waiting = deque(workload.scripts())
    headers = {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        headers=headers, timeout=REQUEST_SECONDS, limits=limits, trust_env=False
    ) as http:

        async def send(texts: Texts) -> Answer:
            return await ask(http, body_of_talk(texts, marks, workload.max_tokens), next(turns))

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(workload.in_flight):
                group.create_task(_converse(send, waiting, observed))
        observed.seconds = time.perf_counter() - begun
    return observed


async def _converse(
    send: Callable[[Texts], Awaitable[Answer]],
    waiting: deque[Script],
    observed: Observed,
) -> None:
    """One conversation after the other; one whose request fails ends there."""
    while waiting:
        system, questions = waiting.popleft()
        texts = [system]
        for question in questions:
            texts.append(question)
            observed.prompts.append(list(texts))
            answer = await send(texts)
            if answer.error or answer.first_seconds is None:
                observed.errors.append(f"{answer.status} {answer.error or 'no text'}")
                break
            observed.first_token.append(answer.first_seconds)
            texts.append(answer.text)


@dataclass(slots=True)
class Ceiling:
    """Tokens that one infinite cache would have reused, by whole blocks and to the token.

    `unique` is what there is to hold, in tokens of whole blocks.
    """

    prompt: int = 0
    by_block: int = 0
    by_token: int = 0
    unique: int = 0


class Ceilings:
    """Of sets of prompts; the same set is looked at once."""

    def __init__(self) -> None:
        self._known: dict[bytes, Ceiling] = {}

    def of(self, prompts: Sequence[Texts]) -> Ceiling:
        digests = sorted(blake2b("\0".join(texts).encode()).digest() for texts in prompts)
        key = blake2b(b"".join(digests)).digest()
        if key not in self._known:
            self._known[key] = ceiling_of(prompts)
        return self._known[key]


def ceiling_of(prompts: Sequence[Texts]) -> Ceiling:
    """Replay prompts as the engine tokenizes them; the last token is always computed."""
    ceiling = Ceiling()
    known: dict[bytes, set[bytes]] = {}
    for texts in prompts:
        tokens = tokens_of(texts)
        size = BLOCK_TOKENS * BYTES_PER_TOKEN
        parent, held, exact, is_known = b"", 0, 0, True
        for start in range(0, len(tokens), size):
            block = tokens[start : start + size]
            behind = known.setdefault(parent, set())
            num_tokens = len(block) // BYTES_PER_TOKEN
            if is_known and block in behind:
                held += num_tokens if num_tokens == BLOCK_TOKENS else 0
                exact += num_tokens
            else:
                if is_known:
                    exact += max((_common(block, other) for other in behind), default=0)
                    is_known = False
                behind.add(block)
                ceiling.unique += num_tokens
            parent = blake2b(parent + block, digest_size=16).digest()
        prompt = len(tokens) // BYTES_PER_TOKEN
        ceiling.prompt += prompt
        ceiling.by_block += min(held, (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        ceiling.by_token += min(exact, prompt - 1)
    return ceiling


def tokens_of(texts: Texts) -> bytes:
    """The prompt's tokens as the engine renders them, four bytes each."""
    prompt = Prompt([Message("user", [TextPart(text)]) for text in texts])
    rendered = SyntheticRenderer().render(prompt, thinking=False, scope="")
    return array("I", rendered.token_ids).tobytes()


def _common(left: bytes, right: bytes) -> int:
    """How many tokens two blocks begin with in common."""
    pairs = zip(array("I", left), array("I", right), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
