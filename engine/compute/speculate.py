"""Prompt look-up: if the last tokens occurred before, the tokens that followed them are proposed.

Agents repeat what they read: file contents, identifiers, earlier answers (Saxena, "Prompt Lookup
Decoding", 2023; vLLM calls it `ngram`). A proposal needs no second model. The model itself checks
all tokens of a proposal in one forward.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.cache.ids import TokenId

LEAST_MATCH = 2
"""The fewest last tokens that must have occurred before, in the same order."""
MOST_MATCH = 8
"""The most last tokens that are compared. A place where more of them agree is preferred."""
MOST_PLACES = 4096
"""The most earlier places of the last token that are compared. They are the latest ones."""
WINDOW = 131_072
"""How many tokens back a search looks. It takes some 50 µs for 100,000 tokens, and its time is
proportional to their number."""


class NgramDrafter:
    """Proposes the next tokens of one choice.

    It keeps the tokens of earlier calls, so each token is converted once.
    """

    def __init__(self, max_tokens: int) -> None:
        """A proposal has at most `max_tokens` tokens, which is positive."""
        self._max_tokens = max_tokens
        self._length = max_tokens
        self._tokens: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._num = 0

    def propose(self, tokens: Sequence[TokenId]) -> list[TokenId]:
        """The tokens that may follow `tokens`; empty if none are known.

        `tokens` must begin with the tokens of the last call.
        """
        if len(tokens) > len(self._tokens):
            room = np.empty(len(tokens) + len(tokens) // 2 + 64, dtype=np.int64)
            room[: self._num] = self._tokens[: self._num]
            self._tokens = room
        self._tokens[self._num : len(tokens)] = tokens[self._num :]
        self._num = len(tokens)
        history = self._tokens[max(self._num - WINDOW, 0) : self._num]
        if len(history) <= LEAST_MATCH:
            return []
        places = np.flatnonzero(history[:-1] == history[-1])[-MOST_PLACES:]
        length = 1
        while length < MOST_MATCH:
            longer = places[places >= length]
            longer = longer[history[longer - length] == history[len(history) - 1 - length]]
            if not len(longer):
                break
            places = longer
            length = length + 1
        if length < LEAST_MATCH:
            return []
        # A proposal that reaches the end of the tokens repeats itself, as a loop does.
        start = int(places[-1]) + 1
        period = len(history) - start
        return [int(history[start + index % period]) for index in range(self._length)]

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        """Learn how many tokens of a proposal were right.

        After a wrong token the next proposal is one token longer than the right part. After a
        proposal that was all right it is twice as long. Each token behind a wrong one costs time
        for nothing.
        """
        length = 2 * num_proposed if num_accepted == num_proposed else num_accepted + 1
        self._length = min(max(length, 1), self._max_tokens)
