"""Copies of keys and values from an exact prompt into an approximate one.

They are made between two steps, a bounded part at a time. `engine.compute.compress` implements
them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from engine.approximate.kinds import Compression
from engine.cache.ids import TokenId


class Blend(NamedTuple):
    """A document in a prompt, some of whose tokens are to be chosen and computed there."""

    # The document's first position in the prompt.
    start: int
    # The position behind the document.
    end: int
    # How many tokens are to be computed.
    num: int
    # The block table of the document's exact prompt, in which one token stands before it.
    blocks: Sequence[int]
    # Filled by `Compressor.choose` with the positions to compute, in order.
    chosen: list[int]


class Move(NamedTuple):
    """A copy from one block table to another."""

    # The ranges [start, end) of slots in the table `targets`.
    ranges: Sequence[tuple[int, int]]
    # The ids of the blocks that are read, in the order of their table.
    sources: Sequence[int]
    # The ids of the blocks that are written, in the order of their table.
    targets: Sequence[int]


class Compressor(Protocol):
    """Copies from one prompt to another in the KV memory, in bounded parts.

    Each method yields after each part. It yields the number of tokens whose prefill takes about as
    long as the part took.
    """

    def compress(
        self, compression: Compression, tokens: Sequence[TokenId], move: Move
    ) -> Iterator[int]:
        """Copy the kept part of the prefix of these tokens, to ranges of slots."""
        ...

    def place(self, shift: int, move: Move) -> Iterator[int]:
        """Copy keys and values, and turn the keys to their new positions.

        Position p of the ranges is copied from position p - `shift` of the sources.
        """
        ...

    def choose(
        self,
        tokens: Sequence[TokenId],
        gaps: Sequence[tuple[int, int]],
        documents: Sequence[Blend],
        targets: Sequence[int],
    ) -> Iterator[int]:
        """Choose the tokens of each document whose keys and values differ most from the copy.

        `tokens` are the whole prompt's. `gaps` are the ranges whose content `targets` lack. They
        are written for the choice alone.
        """
        ...

    def take_over(self, own_layers: int, tokens: Sequence[TokenId], move: Move) -> Iterator[int]:
        """Copy a sibling's keys and values, and compute those of the first `own_layers` layers.

        `targets` already have the content before the ranges.
        """
        ...
