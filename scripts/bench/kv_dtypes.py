"""What ENGINE_KV_DTYPE costs in quality and gives in memory, on the demonstration model.

That model was trained in this tree, on conversations of the kind that it is measured on here, so it
has something to lose: it answers questions exactly, and tells what a tool's result said, which no
weight knows. A model with random weights has no answer that fewer bits could spoil.

Columns: perplexity of the answers in conversations that it was not trained on; mean KL divergence
of the next token from the model's own type; greedy tokens that are the same at the same place, of
256 after each prompt; results of tools that it tells exactly, with distractors of five lengths
before them. Decoding is timed in the last but one, one sequence at a time.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from tokenizers import Tokenizer

from engine.cache.ids import BlockId, TokenId
from engine.compute.kv_codecs import KvDtype
from engine.compute.loading import LoadedModel, load_model
from engine.schedule.runner import DraftDraw, SampleParams, Work
from scripts.bench.common import BLOCK_SIZE, DEMO_MODEL
from scripts.bench.report import machine_line, table_of
from scripts.demo_model import data, turns
from scripts.setup.options import parse

CHUNK = 256
GREEDY_TOKENS = 256
DEPTHS = (0, 1000, 2500, 5000, 10_000)
"""Characters of distractors before a tool's result, about four to a token."""
GREEDY = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
HELD_OUT_SEED = 7_000_003


@dataclass(frozen=True, slots=True)
class Conversation:
    """Tokens, and whether each is part of an answer."""

    tokens: list[TokenId]
    is_answer: list[bool]


