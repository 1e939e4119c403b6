"""The transformation of an exact prompt's keys and values into those of another kind.

It is done between two steps, a bounded part at a time. `engine.compute.compress` implements it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from engine.approximate.kinds import Compression
from engine.cache.ids import TokenId


class Blend(NamedTuple):
    """A document in a prompt, of which some tokens are to be computed where it stands."""

    # It stands at positions [start, end) of the prompt.
    start: int
    end: int
    # How many of them are to be computed.
    num: int
    # The block table of the document by itself: one token stands in front of it.
    blocks: Sequence[int]
    # To be filled with the positions that are to be computed, in order.
    chosen: list[int]


class Move(NamedTuple):
    """A copy to these ranges of the table `targets`, from the table `sources`."""

    ranges: Sequence[tuple[int, int]]
    sources: Sequence[int]
    targets: Sequence[int]


class Compressor(Protocol):
    """Copies from one prompt to another in the KV memory, in bounded parts.

    After each part it yields the number of tokens whose prefill takes about as long.
    """

    def compress(
        self, compression: Compression, tokens: Sequence[TokenId], move: Move
    ) -> Iterator[int]:
        """Copy what is kept of the prefix of these tokens, to ranges of slots."""
        ...

    def place(self, shift: int, move: Move) -> Iterator[int]:
        """Copy the keys and values of positions, less `shift`, turned to their new positions."""
        ...

    def choose(
        self,
        tokens: Sequence[TokenId],
        gaps: Sequence[tuple[int, int]],
        documents: Sequence[Blend],
        targets: Sequence[int],
    ) -> Iterator[int]:
        """Choose the tokens of each document whose keys and values differ most from the copy.

        `tokens` are the whole prompt's. `targets` lack the gaps. What is written there is not kept.
        """
        ...

    def take_over(self, own_layers: int, tokens: Sequence[TokenId], move: Move) -> Iterator[int]:
        """Copy a sibling's keys and values of these positions, and compute the first layers'.

        `targets` have what the prompt has in front of them.
        """
        ...
