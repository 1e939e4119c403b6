"""Random conversations against the reference model: the counters must be equal, to the token."""

import os
import random
from dataclasses import dataclass, field
from typing import Literal

import pytest

from engine.protocol import (
    CountReply,
    Message,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
    Ttl,
)
from tests.conformance.engines import Engine
from tests.conformance.oracle import B, Cache

SEED = int(os.environ.get("CONFORMANCE_SEED", "20260"))
SEQUENCES = int(os.environ.get("CONFORMANCE_SEQUENCES", "30"))
REQUESTS = 8
MINIMUM = 32
WAITS = (0, 0, 1, 120, 299, 300, 301, 1800, 3599, 3600)

Kind = Literal["text", "thinking", "tool_use", "tool_result"]


@dataclass
class Piece:
    kind: Kind
    text: str


@dataclass
class Talk:
    """A conversation that grows and is edited; its words are its own, so no two prefixes meet."""

    rng: random.Random
    has_tools: bool
    longest: int
    serial: int = 0
    tools: list[str] = field(default_factory=list)
    system: list[str] = field(default_factory=list)
    turns: list[list[Piece]] = field(default_factory=list)

    def words(self) -> str:
        """5 to `longest` tokens of one each 4 bytes; never the same twice."""
        self.serial += 1
        size = 4 * self.rng.randint(5, self.longest)
        return (f"{self.serial} " + f"{self.rng.getrandbits(60):x} " * 60)[:size]

    def begin(self) -> None:
        if self.has_tools:
            self.tools = [self.words() for _ in range(self.rng.randint(0, 3))]
        self.system = [self.words() for _ in range(self.rng.randint(0, 3))]
        self.turns = [[Piece("text", self.words())]]

    def grow(self) -> None:
        """An answer, perhaps with calls, and what the user says to it."""
        answer = [Piece("thinking", self.words())] if self.rng.random() < 0.2 else []
        reply: list[Piece] = []
        if self.has_tools and self.rng.random() < 0.5:
            calls = self.rng.randint(1, 12)
            answer += [Piece("tool_use", self.words()[:60]) for _ in range(calls)]
            reply += [Piece("tool_result", self.words()) for _ in range(calls)]
        else:
            answer += [Piece("text", self.words()) for _ in range(self.rng.randint(1, 3))]
        reply += [Piece("text", self.words()) for _ in range(self.rng.choice([1, 1, 2, 22]))]
        self.turns += [answer, reply]

    def edit(self) -> None:
        lists: list[list[str]] = [texts for texts in (self.tools, self.system) if texts]
        if lists and self.rng.random() < 0.5:
            texts = self.rng.choice(lists)
            texts[self.rng.randrange(len(texts))] = self.words()
        else:
            piece = self.rng.choice(self.rng.choice(self.turns))
            piece.text = self.words()[: len(piece.text)]

    def cut(self) -> None:
        if len(self.turns) > 2:
            del self.turns[-2:]

    def prompt(self) -> Prompt:
        return Prompt(
            messages=[
                Message("assistant" if turn % 2 else "user", [_part(p) for p in pieces])
                for turn, pieces in enumerate(self.turns)
            ],
            system=[TextPart(text) for text in self.system],
            tools=[Tool(f"t{i}", {"d": text}) for i, text in enumerate(self.tools)],
        )

    def blocks(self, counted: CountReply, marks: dict[int, Ttl]) -> list[B]:
        """The same prompt as the reference model wants it; sizes as the engine counts them."""
        keys = [("tools", "text", text, 0) for text in self.tools]
        keys += [("system", "text", text, 0) for text in self.system]
        keys += [
            ("messages", piece.kind, piece.text, turn)
            for turn, pieces in enumerate(self.turns)
            for piece in pieces
        ]
        before, blocks = 0, []
        for index, (section, kind, text, turn) in enumerate(keys):
            end = counted.segment_tokens[index]
            assert end is not None, "this model leaves no boundary here"
            blocks.append(B(section, text, end - before, marks.get(index), kind, turn))
            before = end
        return blocks


def _part(piece: Piece) -> Part:
    match piece.kind:
        case "text":
            return TextPart(piece.text)
        case "thinking":
            return ThinkingPart(piece.text)
        case "tool_use":
            return ToolUsePart("c", "t0", {"q": piece.text})
        case "tool_result":
            return ToolResultPart("c", piece.text)


def choose_marks(rng: random.Random, talk: Talk) -> dict[int, Ttl]:
    """Up to four, the one-hour ones first, none on thinking; mostly near the end, as clients do."""
    head = ["text"] * (len(talk.tools) + len(talk.system))
    kinds = head + [piece.kind for turn in talk.turns for piece in turn]
    places = [index for index, kind in enumerate(kinds) if kind != "thinking"]
    wanted = rng.randint(0, 4)
    last = [places[-1]] if wanted and rng.random() < 0.7 else []
    chosen = sorted({*last, *rng.sample(places, min(max(wanted - 1, 0), len(places)))})[-4:]
    num_hours = rng.randint(0, len(chosen))
    return {place: "1h" if i < num_hours else "5m" for i, place in enumerate(chosen)}


def run_sequence(engine: Engine, seed: int, longest: int) -> list[str]:
    """Play one conversation on both; every difference as a line."""
    rng = random.Random(seed)
    model = Cache(min_tokens=MINIMUM)
    has_tools = engine.has("tools") and engine.description.prefix_order == "tools_first"
    talk = Talk(rng, has_tools, longest)
    talk.begin()
    scopes = [engine.scope(), engine.scope()]
    now, differences = 0.0, []
    for number in range(REQUESTS):
        rng.choice([talk.grow, talk.grow, talk.grow, talk.edit, talk.cut, lambda: None])()
        marks = choose_marks(rng, talk)
        wait, scope = rng.choice(WAITS), rng.choice([scopes[0], *scopes])
        now += wait
        engine.advance(wait)
        asked = talk.prompt()
        counted = engine.count(asked)
        tail = counted.input_tokens - (counted.segment_tokens[-1] or 0)
        want = model.run(talk.blocks(counted, marks), t=now, g=tail, scope=scope)
        usage = engine.ask(asked, scope, *marks.items(), minimum=MINIMUM).usage
        got = {
            "inp": usage.input_tokens,
            "read": usage.cache_read_tokens,
            "w5": usage.cache_write_5m_tokens,
            "w1": usage.cache_write_1h_tokens,
        }
        if got != want:
            differences.append(f"seed {seed} request {number}: {got} instead of {want}")
    for scope in scopes:
        engine.drop(scope)
    return differences


def test_the_counters_are_the_reference_models(engine: Engine) -> None:
    if engine.description.granularity != 1:
        pytest.skip(f"declares granularity {engine.description.granularity}: the model's is 1")
    # An engine that computes takes its time: fewer and shorter sequences there.
    computes = engine.description.kv_bytes_per_token > 0
    number, longest = (max(SEQUENCES // 20, 1), 30) if computes else (SEQUENCES, 200)
    print(f"CONFORMANCE_SEED={SEED}, {number} sequences of {REQUESTS}")
    differences = [line for i in range(number) for line in run_sequence(engine, SEED + i, longest)]
    assert not differences, differences[:10]


def test_synthetic_tokens_are_one_per_four_bytes_and_segment(engine: Engine) -> None:
    if engine.description.model != "synthetic":
        pytest.skip(f"declares backend {engine.description.backend}: no tokens by hand")
    asked = Prompt(messages=[Message("user", [TextPart("12345"), TextPart("é€")])])
    assert engine.count(asked) == CountReply(2 + 2 + 4, [2, 4])
