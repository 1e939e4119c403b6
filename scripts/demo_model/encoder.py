"""Token ids of the demo model's conversations, and its control tokens."""

import random
from dataclasses import dataclass, field

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from scripts.demo_model import data

VOCAB = 4096
END = "<|im_end|>"
CONTROL = ("<|endoftext|>", "<|im_start|>", END)
# Not "special": a caller parses them, so decoding must keep them where control tokens are skipped.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass
class Example:
    """Token ids of one conversation, and which of them are answers."""

    ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)


class Encoder:
    """Turns chunks into rows; a chunk begins with a control token, so it can be encoded alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """The token ids of a text; nothing is added to it."""
        return list(self.tokenizer(text)["input_ids"])

    def add(self, row: Example, chunks: list[data.Chunk]) -> None:
        """Append messages, and mark the tokens of the answers among them."""
        for text, learned in chunks:
            ids = self.ids(text)
            # Not the header, which the prompt ends with, nor the line break after the end.
            row.learned += [learned and 3 <= i < len(ids) - 1 for i in range(len(ids))]
            row.ids += ids

    def add_ids(self, row: Example, ids: list[int]) -> None:
        """Append tokens that are not learned."""
        row.ids += ids
        row.learned += [False] * len(ids)

    def systems(self, rng: random.Random, tokens: int) -> list[int]:
        """One to three system blocks of about `tokens` tokens in all."""
        blocks = rng.choice([1, 1, 2, 3])
        ids: list[int] = []
        for _ in range(blocks):
            size = max(1, tokens // blocks - 5)
            if rng.random() < 0.1:
                body = [rng.randrange(len(CONTROL), VOCAB - len(MARKS)) for _ in range(size)]
            else:
                body = self.ids(data.distractor(rng, size * 5))[:size]
            ids += self.ids("<|im_start|>system\n") + body + self.ids(END + "\n")
        return ids
