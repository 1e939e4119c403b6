"""What `kv_dtypes` asks of the demonstration model: conversations, prompts and needles."""

import random
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.cache.ids import TokenId
from scripts.demo_model import data, turns

DEPTHS = (0, 1000, 2500, 5000, 10_000)
"""Characters between a tool and the question for it, about four to a token."""
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
            tokens, is_answer = tokens + more, is_answer + [is_said] * len(more)
        conversations.append(Conversation(tokens, is_answer))
    needles = [_new_needle(rng, ids, depth) for depth in DEPTHS for _ in range(options.needles)]
    return Subject(conversations, prompts[: options.prompts], needles)


def _new_needle(rng: random.Random, ids: Callable[[str], list[TokenId]], depth: int) -> Needle:
    """A tool of random words, and the question whose call has its name and arguments.

    Both stand in the prompt's first block alone, before `depth` characters of other text.
    """
    task = turns.random_task(rng)
    others = [one for one in turns.toolbox(rng, 3) if one.name != task.name]
    box = rng.sample([task, *others], 1 + len(others))
    text = turns.tools_block([one.tool for one in box])
    if depth:
        text += turns.message("system", data.distractor(rng, depth))
    text += turns.message("user", task.question)
    return Needle(ids(f"{text}<|im_start|>assistant\n"), ids(f"{task.call}<|im_end|>"), depth)
