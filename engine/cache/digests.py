"""Keyed chain digests of token prefixes.

Each digest covers the scope and every token before it, so equal digests mean equal prefixes of one
scope. The key is random per epoch, which makes collisions impossible to prepare from outside
(CVE-2025-25183 was a predictable root); token ids are compared on every hit all the same.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b

from engine.cache.ids import Digest, TokenId

DIGEST_BYTES = 16
TOKEN_BYTES = 4


def common_blocks(one: "PromptDigests", other: "PromptDigests") -> int:
    """How many full blocks two prompts begin with together; digests of scopes are never equal.

    A chain digest covers everything before it, so bisection finds the place.
    """
    blocks = range(min(len(one.full), len(other.full)))
    return bisect_left(blocks, True, key=lambda index: one.full[index] != other.full[index])


def pack(tokens: Sequence[TokenId]) -> bytes:
    """Token ids as native 32-bit words. This form is hashed, stored in blocks and compared."""
    return array("I", tokens).tobytes()


class ChainHasher:
    def __init__(self, key: bytes, block_size: int) -> None:
        self.block_size = block_size
        self._key = key
        self._stride = block_size * TOKEN_BYTES

    def root(self, scope: str) -> Digest:
        """The digest of a scope's empty prefix."""
        state = blake2b(scope.encode(), key=self._key, digest_size=DIGEST_BYTES, person=b"root")
        return Digest(state.digest())

    def extend(self, parent: Digest, packed: bytes | bytearray | memoryview) -> Digest:
        """The digest of `parent`'s prefix and these tokens (one block's, or a partial tail's)."""
        state = blake2b(parent, key=self._key, digest_size=DIGEST_BYTES)
        state.update(packed)
        return Digest(state.digest())

    def chain(self, root: Digest, packed: bytes) -> list[Digest]:
        """The digests at every full block's end."""
        digests: list[Digest] = []
        parent, view = root, memoryview(packed)
        for end in range(self._stride, len(packed) + 1, self._stride):
            parent = self.extend(parent, view[end - self._stride : end])
            digests.append(parent)
        return digests


class PromptDigests:
    """The digests of one prompt: those of full blocks at once, those in between on demand."""

    def __init__(
        self, hasher: ChainHasher, scope: str, tokens: Sequence[TokenId], block_size: int
    ) -> None:
        self.packed = pack(tokens)
        self.num_tokens = len(tokens)
        self._hasher = hasher
        self._block_size = block_size
        self.root = hasher.root(scope)
        self.full = hasher.chain(self.root, self.packed)

    def at(self, num_tokens: int) -> Digest:
        """The digest of the first `num_tokens` tokens."""
        full, rest = divmod(num_tokens, self._block_size)
        parent = self.full[full - 1] if full else self.root
        if not rest:
            return parent
        start = full * self._block_size * TOKEN_BYTES
        return self._hasher.extend(parent, self.packed[start : start + rest * TOKEN_BYTES])

    def block_tokens(self, index: int) -> bytes:
        """The packed tokens of logical block `index` (fewer than a block's at the prompt's end)."""
        stride = self._block_size * TOKEN_BYTES
        return self.packed[index * stride : (index + 1) * stride]
