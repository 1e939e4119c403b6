"""What entries ask of the store. Without a store nothing happens."""

from collections.abc import Sequence

from engine.cache.block import Block, Entry
from engine.cache.lease_budget import EndReason, Leases
from engine.cache.store_tier import StoreTier


class Copies:
    def __init__(self, store: StoreTier | None, leases: Leases) -> None:
        self.store = store
        self._leases = leases

    @property
    def num_leases(self) -> int:
        """Leases that the store alone holds."""
        held = self.store.holds.entries() if self.store is not None else []
        return sum(entry.is_leased and entry.lease_tier == "disk" for entry in held)

    def keep(self, entry: Entry) -> None:
        """Have the store keep a copy, or note what has changed of the entry."""
        if self.store is not None and not entry.is_lapsed and not entry.is_broken:
            self.store.want(entry)
            self.store.note(entry)

    def note(self, entry: Entry) -> None:
        """The entry's time or lease has changed."""
        if self.store is not None:
            self.store.note(entry)

    def of(self, entry: Entry) -> list[Block]:
        """The blocks of the entry's copy, as far as there is one."""
        return self.store.copy_of(entry) if self.store is not None else []

    def end(self, entry: Entry) -> None:
        """The entry has ended. Its copy's content stays as long as there is room."""
        if self.store is not None:
            self.store.end(entry)

    def drop(self, blocks: Sequence[Block]) -> None:
        """Delete what no other entry holds of a dropped entry's copy."""
        if self.store is not None:
            self.store.drop_entry(blocks)

    def end_lease(self, entry: Entry, reason: EndReason) -> None:
        """End a lease, on the device or in the store.

        The store's hold stays as long as the entry does.
        """
        if entry.lease_tier == "device":
            self._leases.end(entry, reason)
            return
        assert self.store is not None and entry.stored is not None
        entry.is_leased = False
        names = [
            name
            for block, mine in zip(entry.blocks, entry.stored, strict=True)
            if not block.is_promised
            and not any(other.is_leased for other in self.store.holds.of(mine))
            for name in block.names
        ]
        self._leases.ended_elsewhere(entry, reason, names)

    def lease(self, entry: Entry) -> bool:
        """Lease an entry in the store. False if that has no whole copy of it."""
        if self.store is None or entry.stored is None or entry.is_lapsed:
            return False
        entry.is_leased, entry.lease_tier = True, "disk"
        entry.was_sacrificed, entry.why_unleased = False, None
        self.store.note(entry)
        return True

    def check(self, entries: Sequence[Entry]) -> None:
        """Prove that holds, leases and these entries agree; raises AssertionError."""
        for entry in entries:
            if entry.is_leased and entry.lease_tier == "disk":
                assert entry.stored is not None, "leased, and nothing holds it"
        if self.store is not None:
            held = set(self.store.holds.entries())
            assert held <= set(entries), "the store holds an ended entry"
