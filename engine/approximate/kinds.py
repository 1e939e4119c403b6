"""The kinds of approximate chains, and how the chain of digests takes each in.

Equal tokens of two kinds have two digests. So an exact prompt finds no approximate content, and an
approximate prompt finds no exact content. Pure.
"""

from dataclasses import dataclass
from typing import Literal

from engine.cache.digests import ChainKind
from engine.protocol import LEAST_KEEP, SCORERS, Compressed, Scorer
from engine.sizing import aligned

LEAST_KEPT = 64
"""The fewest tokens that a compressed prefix keeps, since their places hold its digest."""

# The first eight bytes of a kind's digest.
_COMPRESSED = b"compress"
_WITH_DOCUMENTS = b"blocks 1"
_WRITTEN_BY_SIBLING = b"sibling\0"
_BEHIND_SIBLING = b"variant\0"

_KEEP_PARTS = 10_000
"""`keep` is rounded to one of these parts."""


@dataclass(frozen=True, slots=True)
class Compression:
    """Each layer keeps some of a prefix's tokens, which a scorer chooses."""

    scorer: Scorer
    # The part that the request wanted kept, 0 to 1.
    keep: float
    # The prefix's tokens.
    of: int
    # The tokens that each layer keeps, a multiple of the block size.
    kept: int

    @property
    def cut(self) -> int:
        """How many slots before its position each token behind the prefix lies."""
        return self.of - self.kept

    @property
    def report(self) -> Compressed:
        return Compressed(scorer=self.scorer, keep=self.keep, kept=self.kept, of=self.of)

    @property
    def kind(self) -> ChainKind:
        """The kind of a chain that begins with the kept tokens. `compression_of` reads it back."""
        scorer = self.scorer.encode().ljust(8, b"\0")
        parts = round(self.keep * _KEEP_PARTS)
        packed = _COMPRESSED + scorer + self.of.to_bytes(4) + parts.to_bytes(2)
        return ChainKind(_digest_of(packed), 0)


def new_compression(
    scorer: Scorer, keep: float, num_tokens: int, block_size: int
) -> Compression | None:
    """The compression of a prefix of `num_tokens`; None if it would keep too few tokens, or all."""
    assert LEAST_KEEP <= keep < 1
    parts = round(keep * _KEEP_PARTS)
    kept = aligned(num_tokens * parts // _KEEP_PARTS, block_size)
    is_worth_it = LEAST_KEPT <= kept < num_tokens
    return Compression(scorer, parts / _KEEP_PARTS, num_tokens, kept) if is_worth_it else None


def compression_of(kind: ChainKind | None, block_size: int) -> Compression | None:
    """The compression that a chain's kind stands for; None for a kind without compression."""
    if kind is None:
        return None
    packed = bytes.fromhex(kind.digest)
    name = packed[8:16].rstrip(b"\0")
    scorer = next((known for known in SCORERS if known.encode() == name), None)
    if not packed.startswith(_COMPRESSED) or scorer is None:
        return None
    of = int.from_bytes(packed[16:20])
    parts = int.from_bytes(packed[20:22])
    return new_compression(scorer, parts / _KEEP_PARTS, of, block_size)


@dataclass(frozen=True, slots=True)
class Sibling:
    """A model of the same shape and tokenizer and with other weights, whose entries may be read.

    A shared store has its content under the sibling's fingerprint. Here that content is a kind.
    """

    # The sibling's fingerprint.
    model: bytes
    # How many of the first layers are computed instead of read.
    own_layers: int
    # How many layers the model has.
    num_layers: int

    @property
    def kind(self) -> ChainKind:
        """The kind of the content that the sibling itself wrote."""
        return self._kind(_WRITTEN_BY_SIBLING, 0, 0)

    def kind_up_to(self, end: int) -> ChainKind:
        """The kind of prompts whose first `end` tokens have the sibling's keys and values."""
        return self._kind(_BEHIND_SIBLING, self.own_layers, end)

    def _kind(self, beginning: bytes, layers: int, end: int) -> ChainKind:
        # A chain takes in only 28 bytes of a kind's digest. These are 28.
        packed = beginning + self.model[:14] + layers.to_bytes(2) + end.to_bytes(4)
        return ChainKind(_digest_of(packed), 0)


def documents_kind(start: int) -> ChainKind:
    """The kind of prompts with documents. The first copy begins at position `start`."""
    return ChainKind(_digest_of(_WITH_DOCUMENTS), start)


def approximation_of(
    kind: ChainKind | None, compression: Compression | None
) -> Compressed | Literal["blocks", "sibling"] | None:
    """The approximation that a report names for an entry of this kind; None: exact.

    `compression` must be `compression_of` the same kind.
    """
    if compression is not None:
        return compression.report
    beginning = b"" if kind is None else bytes.fromhex(kind.digest)[:8]
    if beginning == _WITH_DOCUMENTS:
        return "blocks"
    if beginning in (_WRITTEN_BY_SIBLING, _BEHIND_SIBLING):
        return "sibling"
    return None


def _digest_of(packed: bytes) -> str:
    return packed.ljust(32, b"\0").hex()
