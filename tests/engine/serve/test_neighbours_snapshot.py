"""A snapshot of many names is collected and written piece by piece."""

import msgspec

from engine.backends.reports import MAX_NAMES_A_STEP, SnapshotScan
from engine.protocol import ChainHeld, HeldName, Snapshot
from engine.serve.server import NAMES_A_PIECE, snapshot_pieces
from tests.engine.schedule.harness import Harness

NAMES_OF_BLOCK = 16


def snapshot(num_chains: int) -> Snapshot:
    chains = [
        ChainHeld(seq=0, names=[HeldName(f"{chain:08x}{n:08x}", n + 1) for n in range(16)])
        for chain in range(num_chains)
    ]
    return Snapshot(seq=7, epoch="e", chains=chains)


def test_the_pieces_are_the_snapshot_and_none_is_long() -> None:
    for num_chains in (0, 1, 256, 257, 10_000):
        given = snapshot(num_chains)
        pieces = list(snapshot_pieces(given))
        assert b"".join(pieces) == msgspec.json.encode(given)
        assert max(piece.count(b'"digest"') for piece in pieces) <= NAMES_A_PIECE


def test_a_scan_takes_few_names_between_two_steps_and_finds_all() -> None:
    engine = Harness(num_blocks=2000)
    blocks = engine.cache.pool.blocks
    for block in blocks[::2]:
        block.names.update({f"{block.block_id:08x}{n:08x}": n + 1 for n in range(NAMES_OF_BLOCK)})
    scan, before, longest = (
        SnapshotScan(engine.cache, engine.accounting, "e", engine.clock.now),
        0,
        0,
    )
    while not scan.is_done:
        scan.advance()
        found = sum(len(chain.names) for chain in scan._chains)
        longest, before = max(longest, found - before), found
    assert longest <= MAX_NAMES_A_STEP + NAMES_OF_BLOCK
    names = {name.digest for chain in scan.report().chains for name in chain.names}
    assert len(names) == len(blocks[::2]) * NAMES_OF_BLOCK


def test_what_comes_between_two_pieces_is_in_later_events() -> None:
    engine = Harness(num_blocks=2000)
    for block in engine.cache.pool.blocks:
        block.names.update({f"{block.block_id:08x}{n:08x}": n + 1 for n in range(NAMES_OF_BLOCK)})
    scan = SnapshotScan(engine.cache, engine.accounting, "e", engine.clock.now)
    before = engine.accounting.num_published
    scan.advance()
    assert not scan.is_done
    engine.accounting.num_published += 3
    while not scan.is_done:
        scan.advance()
    assert scan.report().seq == before
