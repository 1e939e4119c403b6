"""The client of scripts.bench.routing, and what an infinite cache would have held.

Between the questions of a conversation stand the answers that really came. A fixed number of
conversations runs at once, each to its end; then the next one begins.
"""

import asyncio
import random
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import httpx

from engine.backends.synthetic_renderer import BYTES_PER_TOKEN, SyntheticRenderer
from engine.protocol import Message, Prompt, TextPart
from scripts.bench.load import CHAT, ask, marked

Shape = Literal["tenants", "parting", "sessions"]
SHAPES: tuple[Shape, ...] = ("tenants", "parting", "sessions")
Script = tuple[str, list[str]]
"""A conversation: its system text, and its questions."""

SYSTEM_BYTES = 8192
QUESTION_BYTES = 1600
SHARED_BYTES = 7168
NUM_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Workload:
    tenants: int = 24
    conversations: int = 6
    turns: int = 8
    in_flight: int = 24
    max_tokens: int = 2
    seed: int = 1
    shape: Shape = "tenants"

    def scripts(self) -> list[Script]:
        """All conversations, in the order in which they begin.

        `tenants`: each has a system text and conversations. `parting`: system texts begin alike,
        conversations are short. `sessions`: as many as tenants, and single questions.
        """
        draw = random.Random(self.seed)
        scripts: list[Script] = []
        if self.shape == "sessions":
            systems = _parted(draw, self.tenants)
            for system in systems:
                turns = draw.randint(self.turns, 5 * self.turns // 2)
                sizes = [draw.randint(800, 6000) for _ in range(turns)]
                scripts.append((system, [_prose(draw, size) for size in sizes]))
            for _ in range(sum(len(questions) for _, questions in scripts)):
                scripts.append((draw.choice(systems), [_prose(draw, draw.randint(1000, 16_000))]))
        elif self.shape == "parting":
            for system in _parted(draw, self.tenants):
                scripts += self._conversations(draw, system, max(self.turns // 4, 1))
        else:
            for _ in range(self.tenants):
                system = _prose(draw, SYSTEM_BYTES)
                scripts += self._conversations(draw, system, self.turns)
        draw.shuffle(scripts)
        return scripts

    def _conversations(self, draw: random.Random, system: str, turns: int) -> list[Script]:
        return [
            (system, [_prose(draw, QUESTION_BYTES) for _ in range(turns)])
            for _ in range(self.conversations)
        ]


def _parted(draw: random.Random, number: int) -> list[str]:
    """System texts of 8 to 12 KB in NUM_GROUPS groups; those of a group begin alike."""
    groups = [_prose(draw, SHARED_BYTES) for _ in range(NUM_GROUPS)]
    return [
        groups[index % NUM_GROUPS] + _prose(draw, draw.randint(1024, 5120))
        for index in range(number)
    ]


def _prose(draw: random.Random, num_bytes: int) -> str:
    words = []
    size = 0
    while size <= num_bytes:
        words.append(f"{draw.getrandbits(24):06x}"[: draw.randint(2, 6)])
        size += len(words[-1]) + 1
    return " ".join(words)[:num_bytes]


BLOCK_TOKENS = 16
REQUEST_SECONDS = 120.0

Texts = list[str]
"""The system prompt, then question and answer by turns; the last is a question."""


@dataclass(slots=True)
class Observed:
    """What the client saw. Times in seconds, `prompts` in the order in which they were sent."""

    first_token: list[float] = field(default_factory=list)
    prompts: list[Texts] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


def body_of_talk(texts: Texts, max_tokens: int, *, is_marked: bool) -> dict[str, Any]:
    """A streamed chat completion; its system prompt and its last question may be marked."""
    ends = (0, len(texts) - 1) if is_marked else ()
    messages = []
    for index, text in enumerate(texts):
        role = "system" if index == 0 else "user" if index % 2 else "assistant"
        messages.append({"role": role, "content": marked(text) if index in ends else text})
    return {"model": "synthetic", "messages": messages, "max_tokens": max_tokens, "stream": True}


async def run_load(workload: Workload, url: str, key: str, *, is_marked: bool) -> Observed:
    """Ask until every conversation is over."""
    observed, waiting = Observed(), deque(workload.scripts())
    headers = {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        headers=headers, timeout=REQUEST_SECONDS, limits=limits, trust_env=False
    ) as http:

        async def converse() -> None:
            """One conversation after the other; one whose request fails ends there."""
            while waiting:
                system, questions = waiting.popleft()
                texts = [system]
                for question in questions:
                    texts.append(question)
                    observed.prompts.append(list(texts))
                    body = body_of_talk(texts, workload.max_tokens, is_marked=is_marked)
                    answer = await ask(http, body, f"{url}{CHAT}")
                    if answer.error or answer.first_seconds is None:
                        observed.errors.append(f"{answer.status} {answer.error or 'no text'}")
                        break
                    observed.first_token.append(answer.first_seconds)
                    texts.append(answer.text)

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(workload.in_flight):
                group.create_task(converse())
        observed.seconds = time.perf_counter() - begun
    return observed


@dataclass(slots=True)
class Ceiling:
    """Tokens of prompts, those that one infinite cache would have reused by whole blocks, and how
    many different ones there are to hold."""

    prompt: int = 0
    reused: int = 0
    unique: int = 0


def ceiling_of(prompts: Sequence[Texts]) -> Ceiling:
    """Replay prompts as the engine tokenizes them; the last token is always computed."""
    ceiling, known, size = Ceiling(), set[bytes](), BLOCK_TOKENS * BYTES_PER_TOKEN
    for texts in prompts:
        tokens, chain, num_held = tokens_of(texts), b"", 0
        for start in range(0, len(tokens), size):
            block = tokens[start : start + size]
            chain = blake2b(chain + block, digest_size=16).digest()
            if chain not in known:
                known.add(chain)
                ceiling.unique += len(block) // BYTES_PER_TOKEN
            elif len(block) == size:
                num_held += BLOCK_TOKENS
        prompt = len(tokens) // BYTES_PER_TOKEN
        ceiling.prompt += prompt
        ceiling.reused += min(num_held, (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    return ceiling


def tokens_of(texts: Texts) -> bytes:
    """The prompt's tokens as the engine renders them, four bytes each."""
    prompt = Prompt([Message("user", [TextPart(text)]) for text in texts])
    rendered = SyntheticRenderer().render(prompt, thinking=False, scope="")
    return array("I", rendered.token_ids).tobytes()
