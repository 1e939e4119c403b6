"""Blocks of exactly so many tokens, sent through the gateway to native engines on a manual clock.

The vectors' counts are in the spec's terms: a block is what the rendered prefix grows by when it is
added, and the tail behind the last block is 4. The template's own tail is taken off and 4 put on.
"""

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from engine.protocol import Prompt, Ttl
from tests.fuzz.servers import Machines, message_outcome
from tests.fuzz.talks import Kind, Marks, Piece, Talk

TAIL = 4
MODEL = "v1024"
OTHER_MODEL = "other"
HEADERS = {"anthropic-version": "2023-06-01"}
Counts = tuple[int, int, int, int]
"""(input, read, 5m writes, 1h writes)."""


class Block(NamedTuple):
    """`section` T, S or M; messages are numbered, the user's even; `name` is the content."""

    section: str
    name: str
    tokens: int
    ttl: Ttl | None = None
    kind: Kind = "text"
    message: int = 0


def tool(name: str, tokens: int, ttl: Ttl | None = None) -> Block:
    return Block("T", name, tokens, ttl)


def system(name: str, tokens: int, ttl: Ttl | None = None) -> Block:
    return Block("S", name, tokens, ttl)


def said(name: str, tokens: int, ttl: Ttl | None = None, message: int = 0) -> Block:
    return Block("M", name, tokens, ttl, "text", message)


@dataclass
class World:
    """One gateway and its engines. `keys` by the workspace's name; `again` is a second one."""

    machines: Machines
    url: str
    keys: dict[str, str]

    def post(
        self, path: str, body: dict[str, Any], key: str = "default", **more: str
    ) -> httpx.Response:
        """`more` headers."""
        headers = {**HEADERS, "x-api-key": self.keys[key], **more}
        return httpx.post(f"{self.url}/v1/{path}", json=body, headers=headers, timeout=120)

    def get(self, path: str, key: str = "default") -> httpx.Response:
        headers = {**HEADERS, "x-api-key": self.keys[key]}
        return httpx.get(f"{self.url}/v1/{path}", headers=headers, timeout=120)


@dataclass
class Vector:
    """One vector: its words are its own, its clock starts at 0."""

    world: World
    name: str
    now: float = 0.0
    _texts: dict[tuple[str, str, int], str] = field(default_factory=dict)

    def ask(
        self,
        *blocks: Block,
        auto: Ttl | None = None,
        at: float | None = None,
        model: str = MODEL,
        key: str = "default",
        **changes: Any,
    ) -> Counts:
        """The counters of one turn `at` so many seconds, with the spec's tail."""
        self.wait_until(at)
        body, tail, total = self.body(*blocks, auto=auto, model=model, **changes)
        response = self.world.post("messages", body, key)
        assert response.status_code == 200, response.text
        return self.counts(response.json(), tail, total)

    def counts(self, message: dict[str, Any], tail: int, total: int) -> Counts:
        """Holds V38 on every response: the parts add up, to what the engine counts."""
        counts = message_outcome(message).usage
        assert counts is not None and sum(counts) == total
        return counts[0] - tail + TAIL, counts[1], counts[2], counts[3]

    def wait_until(self, at: float | None) -> None:
        if at is not None:
            self.world.machines.advance(at - self.now)
            self.now = at

    def body(
        self, *blocks: Block, auto: Ttl | None = None, model: str = MODEL, **changes: Any
    ) -> tuple[dict[str, Any], int, int]:
        """A request, the tokens behind its last block, and all of its tokens."""
        talk = self._talk(blocks)
        ends, total = self._count(talk.prompt())
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        assert sizes == [block.tokens for block in blocks], "blocks of other sizes than wanted"
        marks = {index: block.ttl for index, block in enumerate(blocks) if block.ttl}
        body = talk.body(Marks(marks, auto))
        body |= {"model": model, "max_tokens": 1, "temperature": 0}
        return body | changes, total - ends[-1], total

    def _talk(self, blocks: tuple[Block, ...]) -> Talk:
        """Built block by block; a name's text is found once and stays."""
        talk = Talk(random.Random(), self.name, 0)
        uses: list[str] = []
        for index, block in enumerate(blocks):
            key = (block.section, block.name, block.tokens)
            if block.kind == "tool_use":
                uses.append(block.name)
            if key not in self._texts:
                self._texts[key] = self._fit(talk, block, index)
            _add(talk, block, self._texts[key])
        return talk

    def _fit(self, talk: Talk, block: Block, index: int) -> str:
        """A text with which the prefix grows by exactly the block's tokens."""
        head = f"{self.name}{block.name}"
        num_words = block.tokens
        if block.tokens < 40:
            head = ""
        for _ in range(4):
            text = head + " the" * num_words
            grown = talk.fork(talk.name)
            _add(grown, block, text)
            if not grown.turns:
                grown.turns = [[Piece("text", "x")]]
            elif len(grown.turns) % 2 == 0:
                grown.turns.append([Piece("text", "x")])
            ends, _ = self._count(grown.prompt())
            excess = ends[index] - (ends[index - 1] if index else 0) - block.tokens
            if not excess:
                return text
            num_words -= excess
            assert num_words > 0, f"{block} is smaller than its scaffold"
        raise AssertionError(f"no text makes {block}")

    def _count(self, prompt: Prompt) -> tuple[list[int], int]:
        counted = self.world.machines.engines[0].count(prompt)
        return [end or 0 for end in counted.segment_tokens], counted.input_tokens


def _add(talk: Talk, block: Block, text: str) -> None:
    if block.section == "T":
        talk.tools.append(text)
    elif block.section == "S":
        talk.system.append(text)
    else:
        while len(talk.turns) <= block.message:
            talk.turns.append([])
        call = f"call_{block.name.removesuffix('r')}" if block.kind.startswith("tool") else ""
        talk.turns[block.message].append(Piece(block.kind, text, call))
