"""Snapshots as JSON in pieces, so that the event loop has other work between them."""

from collections.abc import Iterator, Sequence

import msgspec

from engine.protocol import ChainHeld, Snapshot

NAMES_A_PIECE = 4096

_encode = msgspec.json.Encoder().encode


def snapshot_pieces(snapshot: Snapshot) -> Iterator[bytes]:
    """Yield pieces of about NAMES_A_PIECE names, each of which takes a millisecond."""
    head = _encode(msgspec.structs.replace(snapshot, chains=[]))
    assert head.endswith(b"[]}"), "the chains are the last field"
    yield head[:-2]
    separator = b""
    for chains in _parts(snapshot.chains):
        yield separator + _encode(chains)[1:-1]
        separator = b","
    yield b"]}"


def _parts(chains: Sequence[ChainHeld]) -> Iterator[Sequence[ChainHeld]]:
    begin = num_names = 0
    for end, chain in enumerate(chains, 1):
        num_names += len(chain.names)
        if num_names >= NAMES_A_PIECE or end == len(chains):
            yield chains[begin:end]
            begin, num_names = end, 0
