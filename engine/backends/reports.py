"""What an engine reports of what it holds: entries and names, as the protocol says them."""

from collections.abc import Callable

from engine.cache.block import Entry
from engine.cache.prefix_cache import PrefixCache
from engine.protocol import ChainHeld, EntryInfo, HeldName, Snapshot, Tier
from engine.schedule.lifecycle import Lifecycle


def snapshot_of(cache: PrefixCache, lifecycle: Lifecycle, epoch: str) -> Snapshot:
    """What is held, block by block: names of one block are one chain's."""
    chains = []
    host = cache.host
    for block in [*cache.pool.blocks, *(host.pool.blocks if host is not None else ())]:
        if block.names:
            names = [HeldName(digest, tokens) for digest, tokens in block.names.items()]
            num_leased = len(names) if block.lease_count else 0
            tier: Tier = "host" if block.is_host else "device"
            chains.append(ChainHeld(seq=0, names=names, tier=tier, num_leased=num_leased))
    # Counted on the engine's thread: events published later are not in these chains.
    return Snapshot(seq=lifecycle.num_published, epoch=epoch, chains=chains)


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
