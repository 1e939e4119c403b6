"""A snapshot of many names is collected and written piece by piece."""

import msgspec

from engine.backends.reports import MAX_NAMES_A_STEP, chains_held
from engine.protocol import ChainHeld, HeldName, Snapshot
from engine.serve.server import NAMES_A_PIECE, snapshot_pieces
from tests.engine.schedule.harness import Harness

NAMES_OF_BLOCK = 16


def test_the_pieces_are_the_snapshot_and_none_is_long() -> None:
    for num_chains in (0, 1, 256, 257, 10_000):
        chains = [
            ChainHeld(seq=0, names=[HeldName(f"{chain:08x}{n:08x}", n + 1) for n in range(16)])
            for chain in range(num_chains)
        ]
        snapshot = Snapshot(seq=7, epoch="e", chains=chains)
        pieces = list(snapshot_pieces(snapshot))
        assert b"".join(pieces) == msgspec.json.encode(snapshot)
        assert max(piece.count(b'"digest"') for piece in pieces) <= NAMES_A_PIECE


def test_a_scan_takes_few_names_between_two_steps_and_finds_all() -> None:
    engine = Harness(num_blocks=2000)
    blocks = engine.cache.pool.blocks[::2]
    for block in blocks:
        block.names.update({f"{block.block_id:08x}{n:08x}": n + 1 for n in range(NAMES_OF_BLOCK)})
    parts = list(chains_held(engine.cache, engine.clock.now))
    sizes = [sum(len(chain.names) for chain in part) for part in parts]
    assert len(parts) > 1 and max(sizes) <= MAX_NAMES_A_STEP + NAMES_OF_BLOCK
    names = {name.digest for part in parts for chain in part for name in chain.names}
    assert len(names) == len(blocks) * NAMES_OF_BLOCK
