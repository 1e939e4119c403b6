"""What ENGINE_KV_DTYPE costs in quality and gives in memory, on the demonstration model.

That model was trained in this tree, on conversations of the kind that it is measured on here, so it
has something to lose: it answers questions exactly, calls a tool that the prompt's first block has,
and says so where it has none. A model with random weights has no answer that fewer bits could
spoil.

Columns: perplexity of the answers in conversations that it was not trained on; mean KL divergence
of the next token from the model's own type; greedy tokens that are the same at the same place, of
256 after each prompt, and of those up to the end of the answer: behind it the model was never
trained, and one other token changes all that follow; needles: answers that are right to the letter
where the tools stand so many characters before the question, a call in every second prompt and in
the others that there is no such tool.

The last row is KIVI's way (`kv_by_channel.py`), which the engine has not.

`--parts speed` measures tokens a second while all prompts are answered: the median of rounds, in
each of which every type has its turn. KIVI's way is not there: it is not made for speed. The times
on the clock count, so nothing else may run.
"""

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from tokenizers import Tokenizer

from engine.cache.ids import BlockId, TokenId
from engine.compute.kv_codecs import KvDtype
from engine.compute.loading import LoadedModel, load_model
from engine.compute.runner import TorchRunner
from engine.schedule.runner import DraftDraw, SampleParams, Work
from scripts.bench import kv_by_channel
from scripts.bench.common import BLOCK_SIZE, DEMO_MODEL
from scripts.bench.kv_subject import DEPTHS, Subject, new_subject
from scripts.bench.report import machine_line, table_of
from scripts.setup.options import parse

PARTS = ("quality", "speed")
CHUNK = 256
GREEDY_TOKENS = 256
MOST_OF_A_CALL = 64
GREEDY = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
BY_CHANNEL = "int4 by channel"


@dataclass(frozen=True, slots=True)
class Kept:
    """The model with its numbers kept in one way. A step computes `chunk` tokens of a prompt.

    Raises ValueError for KIVI's way beside a kernel, which would read the numbers as they are.
    """

    name: str
    model: LoadedModel
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        if self.name == BY_CHANNEL and self.model.kernel is not None:
            raise ValueError("a kernel does not read a pool by its `gather`")

    def runner(self, num_blocks: int) -> TorchRunner:
        runner = self.model.runner(num_blocks, BLOCK_SIZE)
        if self.name == BY_CHANNEL:
            kv_by_channel.use(runner)
        return runner

    @property
    def bytes_a_token(self) -> int:
        if self.name == BY_CHANNEL:
            return kv_by_channel.bytes_a_token(self.model.runner(1, BLOCK_SIZE).pool)
        return self.model.layout.bytes_per_token


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    bytes_a_token: int
    logprobs: list[torch.Tensor]
    perplexity: float
    greedy: list[list[TokenId]]
    answered: list[int]
    found: dict[int, float]


def main() -> int:
    options = parse(
        __doc__,
        conversations=24,
        prompts=12,
        needles=(16, "at each depth"),
        kinds=([*get_args(KvDtype), BY_CHANNEL], "rows, the first of which is compared with"),
        parts=(list(PARTS), "which of them"),
        rounds=(3, "of the speed"),
        seed=1,
    )
    print(machine_line())
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    subject = new_subject(tokenizer, options)
    if "quality" in options.parts:
        # By torch's functions for all of them, so that nothing but the bits differs.
        loaded = load_model(str(DEMO_MODEL), attention="sdpa")
        tell_quality(measure_all(loaded, subject, options))
    if "speed" in options.parts:
        tell_speed(load_model(str(DEMO_MODEL)), subject, options)
    return 0


def tell_quality(measured: Sequence[Measured]) -> None:
    plain = measured[0]
    columns: dict[str, str | Callable[[Measured], str]] = {
        "kept as": "{0.name}",
        "bytes a token": "{0.bytes_a_token}",
        "tokens in the same memory": lambda one: f"{plain.bytes_a_token / one.bytes_a_token:.2f}",
        "perplexity": "{0.perplexity:.4f}",
        "KL": lambda one: f"{divergence(plain, one):.2e}",
        "same": lambda one: f"{agreement(plain, one, [GREEDY_TOKENS] * len(plain.greedy)):.1%}",
        "same of answers": lambda one: f"{agreement(plain, one, plain.answered):.1%}",
    }
    columns |= {f"at {depth}": f"{{0.found[{depth}]:.0%}}" for depth in DEPTHS}
    print(table_of(measured, columns), flush=True)


def tell_speed(loaded: LoadedModel, subject: Subject, options: Namespace) -> None:
    """Tokens a second of all prompts at once, decoding alone."""
    kinds = [name for name in options.kinds if name != BY_CHANNEL]
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name in kinds:
            _, seconds = generate(kept_as(name, loaded), subject.prompts, GREEDY_TOKENS)
            rates[name].append(len(subject.prompts) * (GREEDY_TOKENS - 1) / seconds)
    columns: dict[str, str | Callable[[str], str]] = {
        "kept as": "{0}",
        "tokens/s": lambda name: f"{statistics.median(rates[name]):.0f}",
        "least": lambda name: f"{min(rates[name]):.0f}",
        "most": lambda name: f"{max(rates[name]):.0f}",
    }
    print(f"\n{len(subject.prompts)} prompts at once, {options.rounds} rounds")
    print(table_of(kinds, columns), flush=True)


