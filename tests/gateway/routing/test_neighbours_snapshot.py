"""A snapshot of many names is taken in part by part, so that nothing else waits for it long."""

import gc
import time

import msgspec
import pytest

from engine.protocol import ChainHeld, HeldName, Snapshot
from gateway.routing.held import WHOLE_BYTES, Ends, Holdings, SnapshotPart, frames_of

TRIES = 5
NUM_CHAINS = 10_000
NAMES_OF_CHAIN = 16
NOW = 1.0


def snapshot_of(num_chains: int) -> Snapshot:
    chains = [
        ChainHeld(
            seq=0,
            names=[HeldName(f"{chain:08x}{n:08x}", 16 * (n + 1)) for n in range(NAMES_OF_CHAIN)],
            tier="host" if chain % 3 else "device",
            num_leased=chain % 4,
            lease_seconds=60.0,
        )
        for chain in range(num_chains)
    ]
    return Snapshot(seq=7, epoch="e", chains=chains)


def all_of(index: Holdings, snapshot: Snapshot) -> list[tuple[int, int]]:
    """What the index knows of each chain: tokens that are held, and leased."""
    pairs = []
    for chain in snapshot.chains:
        ends = Ends([n.digest for n in chain.names], [n.tokens for n in chain.names])
        coverage = index.coverage(ends, NOW)
        pairs.append((coverage.held, coverage.leased))
    return pairs


def in_parts(line: bytes) -> tuple[Holdings, list[float]]:
    """An index that applied a snapshot part by part, and the CPU seconds of each."""
    index = Holdings()
    seconds = list[float]()
    gc.disable()  # A gateway freezes what lives on: it is not looked through again and again.
    begun = time.thread_time()
    for frame in frames_of(line):
        assert isinstance(frame, SnapshotPart)
        assert index.seq == 0, "it is not complete"
        assert index.apply(frame, NOW)
        seconds.append(time.thread_time() - begun)
        begun = time.thread_time()
    gc.enable()
    return index, seconds


def test_no_part_of_a_snapshot_takes_long_and_all_are_as_if_it_were_one() -> None:
    snapshot = snapshot_of(NUM_CHAINS)
    line = msgspec.json.encode(snapshot)
    # Alone on a machine a part takes 10 ms. Beside others any of them may take some times as long,
    # but hardly one in each of some tries.
    for _ in range(TRIES):
        index, seconds = in_parts(line)
        assert len(seconds) > 20
        if max(seconds) < sum(seconds) / 4:
            break
    assert max(seconds) < sum(seconds) / 4
    whole = Holdings()
    whole.apply(snapshot, NOW)
    assert (index.seq, index.epoch) == (whole.seq, whole.epoch) == (7, "e")
    assert all_of(index, snapshot) == all_of(whole, snapshot)


def test_a_short_snapshot_is_one_frame_and_a_long_line_of_another_kind_is_read_too() -> None:
    for num_chains in (0, 5):
        snapshot = snapshot_of(num_chains)
        line = msgspec.json.encode(snapshot)
        assert len(line) < WHOLE_BYTES and list(frames_of(line)) == [snapshot]
    chain = ChainHeld(seq=3, names=[HeldName(f"{n:016x}", n + 1) for n in range(4000)])
    assert list(frames_of(msgspec.json.encode(chain))) == [chain]
    with pytest.raises(msgspec.MsgspecError):
        list(frames_of(b'{"type":"snapshot","seq":1}' + b" " * WHOLE_BYTES))
