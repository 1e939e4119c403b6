"""scripts/bench: the list has every benchmark, and routing's ceiling against a plain count."""

import random
import re
from itertools import takewhile

import pytest

from scripts.bench.__main__ import BENCHMARKS, ELSEWHERE, NEEDS
from scripts.bench.routing_load import BLOCK_TOKENS, Workload, ceiling_of
from scripts.setup.install_needs import ROOT, read_project, requirements_of

SCAFFOLD = 4


def test_every_benchmark_is_listed_and_what_it_needs_is_an_extra_or_a_group() -> None:
    # Beside the list stand what the benchmarks themselves start.
    servers = {"__main__", "gateway_engine", "gateway_floor", "openai_engine", "peers"}
    programs = {
        path.stem
        for path in (ROOT / "scripts" / "bench").glob("*.py")
        if re.search(r"^if __name__ ==", path.read_text("utf-8"), re.MULTILINE)
    }
    assert programs - servers == BENCHMARKS.keys() | ELSEWHERE.keys()
    assert all(requirements_of(need, read_project()) for need in NEEDS)


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


def test_a_workload_is_drawn_by_its_seed_and_shares_a_tenants_prompt() -> None:
    workload = Workload(tenants=3, conversations=2, turns=4)
    scripts = workload.scripts()
    assert scripts == workload.scripts() != Workload(3, 2, 4, seed=2).scripts()
    assert len({system for system, _ in scripts}) == 3
    questions = {question for _, asked in scripts for question in asked}
    assert len(questions) == 24
