"""Kinds of approximate chains: how they stand in the chain of digests, so that nothing exact is
found for them, or they for that. Pure."""

from dataclasses import dataclass
from typing import Literal

from engine.cache.digests import ActiveAdapter
from engine.protocol import LEAST_KEEP, SCORERS, Compressed, Scorer
from engine.sizing import aligned

LEAST_KEPT = 64
"""Tokens that a compressed prefix keeps at least: their places hold the digest that tells it."""
_MAGIC = b"compress"
_BLOCKS = b"blocks 1"
_SCALE = 10_000
_THEIRS = b"sibling\0"
_OURS = b"variant\0"


@dataclass(frozen=True, slots=True)
class Compression:
    """Of the first `of` tokens `kept` are kept in each layer, whole blocks, chosen by `scorer`.

    `keep` is the part that was asked for.
    """

    scorer: Scorer
    keep: float
    of: int
    kept: int

    @property
    def cut(self) -> int:
        """By how many slots a later token lies before its position."""
        return self.of - self.kept

    @property
    def told(self) -> Compressed:
        return Compressed(scorer=self.scorer, keep=self.keep, kept=self.kept, of=self.of)

    @property
    def domain(self) -> ActiveAdapter:
        """Kind and parameters, as the chain of digests takes what changes keys and values."""
        numbers = self.of.to_bytes(4) + round(self.keep * _SCALE).to_bytes(2)
        packed = _MAGIC + self.scorer.encode().ljust(8, b"\0") + numbers
        return ActiveAdapter(packed.ljust(32, b"\0").hex(), 0)


def new_compression(
    scorer: Scorer, keep: float, num_tokens: int, block_size: int
) -> Compression | None:
    """None where too little would be left of so short a prefix, or nothing cut from it."""
    assert LEAST_KEEP <= keep < 1
    parts = round(keep * _SCALE)
    kept = aligned(num_tokens * parts // _SCALE, block_size)
    is_worth_it = LEAST_KEPT <= kept < num_tokens
    return Compression(scorer, parts / _SCALE, num_tokens, kept) if is_worth_it else None


def compression_of(domain: ActiveAdapter | None, block_size: int) -> Compression | None:
    """What a chain's domain says. None for an exact chain, also one that an adapter acts on."""
    packed = bytes.fromhex(domain.digest) if domain is not None else b""
    name = packed[8:16].rstrip(b"\0")
    scorer = next((known for known in SCORERS if known.encode() == name), None)
    if not packed.startswith(_MAGIC) or scorer is None:
        return None
    of = int.from_bytes(packed[16:20])
    parts = int.from_bytes(packed[20:22])
    return new_compression(scorer, parts / _SCALE, of, block_size)


@dataclass(frozen=True, slots=True)
class Sibling:
    """A model of the same shape and tokenizer, and other weights, whose entries may be read.

    What it wrote stands in a shared store under its own fingerprint, `model`, and here in a domain
    of its own. Of `num_layers` the first `own_layers` are computed.
    """

    model: bytes
    own_layers: int
    num_layers: int

    @property
    def domain(self) -> ActiveAdapter:
        """That of what the sibling itself wrote."""
        return self._domain(_THEIRS, 0, 0)

    def domain_of(self, end: int) -> ActiveAdapter:
        """That of prompts whose first `end` tokens have the sibling's keys and values."""
        return self._domain(_OURS, self.own_layers, end)

    def _domain(self, magic: bytes, layers: int, end: int) -> ActiveAdapter:
        # A chain takes in 28 bytes of it.
        packed = magic + self.model[:14] + layers.to_bytes(2) + end.to_bytes(4)
        return ActiveAdapter(packed.ljust(32, b"\0").hex(), 0)


def blocks_domain(start: int) -> ActiveAdapter:
    """That of prompts with documents in them, of which what is copied begins at `start`."""
    return ActiveAdapter(_BLOCKS.ljust(32, b"\0").hex(), start)


def is_placing(domain: ActiveAdapter | None) -> bool:
    """Whether a chain of this domain has documents in it."""
    return domain is not None and bytes.fromhex(domain.digest).startswith(_BLOCKS)


def is_siblings(domain: ActiveAdapter | None) -> bool:
    """Whether a chain of this domain has a sibling's keys and values."""
    return domain is not None and bytes.fromhex(domain.digest)[:8] in (_THEIRS, _OURS)


def told_of(
    domain: ActiveAdapter | None, compression: Compression | None
) -> Compressed | Literal["blocks", "sibling"] | None:
    """What a report says of an entry of this domain; `compression` is `compression_of` it."""
    if is_placing(domain):
        return "blocks"
    if is_siblings(domain):
        return "sibling"
    return compression.told if compression is not None else None
