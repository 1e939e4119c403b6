"""Turns for the advisor's tests, made of prompts by the gateway's own code."""

import random
from collections.abc import Sequence

from engine.protocol import (
    InputUsage,
    Message,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from gateway.advice.observation import Observation, Row, Served, observe
from gateway.prices.money import NanoDollars
from gateway.prices.price import TokenPrices
from gateway.prompt.fingerprint import unpack
from tests.gateway.advice.shapes import Sent, fingerprint

RATES = TokenPrices(
    input=NanoDollars(1000),
    writes={"5m": NanoDollars(1250), "1h": NanoDollars(2000)},
    read=NanoDollars(100),
    output=NanoDollars(5000),
)


def turns_of(
    sent: Sequence[Sent],
    *,
    dialect: str = "openai",
    rates: TokenPrices | None = RATES,
    begins_after_ms: int = 0,
) -> list[Observation]:
    """Turns that were computed as a whole, ten thousand tokens a second."""
    made = []
    for number, each in enumerate(sent):
        printed = unpack(fingerprint(each))
        total = printed.num_tokens
        served = Served(
            usage=InputUsage(input_tokens=total, computed_tokens=total),
            begun_ms=each.at_ms + begins_after_ms,
            prefill_seconds=total / 10_000,
        )
        row = Row(
            id=f"msg_{number}",
            at_ms=each.at_ms,
            workspace="w",
            key="k",
            model="m",
            dialect=dialect,
            served=served,
            rates=rates,
        )
        found = observe(row, printed)
        assert found is not None
        made.append(found)
    return made


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
            said = [_said(chance, number) for _ in range(count)]
            messages.append(Message("assistant", said))
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
