"""Entries that end, or move down, with the content of blocks on which they hold no reference."""

from collections.abc import Collection, Mapping

from engine.cache.block import Entry
from engine.cache.ids import Digest


def depend(entry: Entry) -> None:
    """Last block first, so that a chain is reused from its tail."""
    for block in reversed(entry.blocks):
        block.dependents.add(entry)
        block.home.requeue(block)


def undepend(entry: Entry) -> None:
    for block in reversed(entry.blocks):
        if entry in block.dependents:
            block.dependents.remove(entry)
            block.home.requeue(block)


def requeue(entry: Entry) -> None:
    """The entry became idle, or is used again: its blocks' place in the order of reuse changes."""
    for block in reversed(entry.blocks):
        block.home.requeue(block)


def check_entries(entries: Mapping[Digest, Entry], leased: Collection[Entry]) -> None:
    """Prove that entries and dependents agree; raises AssertionError.

    `leased` are the entries that hold references on the device.
    """
    for key, entry in entries.items():
        assert entry.key == key
        assert entry.expires_at == max([entry.kept_until, *entry.refreshed_until])
        is_below = entry.is_leased and entry.lease_tier == "disk"
        assert (entry in leased) == (entry.is_leased and not is_below)
        assert not (entry.is_leased and entry.is_broken), "a leased block was reused"
        for index, block in enumerate(entry.blocks):
            assert entry.is_broken or block.index == index
            if not entry.is_leased and not entry.is_broken:
                assert entry in block.dependents
            is_own = entry.stored is not None and entry.stored[index] is block
            assert not is_below or is_own or entry in block.dependents
    assert all(entries.get(entry.key) is entry for entry in leased)
