"""Which block of the store is which file."""

from engine.cache.block import Block
from engine.cache.store_files import BlockKey


class FileMap:
    """Blocks, their files' names, and what the files must be of.

    A file is *proven* once this process wrote it, or read it whole. Of others only the header was
    looked at.
    """

    def __init__(self) -> None:
        self._names: dict[Block, str] = {}
        self._blocks: dict[str, Block] = {}
        self._keys: dict[Block, BlockKey] = {}
        self._proven: set[Block] = set()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, block: Block) -> bool:
        return block in self._names

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._blocks)

    @property
    def blocks(self) -> list[Block]:
        return list(self._names)

    def add(self, block: Block, key: BlockKey) -> None:
        self._names[block] = key.name
        self._blocks[key.name] = block
        self._keys[block] = key

    def remove(self, block: Block) -> str | None:
        """The name of the file that the block had."""
        name = self._names.pop(block, None)
        if name is not None:
            del self._blocks[name], self._keys[block]
            self._proven.discard(block)
        return name

    def name_of(self, block: Block) -> str | None:
        return self._names.get(block)

    def block_of(self, name: str) -> Block | None:
        return self._blocks.get(name)

    def find_key(self, block: Block) -> BlockKey | None:
        return self._keys.get(block)

    def key_of(self, block: Block) -> BlockKey:
        """The content that the block's file must have. Raises KeyError if the block has no file."""
        return self._keys[block]

    def prove(self, block: Block) -> None:
        if block in self._names:
            self._proven.add(block)

    def is_proven(self, block: Block) -> bool:
        return block in self._proven

    def check(self) -> None:
        """Prove that all agree; raises AssertionError."""
        assert len(self._names) == len(self._blocks) == len(self._keys)
        assert self._proven <= self._names.keys()
        for block, name in self._names.items():
            assert self._blocks[name] is block and self._keys[block].packed == block.tokens
