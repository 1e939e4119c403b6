"""Keyed chain digests of token prefixes.

Each digest covers the scope, every token before it, and the chain's kind if that acts on one of
them. So equal digests mean equal keys and values of one scope. The key is random per epoch,
which makes collisions impossible to prepare from outside (CVE-2025-25183 was a predictable root);
token ids are compared on every hit all the same.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from engine.cache.ids import Digest, TokenId

DIGEST_BYTES = 16
TOKEN_BYTES = 4


class ChainKind(NamedTuple):
    """What sets a chain apart from the chain of the same tokens that the model alone computes.

    An adapter is a kind: it changes keys and values. A salt is a kind, too: it changes none, and
    keeps the chain apart all the same. Other packages have more kinds. To the cache a kind is
    only a digest and a position. A chain without a kind is the model's own.
    """

    # 32 bytes in hex, of which the first 28 count. An adapter's digest is the SHA-256 of its
    # weights. A salt is its own digest.
    digest: str
    # The first position that the kind acts on. Keys and values before it are the model's.
    start: int


def common_blocks(digests: "PromptDigests", others: "PromptDigests") -> int:
    """How many full blocks two prompts begin with together. It is 0 for prompts of two scopes.

    A chain digest covers everything before it, so bisection finds the place.
    """
    blocks = range(min(len(digests.full), len(others.full)))
    return bisect_left(blocks, True, key=lambda index: digests.full[index] != others.full[index])


def pack(tokens: Sequence[TokenId]) -> bytes:
    """Token ids as native 32-bit words. This form is hashed, stored in blocks and compared."""
    return array("I", tokens).tobytes()


def last_place(tokens: Sequence[TokenId], wanted: Sequence[TokenId]) -> int | None:
    """The last place in `tokens` where `wanted` begins. None if there is none."""
    inside = pack(tokens)
    packed = pack(wanted)
    place = inside.rfind(packed)
    while place > 0 and place % TOKEN_BYTES:
        place = inside.rfind(packed, 0, place + len(packed) - 1)
    return None if place < 0 else place // TOKEN_BYTES


class ChainHasher:
    def __init__(self, key: bytes, block_size: int) -> None:
        self.block_size = block_size
        self._key = key
        self._stride = block_size * TOKEN_BYTES

    def root(self, scope: str) -> Digest:
        """The digest of a scope's empty prefix."""
        state = blake2b(scope.encode(), key=self._key, digest_size=DIGEST_BYTES, person=b"root")
        return Digest(state.digest())

    def extend(
        self,
        parent: Digest,
        packed: bytes | bytearray | memoryview,
        place: int = 0,
        kind: ChainKind | None = None,
    ) -> Digest:
        """The digest of `parent`'s prefix and these tokens (one block's, or a partial tail's).

        `place` is the block's index in the chain. The digest of the block in which `kind` begins
        covers the kind and where it begins. Equal tokens do not say where: later tokens decide it.
        The digests of later blocks cover both through their parent.
        """
        salt = b""
        person = b""
        if kind is not None:
            offset = kind.start - place * self.block_size
            if 0 <= offset < len(packed) // TOKEN_BYTES:
                digest = bytes.fromhex(kind.digest)
                salt = digest[:16]
                person = digest[16:28] + offset.to_bytes(4)
        state = blake2b(parent, key=self._key, digest_size=DIGEST_BYTES, salt=salt, person=person)
        state.update(packed)
        return Digest(state.digest())

    def chain(self, root: Digest, packed: bytes, kind: ChainKind | None = None) -> list[Digest]:
        """The digests at every full block's end."""
        digests: list[Digest] = []
        parent = root
        view = memoryview(packed)
        for place, end in enumerate(range(self._stride, len(packed) + 1, self._stride)):
            parent = self.extend(parent, view[end - self._stride : end], place, kind)
            digests.append(parent)
        return digests


class PromptDigests:
    """The digests of one prompt: those of full blocks at once, those in between on demand."""

    def __init__(
        self,
        hasher: ChainHasher,
        scope: str,
        tokens: Sequence[TokenId],
        kind: ChainKind | None = None,
    ) -> None:
        self.kind = kind
        self.packed = pack(tokens)
        self.num_tokens = len(tokens)
        self._hasher = hasher
        self._block_size = hasher.block_size
        self.root = hasher.root(scope)
        self.full = hasher.chain(self.root, self.packed, kind)

    def at(self, num_tokens: int) -> Digest:
        """The digest of the first `num_tokens` tokens."""
        full, rest = divmod(num_tokens, self._block_size)
        parent = self.full[full - 1] if full else self.root
        if not rest:
            return parent
        start = full * self._block_size * TOKEN_BYTES
        packed = self.packed[start : start + rest * TOKEN_BYTES]
        return self._hasher.extend(parent, packed, full, self.kind)

    def block_tokens(self, index: int) -> bytes:
        """The packed tokens of logical block `index` (fewer than a block's at the prompt's end)."""
        stride = self._block_size * TOKEN_BYTES
        return self.packed[index * stride : (index + 1) * stride]
