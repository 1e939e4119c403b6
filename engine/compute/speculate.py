"""Prompt look-up: the tokens that followed the last ones before are proposed to follow them again.

Agents repeat what they read: file contents, identifiers, earlier answers (Saxena, "Prompt Lookup
Decoding", 2023; vLLM calls it `ngram`). A proposal costs no model. The model itself finds out
whether it is right, in one forward for all of it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.cache.ids import TokenId

LEAST_MATCH = 2
"""The fewest last tokens that must have come before, in the same order."""
MOST_MATCH = 8
"""The most last tokens that are compared, to choose among the places where they came before."""
MOST_PLACES = 4096
"""The latest places of the last token are compared, so many at most."""
WINDOW = 131_072
"""How many tokens back a search looks. It takes some 50 µs for 100,000 tokens, in proportion."""


class NgramDrafter:
    """Proposes one choice's next tokens. It keeps the tokens that it was shown, so each is
    converted once."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` of one proposal, positive."""
        self._max_tokens = max_tokens
        self._length = max_tokens
        self._tokens: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._num = 0

    def propose(self, tokens: Sequence[TokenId]) -> list[TokenId]:
        """What may follow `tokens`, which begin with the last call's. Empty: not known."""
        if len(tokens) > len(self._tokens):
            room = np.empty(len(tokens) + len(tokens) // 2 + 64, dtype=np.int64)
            room[: self._num] = self._tokens[: self._num]
            self._tokens = room
        self._tokens[self._num : len(tokens)] = tokens[self._num :]
        self._num = len(tokens)
        known = self._tokens[max(self._num - WINDOW, 0) : self._num]
        if len(known) <= LEAST_MATCH:
            return []
        places = np.flatnonzero(known[:-1] == known[-1])[-MOST_PLACES:]
        matched = 1
        while matched < MOST_MATCH:
            longer = places[places >= matched]
            longer = longer[known[longer - matched] == known[len(known) - 1 - matched]]
            if not len(longer):
                break
            places = longer
            matched = matched + 1
        if matched < LEAST_MATCH:
            return []
        # Those behind the end repeat what was taken, as a loop does.
        start = int(places[-1]) + 1
        period = len(known) - start
        return [int(known[start + index % period]) for index in range(self._length)]

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        """Learn how many tokens of a proposal were right. The next proposal has as many, or more.

        A proposal that was wrong costs the time of the tokens behind its last right one.
        """
        grown = 2 * num_proposed if num_accepted == num_proposed else num_accepted + 1
        self._length = min(max(grown, 1), self._max_tokens)
