"""What approximate prefixes cost in quality and what they save, on a model of your own.

The prompts are RULER's generated tasks and documents (`tasks.py`). Each becomes an entry before any
question is known. The benchmark prints, with 95 % intervals:

- how often every token of the answer is the most likely one
- the answer's mean log-probability
- the divergence of its first token's distribution from exact
- how long the question takes behind the prefix
- the prefix's memory

`random` and `sinks` are controls: `sinks` keeps the most recent tokens and the first four. `blocks`
are computed apart and stand anywhere. Of each block the first k tokens, or the share r of it, are
computed where it stands.
"""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from engine.approximate.copying import Move
from engine.approximate.kinds import new_compression
from engine.cache.ids import BlockId
from engine.compute.compress import KvCompressor, check_compressible
from engine.compute.gate import RECOMPUTES, compute_apart, place_documents
from engine.compute.loading import load_model
from engine.compute.place import find_turns
from engine.compute.runner import TorchRunner
from engine.compute.scorers import REPEAT, REPEAT_PART, Instructions
from engine.protocol import SCORERS, Scorer
from engine.schedule.runner import SampleParams, Work
from engine.settings import DEMO_MODEL
from scripts.bench.report import table
from scripts.bench.tasks import TASKS, samples
from scripts.setup.options import parse

BLOCK_SIZE = 16
BEHIND_BLOCKS = 8
"""The blocks for a question and its answer."""
KEEPS = (0.75, 0.5, 0.25)
GREEDY = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
EXACT = ("exact", "")


class Entry(NamedTuple):
    """A prefix in its blocks."""

    blocks: list[BlockId]
    # The slot of the next token.
    start: int
    # The next token's position is its slot plus this.
    cut: int = 0


Way = tuple[str, str]
"""A technique and its parameter."""
Family = Callable[[list[list[int]], Entry, list[BlockId]], Iterator[tuple[Way, Entry]]]
"""Makes the entries of some techniques, one after the other in the spare blocks. Its arguments are
the tokens of the prefix's beginning and of each document, the exact entry, and the spare blocks."""


@dataclass
class Results:
    """The measurements of one way."""

    exact: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)


ResultsByWay = defaultdict[Way, defaultdict[str, Results]]
"""The results by way and task."""


def main() -> int:
    options = parse(
        __doc__,
        model=(DEMO_MODEL, "a directory of a model with ChatML"),
        samples=(20, "prompts of each task"),
        tasks=([*TASKS], "which", [*TASKS]),
        scorers=([*SCORERS], "which", SCORERS),
        size=(60, "sentences of noise in a prompt of RULER's"),
        threads=1,
    )
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model)
    check_compressible(loaded)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    runner = loaded.runner(1024, BLOCK_SIZE)
    instructions = (REPEAT, REPEAT_PART, "<|im_end|>\n<|im_start|>assistant\n")
    texts = Instructions(
        *(tokenizer.encode(text, add_special_tokens=False) for text in instructions)
    )
    compressor = KvCompressor(runner, texts, find_turns(loaded))
    families = [compressed(compressor, options.scorers)] if options.scorers else []
    if compressor.turns is not None:
        families.append(placed(runner, compressor))
    results_by_way: ResultsByWay = defaultdict(lambda: defaultdict(Results))
    lengths = []
    for task, sample in samples(options.tasks, options.samples, options.size):
        parts = [tokenizer.encode(part, add_special_tokens=False) for part in sample.parts]
        lengths.append(sum(map(len, parts)))
        questions = [
            tuple(tokenizer.encode(part, add_special_tokens=False) for part in pair)
            for pair in sample.questions
        ]
        for way, results in play(runner, parts, questions, families):
            note(results_by_way[way][task], *results)
    print(f"{options.model}: {fmean(lengths):.0f} tokens, {options.threads} threads\n")
    block_kib = loaded.layout.bytes_per_block(BLOCK_SIZE) / 1024
    print(table(*overall(results_by_way, block_kib)), table(*by_task(results_by_way)), sep="\n\n")
    return 0


def overall(results_by_way: ResultsByWay, block_kib: float) -> tuple[list[str], list[list[str]]]:
    """The table over all tasks together."""
    rows = []
    for (technique, parameter), tasks in results_by_way.items():
        by_name = {
            name: [*chain.from_iterable(getattr(results, name) for results in tasks.values())]
            for name in Results.__dataclass_fields__
        }
        exact, logprob, kl = (interval(by_name[name]) for name in ("exact", "logprob", "kl"))
        costs = 1000 * fmean(by_name["seconds"]), fmean(by_name["blocks"]) * block_kib
        measured = [exact, logprob, kl, *(f"{cost:.0f}" for cost in costs)]
        rows.append([technique, parameter, str(len(by_name["exact"])), *measured])
    heads = ["exact match", "log-prob", "KL", "first token, ms", "memory, KiB"]
    return ["technique", "parameter", "n", *heads], rows


