"""scripts/bench/routing.py: its ceiling against a plain count, and a small real run."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.routing_load import BLOCK_TOKENS, Workload, ceiling_of

ROOT = Path(__file__).resolve().parents[2]

SCAFFOLD = 4


def words(draw: random.Random, num_tokens: int) -> str:
    return "".join(f"{draw.getrandbits(16):04x}" for _ in range(num_tokens))


def tokens(texts: list[str]) -> list[str]:
    """Of texts whose length is whole tokens."""
    text = "".join(texts)
    return [text[i : i + 4] for i in range(0, len(text), 4)] + ["end"] * SCAFFOLD


@pytest.mark.parametrize("seed", range(5))
def test_the_ceiling_is_the_longest_earlier_prefix_of_each_prompt(seed: int) -> None:
    draw = random.Random(seed)
    prompts: list[list[str]] = []
    for _ in range(12):
        before = draw.choice(prompts) if prompts and draw.random() < 0.7 else []
        kept = before[: draw.randint(0, len(before))]
        prompts.append([*kept, words(draw, draw.randint(1, 50)), words(draw, draw.randint(1, 50))])
    prompts.append(list(prompts[0]))  # the very same again: its last token is computed
    by_block = by_token = 0
    for index, prompt in enumerate(prompts):
        mine = tokens(prompt)
        common = [
            next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b),
                 min(len(mine), len(other)))
            for other in map(tokens, prompts[:index])
        ]  # fmt: skip
        exact = min(max(common, default=0), len(mine) - 1)
        by_token += exact
        by_block += exact // BLOCK_TOKENS * BLOCK_TOKENS
    ceiling = ceiling_of(prompts)
    assert ceiling.prompt == sum(len(tokens(prompt)) for prompt in prompts)
    assert (ceiling.by_block, ceiling.by_token) == (by_block, by_token)


def test_a_workload_is_drawn_by_its_seed_and_shares_a_tenants_prompt() -> None:
    workload = Workload(tenants=3, conversations=2, turns=4)
    scripts = workload.scripts()
    assert scripts == workload.scripts() != Workload(3, 2, 4, seed=2).scripts()
    assert len({system for system, _ in scripts}) == 3
    assert {len(system) for system, _ in scripts} == {8192}
    questions = [question for _, asked in scripts for question in asked]
    assert len(set(questions)) == len(questions) == 24
    assert {len(question) for question in questions} == {1600}


def test_one_gateway_on_four_engines_reuses_most_of_what_it_can() -> None:
    """Real processes; what is measured is not asserted beyond what routing must do."""
    command = [sys.executable, "-m", "scripts.bench.routing", "--tenants", "2", "--seeds", "1"]
    command += ["--cache", "roomy", "--in-flight", "4", "--only", "ours, events, marked"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    line = next(row for row in done.stdout.splitlines() if row.startswith("ours, events, marked"))
    share = re.search(r"([\d.]+)%", line)
    assert share is not None and 80 < float(share[1]) <= 100, line
    assert line.split()[-1] == "0", done.stdout
