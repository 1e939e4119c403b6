"""What an engine reports of what it holds: entries and names, as the protocol says them."""

from collections.abc import Callable

from engine.backends.memory import MAX_BLOCKS_A_STEP
from engine.cache.block import Block, Entry
from engine.cache.prefix_cache import PrefixCache
from engine.protocol import ChainHeld, EntryInfo, HeldName, Snapshot, Tier
from engine.schedule.lifecycle import Lifecycle

MAX_NAMES_A_STEP = 4096
"""A step may wait for so many to be copied: some milliseconds."""


class SnapshotScan:
    """What is held, block by block: `advance` until `is_done`, each between two steps.

    The names of one block are one chain's. `seq` is the last event's before the first piece. Later
    events may be in later pieces already. A follower takes them in again behind the snapshot. Each
    says what its names are from then on, so the follower ends with what is held.
    """

    def __init__(self, cache: PrefixCache, lifecycle: Lifecycle, epoch: str) -> None:
        host = cache.host
        self._pools = [cache.pool.blocks, *([host.pool.blocks] if host is not None else [])]
        self._lifecycle = lifecycle
        self._epoch = epoch
        self._seq: int | None = None
        self._num_seen = 0
        self._chains: list[ChainHeld] = []

    @property
    def is_done(self) -> bool:
        return self._seq is not None and not self._pools

    def advance(self) -> None:
        if self._seq is None:
            self._seq = self._lifecycle.num_published
        num_names = num_blocks = 0
        while self._pools and num_names < MAX_NAMES_A_STEP and num_blocks < MAX_BLOCKS_A_STEP:
            blocks = self._pools[0]
            if self._num_seen == len(blocks):
                self._num_seen = 0
                del self._pools[0]
                continue
            block = blocks[self._num_seen]
            self._num_seen += 1
            num_blocks += 1
            num_names += len(block.names)
            if block.names:
                self._chains.append(_chain_of(block))

    def report(self) -> Snapshot:
        assert self._seq is not None
        return Snapshot(seq=self._seq, epoch=self._epoch, chains=self._chains)


def _chain_of(block: Block) -> ChainHeld:
    names = [HeldName(digest, tokens) for digest, tokens in block.names.items()]
    tier: Tier = "host" if block.is_host else "device"
    num_leased = len(names) if block.lease_count else 0
    return ChainHeld(seq=0, names=names, tier=tier, num_leased=num_leased)


def entry_infos(cache: PrefixCache, now: Callable[[], float]) -> list[EntryInfo]:
    at, block_size = now(), cache.pool.block_size
    return [_entry_info(entry, at, block_size) for entry in cache.entries.live()]


def _entry_info(entry: Entry, now: float, block_size: int) -> EntryInfo:
    deepest = entry.blocks[max(entry.tokens // block_size - 1, 0)]
    return EntryInfo(
        entry=entry.key.hex(),
        scope=entry.scope,
        tokens=entry.tokens,
        blocks=len(entry.blocks),
        ttl=entry.ttl,
        state=entry.state,
        expires_in_seconds=entry.expires_at - now,
        reads=entry.reads,
        name=entry.name,
        reason=entry.why_unleased,
        shared_by=deepest.ref_count - deepest.lease_count,
    )