def by_task(results_by_way: ResultsByWay) -> tuple[list[str], list[list[str]]]:
    """Exact matches and the log-probability of each task, with n."""
    names = [*results_by_way[EXACT]]
    heads = [f"{name} (n {len(results_by_way[EXACT][name].exact)})" for name in names]
    rows = [
        [
            *way,
            *(f"{fmean(tasks[name].exact):.2f} {fmean(tasks[name].logprob):.2f}" for name in names),
        ]
        for way, tasks in results_by_way.items()
    ]
    return ["technique", "parameter", *heads], rows


def compressed(compressor: KvCompressor, scorers: list[Scorer]) -> Family:
    """Prefixes of which every layer keeps a part."""

    def entries(
        parts: list[list[int]], exact: Entry, spare: list[BlockId]
    ) -> Iterator[tuple[Way, Entry]]:
        prefix = [*chain.from_iterable(parts)]
        for scorer in scorers:
            for keep in KEEPS:
                compression = new_compression(scorer, keep, len(prefix), BLOCK_SIZE)
                assert compression is not None, "the prompts are too short"
                move = Move([(0, compression.kept)], exact.blocks, spare)
                for _ in compressor.compress(compression, prefix, move):
                    pass
                entry = Entry(spare, compression.kept, compression.cut)
                yield (scorer, f"keep {keep:g}"), entry

    return entries


def placed(runner: TorchRunner, compressor: KvCompressor) -> Family:
    """Documents that were computed apart, behind the prompt's first token."""

    def entries(
        parts: list[list[int]], exact: Entry, spare: list[BlockId]
    ) -> Iterator[tuple[Way, Entry]]:
        prompt = [*chain.from_iterable(parts)]
        ends = [*accumulate(map(len, parts))]
        spans = [*pairwise(ends)]
        size = len(spare)
        apart = [range(spare[-1] + 1 + n * size, spare[-1] + 1 + (n + 1) * size) for n in range(8)]
        apart = apart[: len(spans)]
        compute_apart(runner, prompt, spans, apart)
        for recompute in RECOMPUTES:
            place_documents(runner, compressor, prompt, spans, apart, spare, recompute)
            parameter = f"{'r' if isinstance(recompute, float) else 'k'} {recompute:g}"
            yield ("blocks", parameter), Entry(spare, ends[-1])

    return entries


Result = tuple[torch.Tensor, torch.Tensor, list[int], float, int]


def play(
    runner: TorchRunner,
    parts: list[list[int]],
    questions: list[tuple[list[int], ...]],
    families: list[Family],
) -> Iterator[tuple[Way, Result]]:
    """Measure one sample: exact first, then every way."""
    prefix = [*chain.from_iterable(parts)]
    num_blocks = math.ceil(len(prefix) / BLOCK_SIZE) + BEHIND_BLOCKS
    blocks = [BlockId(block) for block in range(num_blocks)]
    spare = [BlockId(block) for block in range(num_blocks, 2 * num_blocks)]
    runner.execute([Work(token_ids=prefix, start=0, block_table=blocks)])
    exact = Entry(blocks, len(prefix))
    exact_logprobs = list[torch.Tensor]()
    for question, answer in questions:
        logprobs, seconds = behind(runner, exact, question, answer)
        exact_logprobs.append(logprobs)
        yield EXACT, (logprobs, logprobs, answer, seconds, num_blocks - BEHIND_BLOCKS)
    for family in families:
        for way, entry in family(parts, exact, spare):
            size = math.ceil(entry.start / BLOCK_SIZE)
            for (question, answer), expected in zip(questions, exact_logprobs, strict=True):
                logprobs, seconds = behind(runner, entry, question, answer)
                yield way, (logprobs, expected, answer, seconds, size)


def behind(
    runner: TorchRunner, entry: Entry, question: list[int], answer: list[int]
) -> tuple[torch.Tensor, float]:
    """The log-probabilities (answer, vocabulary) in front of each token of the answer, and the
    seconds until the first ones."""
    blocks, start, cut = entry
    begun = time.perf_counter()
    ask = Work(token_ids=question, start=start, block_table=blocks, sample=GREEDY, cut=cut)
    first_logits = runner.logits([ask])
    seconds = time.perf_counter() - begun
    start += len(question)
    answer_work = Work(
        token_ids=answer,
        start=start,
        block_table=blocks,
        sample=GREEDY,
        draft=answer[1:],
        cut=cut,
    )
    later_logits = runner.logits([answer_work])[:-1]
    return torch.cat([first_logits, later_logits]).float().log_softmax(-1), seconds


def note(
    results: Results,
    logprobs: torch.Tensor,
    exact_logprobs: torch.Tensor,
    answer: list[int],
    seconds: float,
    num_blocks: int,
) -> None:
    """Add one measurement to the results."""
    tokens = torch.tensor(answer)
    results.exact.append(float((logprobs.argmax(-1) == tokens).all()))
    results.logprob.append(float(logprobs.gather(1, tokens[:, None]).mean()))
    expected = exact_logprobs[0]
    results.kl.append(float((expected.exp() * (expected - logprobs[0])).sum()))
    results.seconds.append(seconds)
    results.blocks.append(num_blocks)


def interval(values: list[float]) -> str:
    """The mean and half of its 95 % interval, as if the values were independent."""
    half = 1.96 * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{fmean(values):.2f} ± {half:.2f}"


if __name__ == "__main__":
    sys.exit(main())
