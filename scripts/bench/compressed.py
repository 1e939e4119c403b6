"""What compressed prefixes cost in quality, on a model of your own, beside what they save.

Each sample is a prompt of several documents, each with one code (RULER's needles with many keys,
arXiv 2404.06654). It is compressed before any question is known. Then the code of every second
document is asked for. Told are, with 95 % intervals: how often every token of the answer is the
most likely one, the answer's mean log-probability, and the divergence of its first token's
distribution from exact; and how long the question takes behind the prefix, and the prefix's memory.
"""

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, stdev

import torch
from transformers import AutoTokenizer

from engine.cache.compression import Compression
from engine.cache.ids import BlockId
from engine.compute.compress import KvCompressor, Told, check_compressible
from engine.compute.loading import load_model
from engine.compute.runner import TorchRunner
from engine.compute.scorers.kvzip import REPEAT, REPEAT_PART
from engine.protocol import SCORERS, Scorer
from engine.schedule.runner import SampleParams, Work
from engine.settings import DEMO_MODEL
from scripts.bench.report import table
from scripts.setup.options import parse

BLOCK_SIZE = 16
KEEPS = (0.75, 0.5, 0.25)
GREEDY = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
CITIES = "Oslo Lima Cairo Quito Turin Perth Dakar Hanoi Lagos Delhi Osaka Milan Sofia Tunis".split()
FILLERS = (
    "The building was renovated some years ago and has three floors with large windows.",
    "Visitors sign the book at the desk and wait until somebody comes to fetch them.",
    "The canteen opens at noon, and on Fridays there is soup with bread for everyone.",
    "Deliveries are taken at the back door, where a bell must be rung twice.",
    "A shuttle bus goes to the station every half hour until late in the evening.",
)
HEAD = "<|im_start|>system\nYou answer questions about documents.<|im_end|>\n<|im_start|>user\n"


@dataclass
class Results:
    """Of one way to compress, or of none."""

    exact: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """A prompt's text, and the questions with their answers."""

    text: str
    questions: list[tuple[str, str]]


def samples(num: int, num_documents: int) -> Iterator[Sample]:
    rng = random.Random(1)
    for _ in range(num):
        cities = rng.sample(CITIES, num_documents)
        codes = [str(rng.randrange(1000, 10_000)) for _ in cities]
        text = HEAD
        for city, code in zip(cities, codes, strict=True):
            lines = rng.sample(FILLERS, 4)
            lines.insert(rng.randrange(1, 4), f"The access code of the {city} office is {code}.")
            text += f"\n\nAbout the {city} office. {' '.join(lines)}"
        questions = [
            (
                f"\n\nWhat is the access code of the {city} office?<|im_end|>\n"
                f"<|im_start|>assistant\nThe access code of the {city} office is",
                f" {code}.",
            )
            for city, code in list(zip(cities, codes, strict=True))[::2]
        ]
        yield Sample(text, questions)


def main() -> int:
    options = parse(
        __doc__,
        model=(DEMO_MODEL, "a directory of a model with ChatML"),
        samples=(20, "prompts"),
        documents=(4, "documents of a prompt"),
        threads=1,
    )
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model)
    check_compressible(loaded)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    runner = loaded.runner(1024, BLOCK_SIZE)
    parts = (REPEAT, REPEAT_PART, "<|im_end|>\n<|im_start|>assistant\n")
    told = Told(*(tokenizer.encode(part, add_special_tokens=False) for part in parts))
    found: dict[tuple[Scorer | str, float], Results] = {}
    lengths = []
    for sample in samples(options.samples, options.documents):
        prefix = tokenizer.encode(sample.text, add_special_tokens=False)
        lengths.append(len(prefix))
        questions = [
            tuple(tokenizer.encode(part, add_special_tokens=False) for part in pair)
            for pair in sample.questions
        ]
        play(runner, prefix, questions, told, found)
    print(f"{options.model}: {fmean(lengths):.0f} tokens, {options.threads} threads\n")
    block_kib = loaded.layout.bytes_per_block(BLOCK_SIZE) / 1024
    rows = [
        (
            scorer,
            f"{keep:g}",
            str(len(one.exact)),
            interval(one.exact),
            interval(one.logprob),
            interval(one.kl),
            f"{1000 * fmean(one.seconds):.0f}",
            f"{fmean(one.blocks) * block_kib:.0f}",
        )
        for (scorer, keep), one in found.items()
    ]
    heads = ("exact match", "log-prob", "KL", "first token, ms", "memory, KiB")
    print(table(("scorer", "keep", "n", *heads), rows))
    return 0


