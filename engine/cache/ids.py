"""The identifiers of blocks, tokens and prefixes."""

from typing import NewType

BlockId = NewType("BlockId", int)
TokenId = int
Digest = NewType("Digest", bytes)
"""A 16-byte keyed chain digest: of a scope and all tokens up to a point."""
NOBODY = Digest(b"")
"""The owner of blocks that belong to no scope."""
