"""One entry on vLLM's blocks."""

from dataclasses import dataclass, field

from engine.backends.vllm.internals import Block

Blocks = tuple[Block, ...]


@dataclass(eq=False, slots=True)
class Hold:
    """An entry. `hashes` are its blocks' own at the time it was made, to know them again by."""

    key: str
    scope: str
    tokens: int
    expires_at: float
    blocks: Blocks
    hashes: tuple[bytes | None, ...]
    is_leased: bool = False
    claims: set[str] = field(default_factory=set)
    is_confirmed: bool = False

    @property
    def is_intact(self) -> bool:
        return all(
            block.block_hash == digest
            for block, digest in zip(self.blocks, self.hashes, strict=True)
        )
