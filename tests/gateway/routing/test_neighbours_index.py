"""What engines are known to hold takes bounded memory, whatever they tell."""

import tracemalloc

from engine.protocol import ChainHeld, HeldName, Snapshot
from gateway.routing.held import BYTES_PER_NAME, ResidencyIndex

NUM_NAMES = 20_000


def test_a_full_index_takes_no_more_bytes_than_it_may() -> None:
    tracemalloc.start()
    try:
        index = ResidencyIndex(max_names=NUM_NAMES)
        before = tracemalloc.get_traced_memory()[0]
        assert index.apply(Snapshot(seq=0, epoch="e", chains=[]), 0.0)
        for number in range(NUM_NAMES // 5):
            names = [HeldName(f"{number * 10 + n:016x}", 10) for n in range(10)]
            frame = ChainHeld(seq=number + 1, names=names, num_leased=10, lease_seconds=300.0)
            assert index.apply(frame, float(number))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(index) == NUM_NAMES and index.num_forgotten == NUM_NAMES
    assert taken <= NUM_NAMES * BYTES_PER_NAME


def test_a_name_that_no_gateway_gave_takes_nothing() -> None:
    index = ResidencyIndex()
    assert index.apply(Snapshot(seq=0, epoch="e", chains=[]), 0.0)
    held = ChainHeld(seq=1, names=[HeldName("a" * 1_000_000, 10), HeldName("b" * 16, 20)])
    assert index.apply(held, 1.0)
    assert len(index) == 1
