"""Our record of blocks that another program owns."""

from engine.cache.block import Block
from engine.cache.digests import PromptDigests
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool


class MirrorPool(BlockPool):
    """Mirrors of blocks with entries or names. Other blocks have none."""

    def mirror(self, digests: PromptDigests) -> list[Block]:
        """The mirrors of a prompt's full blocks, each with one reference more."""
        blocks = []
        for index, digest in enumerate(digests.full):
            packed = digests.block_tokens(index)
            block = self.find(digest, packed)
            if block is None:
                block = self.allocate(index)
                self.append(block, packed)
                self.index(block, digest)
            else:
                self.acquire(block)
            blocks.append(block)
        return blocks

    def lose(self, digest: Digest) -> None:
        """The owner has dropped this block, so its names are gone too."""
        block = self._index.get(digest)
        if block is not None:
            self._evicted_names.extend(block.names)
            block.names.clear()
            self.requeue(block)

    def _enqueue(self, block: Block, *, is_spent: bool = True) -> None:
        if not block.names and not block.dependents:
            self._forget_content(block)
        super()._enqueue(block, is_spent=is_spent)
