"""The transformation of an exact prompt's keys and values into those of another kind.

It is done between two steps, a bounded part at a time. `engine.compute.compress` implements it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from engine.approximate.kinds import Compression
from engine.cache.ids import TokenId


class Blend(NamedTuple):
    """A document in a prompt, of which some tokens are to be computed where it stands."""

    # Its positions [start, end) in the prompt.
    start: int
    end: int
    # How many of them are to be computed.
    num: int
    # What has the document by itself, behind one token.
    blocks: Sequence[int]
    # Gets the positions that are to be computed, in order.
    chosen: list[int]


class Move(NamedTuple):
    """A copy to these ranges of the table `targets`, from the table `sources`."""

    ranges: Sequence[tuple[int, int]]
    sources: Sequence[int]
    targets: Sequence[int]


class Compressor(Protocol):
    """Copies from one prompt to another in the KV memory. Parts of its work are bounded: each item
    is so many tokens of prefill, which take about as long."""

    def compress(self, how: Compression, tokens: Sequence[TokenId], move: Move) -> Iterator[int]:
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
        """Choose what of each document differs most from the copy, of a prompt of these tokens.

        `targets` lack the gaps, and what is written there is not kept.
        """
        ...

    def take_over(self, own_layers: int, tokens: Sequence[TokenId], move: Move) -> Iterator[int]:
        """Copy a sibling's keys and values of these positions of a prompt, and compute those of
        the first layers. What the prompt has before is in `targets`."""
        ...
