"""A sibling model whose entries may be read, and how its kind stands in the chain of digests. Pure.

A sibling has the same shape and tokenizer, and other weights. What it wrote stands in a shared
store under its own fingerprint, and here in a domain of its own: nothing that this model computes
is taken for it, or it for that.
"""

from dataclasses import dataclass

from engine.cache.digests import ActiveAdapter, PromptDigests

_THEIRS, _OURS = b"sibling\0", b"variant\0"


@dataclass(frozen=True, slots=True)
class Sibling:
    """`model` is its fingerprint in stores. Of `num_layers` the first `own_layers` are computed."""

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


def is_siblings(domain: ActiveAdapter | None) -> bool:
    """Whether a chain of this domain has a sibling's keys and values."""
    return domain is not None and bytes.fromhex(domain.digest)[:8] in (_THEIRS, _OURS)


@dataclass(frozen=True, slots=True)
class SiblingAsked:
    """The breakpoint at `segment` may read the sibling's entries. The digests are those of the
    exact prompt, and of what the sibling wrote of it."""

    sibling: Sibling
    segment: int
    exact: PromptDigests
    theirs: PromptDigests
