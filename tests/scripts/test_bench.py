"""scripts/bench: the list has every benchmark, and routing's ceiling against a plain count."""

import random
from itertools import takewhile

import pytest

from scripts.bench.routing_load import BLOCK_TOKENS, ceiling_of

SCAFFOLD = 4


def words(draw: random.Random, num_tokens: int) -> str:
    return "".join(f"{draw.getrandbits(16):04x}" for _ in range(num_tokens))


def tokens(texts: list[str]) -> list[str]:
    """Of texts whose length is whole tokens."""
    text = "".join(texts)
    return [text[i : i + 4] for i in range(0, len(text), 4)] + ["end"] * SCAFFOLD


def common(one: list[str], other: list[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("seed", range(3))
def test_the_ceiling_is_the_longest_earlier_prefix_of_each_prompt(seed: int) -> None:
    draw = random.Random(seed)
    prompts: list[list[str]] = []
    for _ in range(12):
        before = draw.choice(prompts) if prompts and draw.random() < 0.7 else []
        kept = before[: draw.randint(0, len(before))]
        prompts.append([*kept, words(draw, draw.randint(1, 50)), words(draw, draw.randint(1, 50))])
    prompts.append(list(prompts[0]))  # the very same again: its last token is computed
    texts = [tokens(prompt) for prompt in prompts]
    exact = [
        min(max((common(mine, other) for other in texts[:index]), default=0), len(mine) - 1)
        for index, mine in enumerate(texts)
    ]
    ceiling = ceiling_of(prompts)
    assert ceiling.prompt == sum(map(len, texts))
    assert ceiling.reused == sum(one // BLOCK_TOKENS * BLOCK_TOKENS for one in exact)
