"""What `kv_dtypes` asks of the demonstration model: conversations, prompts and needles."""

import random
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.cache.ids import TokenId
from scripts.demo_model import data, turns

DEPTHS = (0, 1000, 2500, 5000, 10_000)
"""Characters between the tools and the question, about four to a token."""
HELD_OUT_SEED = 7_000_003
HEADER = 3
"""Tokens of the header of an answer."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Tokens, and whether each is part of an answer, without the header that asks for one."""

    tokens: list[TokenId]
    is_answer: list[bool]


@dataclass(frozen=True, slots=True)
class Needle:
    prompt: list[TokenId]
    answer: str
    depth: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What everything is asked of: the same for each type."""

    conversations: Sequence[Conversation]
    prompts: Sequence[list[TokenId]]
    needles: Sequence[Needle]
    tokenizer: Tokenizer

    @property
    def end(self) -> TokenId:
        """The token that ends an answer."""
        found = self.tokenizer.token_to_id("<|im_end|>")
        assert found is not None
        return found

    def answer_of(self, said: list[TokenId]) -> list[TokenId]:
        """What was said until the end of the answer, and the end."""
        return said[: said.index(self.end) + 1] if self.end in said else said

    def text_of(self, said: list[TokenId]) -> str:
        tokens = [token for token in self.answer_of(said) if token != self.end]
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


def new_subject(tokenizer: Tokenizer, options: Namespace) -> Subject:
    """As many of each as the options `conversations`, `prompts` and `needles` say, by `seed`."""
    rng = random.Random(HELD_OUT_SEED + options.seed)

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
            # Not the header, which the prompt ends with, nor the line break after the end.
            learned = [is_said and HEADER <= i < len(more) - 1 for i in range(len(more))]
            tokens, is_answer = tokens + more, is_answer + learned
        conversations.append(Conversation(tokens, is_answer))
    needles = [_new_needle(rng, ids, depth) for depth in DEPTHS for _ in range(options.needles)]
    return Subject(conversations, prompts[: options.prompts], needles, tokenizer)


def _new_needle(rng: random.Random, ids: Callable[[str], list[TokenId]], depth: int) -> Needle:
    """A question for a tool, which every second prompt has.

    Whether it is there is told in the prompt's first block alone, before `depth` characters of
    other text. The answer is the call, or that there is no such tool.
    """
    task = rng.choice(list(turns.KNOWN_TASKS.values()))(rng)
    others = [one for one in turns.toolbox(rng, 3) if one.name != task.name]
    is_there = rng.random() < 0.5
    box = rng.sample([task, *others], 1 + len(others)) if is_there else others
    text = turns.tools_block([one.tool for one in box])
    if depth:
        text += turns.message("system", data.distractor(rng, depth))
    text += turns.message("user", task.question)
    answer = task.call if is_there else data.NO_TOOL
    return Needle(ids(f"{text}<|im_start|>assistant\n"), answer, depth)
