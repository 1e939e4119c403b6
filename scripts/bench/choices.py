"""The cost of choosing the block that makes way, in a full memory of one workspace.

    python -m scripts.bench.choices [--blocks 1000 100000]

All blocks have content that nobody references, so each allocated block takes the place of a block
that makes way. That block is chosen by recency alone, or by learned worth. The table has the
processor's time of one allocation.
"""

import sys
import time

from engine.cache.digests import TOKEN_BYTES
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
from engine.cache.worth import Worths
from scripts.bench.report import machine_line, table
from scripts.setup.options import parse

OWNER = Digest(b"o" * 16)
CHAIN_BLOCKS = 50
BLOCK_TOKENS = 16
ROUNDS = 5


def main() -> int:
    options = parse(
        __doc__,
        blocks=([1000, 100_000], "sizes of memory, in blocks"),
        choices=(20_000, "blocks that make way, in each round"),
    )
    rows = []
    for num_blocks in options.blocks:
        recency = microseconds(BlockPool(num_blocks, BLOCK_TOKENS), options.choices)
        pool = BlockPool(num_blocks, BLOCK_TOKENS, worths=Worths())
        learned = microseconds(pool, options.choices)
        ratio = f"{learned / recency:.2f}"
        rows.append([f"{num_blocks:,}", f"{recency:.1f}", f"{learned:.1f}", ratio])
    print(table(["blocks", "recency, µs", "worth, µs", "ratio"], rows))
    print(f"\n{machine_line()}")
    return 0


def microseconds(pool: BlockPool, num_choices: int) -> float:
    """The time of an allocation with its chain's use and release: the median of the rounds."""
    number = fill(pool, 0, pool.num_blocks)
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        number = fill(pool, number, num_choices)
        times.append((time.process_time() - began) / num_choices * 1e6)
    return sorted(times)[ROUNDS // 2]


def fill(pool: BlockPool, number: int, num_blocks: int) -> int:
    """Use new chains of so many blocks together. Return the next free number of a block."""
    packed = bytes(BLOCK_TOKENS * TOKEN_BYTES)
    for first in range(number, number + num_blocks, CHAIN_BLOCKS):
        chain = []
        parent = OWNER
        for place in range(CHAIN_BLOCKS):
            block = pool.allocate(place, OWNER)
            pool.append(block, packed)
            digest = Digest((first + place).to_bytes(16, "big"))
            pool.index(block, digest, parent)
            parent = digest
            chain.append(block)
        if pool.worths is not None:
            pool.worths.moment.now += 1.0
        pool.use(chain, "end_turn")
        pool.release_chain(chain)
        pool.changes.take()
    return number + num_blocks


if __name__ == "__main__":
    sys.exit(main())