@dataclass(frozen=True, slots=True)
class Needle:
    prompt: list[TokenId]
    answer: list[TokenId]
    depth: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What everything is asked of: the same for each type."""

    conversations: Sequence[Conversation]
    prompts: Sequence[list[TokenId]]
    needles: Sequence[Needle]


@dataclass(frozen=True, slots=True)
class Measured:
    kind: str
    bytes_a_token: int
    logprobs: list[torch.Tensor]
    perplexity: float
    greedy: list[list[TokenId]]
    tokens_a_second: float
    found: dict[int, float]


def main() -> int:
    options = parse(__doc__, conversations=40, prompts=12, needles=(12, "at each depth"), seed=1)
    print(machine_line())
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    subject = new_subject(tokenizer, options.seed, options)
    loaded = load_model(str(DEMO_MODEL))
    measured = [measure(loaded, kind, subject) for kind in get_args(KvDtype)]
    plain = measured[0]
    columns: dict[str, str | Callable[[Measured], str]] = {
        "kept as": "{0.kind}",
        "bytes a token": "{0.bytes_a_token}",
        "tokens in the same memory": lambda one: f"{plain.bytes_a_token / one.bytes_a_token:.2f}",
        "perplexity": "{0.perplexity:.4f}",
        "KL": lambda one: f"{divergence(plain, one):.2e}",
        "same of 256": lambda one: f"{agreement(plain, one):.1%}",
    }
    columns |= {f"at {depth}": f"{{0.found[{depth}]:.0%}}" for depth in DEPTHS}
    columns["tokens/s"] = "{0.tokens_a_second:.0f}"
    print(table_of(measured, columns))
    return 0


def new_subject(tokenizer: Tokenizer, seed: int, options: Any) -> Subject:
    rng = random.Random(HELD_OUT_SEED + seed)

    def ids(text: str) -> list[TokenId]:
        tokens: list[TokenId] = tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    conversations: list[Conversation] = []
    prompts: list[list[TokenId]] = []
    while len(conversations) < options.conversations:
        box = turns.toolbox(rng)
        system = turns.message("system", data.distractor(rng, rng.randint(200, 3000)))
        tokens = ids(turns.tools_block([task.tool for task in box]) + system)
        is_answer = [False] * len(tokens)
        for said, is_said in turns.turn(rng, box):
            if is_said:
                prompts.append([*tokens, *ids("<|im_start|>assistant\n")])
            more = ids(said)
            tokens, is_answer = tokens + more, is_answer + [is_said] * len(more)
        conversations.append(Conversation(tokens, is_answer))
    needles = [new_needle(rng, ids, depth) for depth in DEPTHS for _ in range(options.needles)]
    return Subject(conversations, prompts[: options.prompts], needles)


def new_needle(rng: random.Random, ids: Callable[[str], list[TokenId]], depth: int) -> Needle:
    task = turns.tool_task(rng)
    text = turns.tools_block([task.tool])
    if depth:
        text += turns.message("system", data.distractor(rng, depth))
    text += turns.message("user", task.question) + turns.message("assistant", task.call)
    text += turns.message("tool", f"<tool_response>{task.result}</tool_response>")
    return Needle(ids(f"{text}<|im_start|>assistant\n"), ids(f"{task.answer}<|im_end|>"), depth)


def measure(loaded: LoadedModel, kind: KvDtype, subject: Subject) -> Measured:
    model = replace(loaded, layout=replace(loaded.layout, kv_dtype=kind))
    logprobs, losses = [], []
    for one in subject.conversations:
        told = torch.log_softmax(all_logits(model, one.tokens).float(), dim=-1)
        wanted = torch.tensor(one.tokens[1:])
        of_answers = torch.tensor(one.is_answer[1:])
        losses.append(-told[:-1].gather(1, wanted[:, None])[:, 0][of_answers])
        logprobs.append(told[:-1][of_answers])
    begun = time.perf_counter()
    greedy = [generate(model, prompt, GREEDY_TOKENS) for prompt in subject.prompts]
    seconds = time.perf_counter() - begun
    found: dict[int, list[bool]] = {depth: [] for depth in DEPTHS}
    for needle in subject.needles:
        said = generate(model, needle.prompt, len(needle.answer))
        found[needle.depth].append(said == needle.answer)
    return Measured(
        kind=kind if kind != "model" else str(loaded.layout.dtype).removeprefix("torch."),
        bytes_a_token=model.layout.bytes_per_token,
        logprobs=logprobs,
        perplexity=float(torch.cat(losses).mean().exp()),
        greedy=greedy,
        tokens_a_second=GREEDY_TOKENS * len(greedy) / seconds,
        found={depth: sum(right) / max(len(right), 1) for depth, right in found.items()},
    )


def all_logits(model: LoadedModel, tokens: Sequence[TokenId]) -> torch.Tensor:
    """The logits (tokens, vocabulary) behind every token, computed in chunks."""
    table = [BlockId(block) for block in range(-(-len(tokens) // BLOCK_SIZE))]
    runner = model.runner(len(table), BLOCK_SIZE)
    rows = []
    for start in range(0, len(tokens), CHUNK):
        some = tokens[start : start + CHUNK]
        behind = [DraftDraw() for _ in some[1:]]
        work = Work(token_ids=some, start=start, block_table=table, sample=GREEDY, drafts=behind)
        rows.append(runner.logits([work]))
    return torch.cat(rows)


def generate(model: LoadedModel, prompt: Sequence[TokenId], count: int) -> list[TokenId]:
    """The most likely tokens, whatever ends a turn."""
    tokens, start = list(prompt), 0
    table = [BlockId(block) for block in range(-(-(len(prompt) + count) // BLOCK_SIZE))]
    runner = model.runner(len(table), BLOCK_SIZE)
    while len(tokens) < len(prompt) + count:
        some = tokens[start : start + CHUNK]
        is_last = start + len(some) == len(tokens)
        sample = GREEDY if is_last else None
        drawn = runner.execute(
            [Work(token_ids=some, start=start, block_table=table, sample=sample)]
        )
        start += len(some)
        if drawn is not None and drawn[0] is not None:
            tokens.append(drawn[0])
    return tokens[len(prompt) :]


def divergence(plain: Measured, other: Measured) -> float:
    """The mean over all tokens of answers, in nats."""
    pairs = zip(plain.logprobs, other.logprobs, strict=True)
    return float(torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in pairs]).mean())


def agreement(plain: Measured, other: Measured) -> float:
    pairs = [
        pair
        for mine, theirs in zip(plain.greedy, other.greedy, strict=True)
        for pair in zip(mine, theirs, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


if __name__ == "__main__":
    sys.exit(main())