def play(
    runner: TorchRunner,
    prefix: list[int],
    questions: list[tuple[list[int], ...]],
    told: Told,
    found: dict[tuple[Scorer | str, float], Results],
) -> None:
    """One sample: exact first, then every way."""
    num_blocks = -(-len(prefix) // BLOCK_SIZE) + 8
    own = [BlockId(block) for block in range(num_blocks)]
    spare = [BlockId(block) for block in range(num_blocks, 2 * num_blocks)]
    runner.execute([Work(token_ids=prefix, start=0, block_table=own)])
    exact = []
    for question, answer in questions:
        logprobs, seconds = behind(runner, own, question, answer, len(prefix), 0)
        exact.append(logprobs)
        note(found, ("exact", 1.0), logprobs, logprobs, answer, seconds, num_blocks - 8)
    for scorer in SCORERS:
        for keep in KEEPS:
            kept = -(-int(len(prefix) * keep) // BLOCK_SIZE) * BLOCK_SIZE
            how = Compression(scorer, keep, len(prefix), kept)
            targets = spare[: kept // BLOCK_SIZE]
            for _ in KvCompressor(runner, told).compress(how, prefix, own, targets):
                pass
            for (question, answer), wanted in zip(questions, exact, strict=True):
                logprobs, seconds = behind(runner, spare, question, answer, kept, how.cut)
                key = (scorer, keep)
                note(found, key, logprobs, wanted, answer, seconds, kept // BLOCK_SIZE)


def behind(
    runner: TorchRunner,
    blocks: list[BlockId],
    question: list[int],
    answer: list[int],
    start: int,
    cut: int,
) -> tuple[torch.Tensor, float]:
    """The log-probabilities (answer, vocabulary) in front of each token of the answer, and the
    seconds until the first ones."""
    begun = time.perf_counter()
    ask = Work(token_ids=question, start=start, block_table=blocks, sample=GREEDY, cut=cut)
    first = runner.logits([ask])
    seconds = time.perf_counter() - begun
    start += len(question)
    told = Work(
        token_ids=answer,
        start=start,
        block_table=blocks,
        sample=GREEDY,
        draft=answer[1:],
        cut=cut,
    )
    rest = runner.logits([told])[:-1]
    return torch.cat([first, rest]).float().log_softmax(-1), seconds


def note(
    found: dict[tuple[Scorer | str, float], Results],
    key: tuple[Scorer | str, float],
    logprobs: torch.Tensor,
    wanted: torch.Tensor,
    answer: list[int],
    seconds: float,
    num_blocks: int,
) -> None:
    one, tokens = found.setdefault(key, Results()), torch.tensor(answer)
    one.exact.append(float((logprobs.argmax(-1) == tokens).all()))
    one.logprob.append(float(logprobs.gather(1, tokens[:, None]).mean()))
    one.kl.append(float((wanted[0].exp() * (wanted[0] - logprobs[0])).sum()))
    one.seconds.append(seconds)
    one.blocks.append(num_blocks)


def interval(values: list[float]) -> str:
    """The mean and half of its 95 % interval, as if values were drawn apart."""
    half = 1.96 * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{fmean(values):.2f} ± {half:.2f}"


if __name__ == "__main__":
    sys.exit(main())
