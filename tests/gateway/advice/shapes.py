"""Made-up traffic for the advisor: what its shapes are made of.

Prompts are real ones of random words; they pass through the gateway's own names, sketches and
fingerprints. Token counts are bytes / 4.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from engine.protocol import (
    InputUsage,
    Message,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
    Ttl,
)
from gateway.advice.observation import Observation, Row, observe
from gateway.prices.price import NanoDollars, TokenPrices
from gateway.prompt.fingerprint import Fingerprint, kinds_at, pack, points_of, unpack
from gateway.prompt.names import NAMES_RULE, find_prefixes
from gateway.prompt.sketch import kinds_of, sketch_of

SCOPE = "scope-of-made-up-traffic"
_BYTES_PER_TOKEN = 4
START_MS = 1_760_000_000_000
MINUTE_MS = 60_000
HOUR_MS = 3_600_000
DAY_MS = 86_400_000
WORDS = (
    "order ticket customer refund invoice search result parcel address weather city number policy"
    " answer question short polite always never value field amount total history account report"
    " release branch commit review module class method error trace retry queue worker cache token"
).split()
RATES = TokenPrices(
    input=NanoDollars(1000),
    writes={"5m": NanoDollars(1250), "1h": NanoDollars(2000)},
    read=NanoDollars(100),
    output=NanoDollars(5000),
)


class Sent(NamedTuple):
    at_ms: int
    prompt: Prompt
    marks: tuple[tuple[int, Ttl], ...] = ()


@dataclass
class Author:
    """Writes texts. What it wrote once it does not write again."""

    chance: random.Random
    _numbers: Iterator[int] = field(default_factory=count)

    def words(self, num: int) -> str:
        return " ".join(self.chance.choices(WORDS, k=num))

    def text(self, lines: int = 0) -> str:
        """Some lines of text, 16 to 40 without a number."""
        lines = lines or self.chance.randint(16, 40)
        return "\n".join(f"{next(self._numbers)}. {self.words(14)}" for _ in range(lines))

    def line(self) -> str:
        return f"{next(self._numbers)} {self.words(self.chance.randint(6, 24))}"

    def tools(self, num: int = 0) -> list[Tool]:
        num = num or self.chance.randint(4, 9)
        return [
            Tool(
                f"tool_{next(self._numbers)}",
                {
                    "type": "object",
                    "properties": {
                        word: {"type": "string", "description": self.words(8)}
                        for word in self.chance.sample(WORDS, 4)
                    },
                    "required": [],
                },
                self.words(20),
            )
            for _ in range(num)
        ]


def user(*texts: str) -> Message:
    return Message("user", [TextPart(text) for text in texts])


def assistant(text: str) -> Message:
    return Message("assistant", [TextPart(text)])


def at(number: int, gap_ms: int = 20_000) -> int:
    return START_MS + number * gap_ms


def shuffled_keys(value: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    names = list(value)
    while len(names) > 1 and names == list(value):
        chance.shuffle(names)
    return {name: value[name] for name in names}


def single(author: Author, tools: list[Tool], *system: str) -> Prompt:
    return Prompt([user(author.line())], tools=tools, system=[TextPart(text) for text in system])


def fingerprint(sent: Sent) -> bytes:
    prompt = sent.prompt
    prefixes = find_prefixes(prompt, SCOPE)
    points = points_of(prefixes)
    tokens = [max(1, point.num_bytes // _BYTES_PER_TOKEN) for point in points]
    return pack(
        Fingerprint(
            model="model",
            parameters=b"",
            num_tools=len(prompt.tools),
            num_system=len(prompt.system),
            points=points,
            num_tokens=tokens[-1] + 4,
            tokens=tokens,
            kinds=kinds_at(points, kinds_of(prompt)),
            marks=list(sent.marks),
            sketch=sketch_of(prompt, SCOPE),
            rule=NAMES_RULE,
        )
    )


def turns_of(
    sent: Sequence[Sent],
    *,
    dialect: str = "openai",
    rates: TokenPrices | None = RATES,
    begins_after_ms: int = 0,
) -> list[Observation]:
    """Turns that were computed as a whole, ten thousand tokens a second."""
    turns = []
    for number, request in enumerate(sent):
        printed = unpack(fingerprint(request))
        total = printed.num_tokens
        row = Row(
            id=f"msg_{number}",
            at_ms=request.at_ms,
            workspace="w",
            key="k",
            model="m",
            dialect=dialect,
            usage=InputUsage(input_tokens=total, computed_tokens=total),
            begun_ms=request.at_ms + begins_after_ms,
            token_seconds=1 / 10_000,
            rates=rates,
        )
        turn = observe(row, printed)
        assert turn is not None
        turns.append(turn)
    return turns


def random_prompt(chance: random.Random) -> Prompt:
    """Of all kinds of segments; a few contents, so that prompts share prefixes."""
    tools = [Tool(f"t{n}", {"a": n}) for n in range(chance.randint(0, 3))]
    system = [TextPart(f"s{n} " * 60) for n in range(chance.randint(0, 3))]
    messages = []
    for number in range(chance.randint(1, 6)):
        count = chance.randint(1, 3)
        if number % 2 == 0:
            parts = [_asked(chance, number) for _ in range(count)]
            messages.append(Message("user", parts))
        else:
            answer_parts = [_said(chance, number) for _ in range(count)]
            messages.append(Message("assistant", answer_parts))
    return Prompt(messages, tools=tools, system=system)


def _asked(chance: random.Random, number: int) -> TextPart | ToolResultPart:
    word = f"{number}.{chance.randint(0, 1)} "
    if chance.random() < 0.4:
        return ToolResultPart(f"c{number}", word * 30)
    return TextPart(word * 40)


def _said(chance: random.Random, number: int) -> TextPart | ThinkingPart | ToolUsePart:
    word = f"{number}.{chance.randint(0, 1)} "
    roll = chance.random()
    if roll < 0.3:
        return ThinkingPart(word * 20)
    if roll < 0.7:
        return ToolUsePart(f"c{number}", "t0", {"q": word * 20})
    return TextPart(word * 30)