def kept_as(name: str, loaded: LoadedModel) -> Kept:
    """Raises ValueError for a name that is no row's."""
    if name == BY_CHANNEL:
        return Kept(name, loaded, chunk=BLOCK_SIZE)
    dtype = next((one for one in get_args(KvDtype) if one == name), None)
    if dtype is None:
        raise ValueError(f"`kinds`: {name} is none of {[*get_args(KvDtype), BY_CHANNEL]}")
    return Kept(name, replace(loaded, layout=replace(loaded.layout, kv_dtype=dtype)))


def measure_all(loaded: LoadedModel, subject: Subject, options: Namespace) -> list[Measured]:
    measured = []
    for name in options.kinds:
        begun = time.perf_counter()
        measured.append(measure(kept_as(name, loaded), subject))
        print(f"  {name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return measured


def measure(kept: Kept, subject: Subject) -> Measured:
    logprobs, losses = [], []
    for one in subject.conversations:
        told = torch.log_softmax(all_logits(kept, one.tokens).float(), dim=-1)
        wanted = torch.tensor(one.tokens[1:])
        of_answers = torch.tensor(one.is_answer[1:])
        losses.append(-told[:-1].gather(1, wanted[:, None])[:, 0][of_answers])
        logprobs.append(told[:-1][of_answers])
    greedy, _ = generate(kept, subject.prompts, GREEDY_TOKENS)
    found: dict[int, float] = {}
    for depth in DEPTHS:
        needles = [needle for needle in subject.needles if needle.depth == depth]
        said, _ = generate(kept, [needle.prompt for needle in needles], MOST_OF_A_CALL)
        pairs = zip(said, needles, strict=True)
        right = sum(subject.text_of(answer) == one.answer for answer, one in pairs)
        found[depth] = right / max(len(needles), 1)
    layout = kept.model.layout
    is_plain = kept.name == "model"
    return Measured(
        name=str(layout.dtype).removeprefix("torch.") if is_plain else kept.name,
        bytes_a_token=kept.bytes_a_token,
        logprobs=logprobs,
        perplexity=float(torch.cat(losses).mean().exp()),
        greedy=greedy,
        answered=[len(subject.answer_of(said)) for said in greedy],
        found=found,
    )


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def all_logits(kept: Kept, tokens: Sequence[TokenId]) -> torch.Tensor:
    """The logits (tokens, vocabulary) behind every token, computed in chunks."""
    table = [BlockId(block) for block in range(num_blocks_of(len(tokens)))]
    runner = kept.runner(len(table))
    rows = []
    for start in range(0, len(tokens), kept.chunk):
        some = tokens[start : start + kept.chunk]
        behind = [DraftDraw() for _ in some[1:]]
        work = Work(token_ids=some, start=start, block_table=table, sample=GREEDY, drafts=behind)
        rows.append(runner.logits([work]))
    return torch.cat(rows)


def generate(
    kept: Kept, prompts: Sequence[list[TokenId]], count: int
) -> tuple[list[list[TokenId]], float]:
    """The most likely tokens behind each prompt, whatever ends a turn, and the decoding's seconds.

    Prompts are computed one after the other, and then decoded together.
    """
    tokens = [list(prompt) for prompt in prompts]
    sizes = [num_blocks_of(len(prompt) + count) for prompt in prompts]
    runner = kept.runner(max(sum(sizes), 1))
    tables = [
        [BlockId(block) for block in range(sum(sizes[:index]), sum(sizes[: index + 1]))]
        for index in range(len(sizes))
    ]
    for said, table in zip(tokens, tables, strict=True):
        for start in range(0, len(said), kept.chunk):
            some = said[start : start + kept.chunk]
            is_last = start + len(some) == len(said)
            sample = GREEDY if is_last else None
            work = Work(token_ids=some, start=start, block_table=table, sample=sample)
            drawn = runner.execute([work])
        assert drawn is not None and drawn[0] is not None
        said.append(drawn[0])
    begun = time.perf_counter()
    for _ in range(count - 1):
        works = [
            Work(token_ids=said[-1:], start=len(said) - 1, block_table=table, sample=GREEDY)
            for said, table in zip(tokens, tables, strict=True)
        ]
        for said, one in zip(tokens, runner.execute(works) or [], strict=True):
            assert one is not None
            said.append(one)
    seconds = time.perf_counter() - begun
    pairs = zip(tokens, prompts, strict=True)
    return [said[len(prompt) :] for said, prompt in pairs], seconds


def divergence(plain: Measured, other: Measured) -> float:
    """The mean over all tokens of answers, in nats."""
    pairs = zip(plain.logprobs, other.logprobs, strict=True)
    return float(torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in pairs]).mean())


def agreement(plain: Measured, other: Measured, lengths: Sequence[int]) -> float:
    """The share of equal tokens at equal places, up to so many behind each prompt."""
    pairs = [
        pair
        for mine, theirs, most in zip(plain.greedy, other.greedy, lengths, strict=True)
        for pair in zip(mine[:most], theirs[:most], strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


if __name__ == "__main__":
    sys.exit(main())
