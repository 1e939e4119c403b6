"""Leases: entries' references on their blocks, the budget for them, and the order of yielding.

A scope may lease the whole budget until another scope needs its share. An entry that was not used
for the shortest TTL is *idle*. Idle entries with a longer TTL keep their leases within a budget of
their own. So unused content can't take the place of used content for an hour.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from engine.cache.block import Entry
from engine.cache.pool import BlockPool

EndReason = Literal["expired", "sacrificed", "yielded", "dropped", "damaged"]


class EndedLease(NamedTuple):
    entry: Entry
    reason: EndReason
    names: list[str]


class _Scope:
    """One scope's leases.

    `idle` are the idle ones of its `entries`, in the order of their last use.

    `num_idle` of its `num_blocks` are held by idle leases alone.
    """

    __slots__ = ("entries", "idle", "num_blocks", "num_idle")

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}
        self.idle: dict[Entry, None] = {}
        self.num_blocks = 0
        self.num_idle = 0


class Leases:
    """All leases on one pool. `take` and `trim` may end other leases, and return them."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        lease_share: float,
        scope_lease_share: float,
        idle_lease_share: float,
    ) -> None:
        self._pool = pool
        self.max_blocks = int(pool.num_blocks * lease_share)
        self.scope_blocks = int(self.max_blocks * scope_lease_share)
        self.max_idle_blocks = int(self.max_blocks * idle_lease_share)
        self.num_idle_yielded = 0
        self._shares: dict[str, int] = {}
        self._scopes: dict[str, _Scope] = {}
        self._ended: list[EndedLease] = []

    def __len__(self) -> int:
        return sum(len(scope.entries) for scope in self._scopes.values())

    def __iter__(self) -> Iterator[Entry]:
        for scope in self._scopes.values():
            yield from scope.entries

    def set_share(self, scope: str, share: float | None) -> None:
        """Set a scope's own share of the budget, 0 to 1. None is the common share."""
        if share is None:
            self._shares.pop(scope, None)
        else:
            self._shares[scope] = int(self.max_blocks * share)

    def take(self, entry: Entry) -> list[Entry] | None:
        """Lease this entry's blocks.

        Return the entries that yielded for it, or None if there is no room.
        """
        new = self._pool.num_unleased(entry.blocks)
        excess = self._pool.num_leased + new - self.max_blocks
        yielded: list[Entry] = []
        if excess > 0:
            if not self._may_claim(entry.scope, new, excess):
                return None
            yielded = self._claim(new)
        scope = self._scopes.setdefault(entry.scope, _Scope())
        idle = self._pool.num_idle
        self._pool.lease(entry.blocks)
        entry.is_leased, entry.was_sacrificed, entry.why_unleased = True, False, None
        entry.lease_tier = "device"
        scope.entries[entry] = None
        scope.num_blocks += new
        scope.num_idle += self._pool.num_idle - idle
        if entry.is_idle:
            # The entry was found long ago and is brought back only now.
            self.rest(entry)
        return yielded

    def end(self, entry: Entry, reason: EndReason) -> None:
        self.wake(entry)
        scope, leased, idle = self._scopes[entry.scope], self._pool.num_leased, self._pool.num_idle
        entry.is_leased = False
        entry.why_unleased = reason if reason in ("sacrificed", "yielded") else None
        names = self._pool.end_lease(entry.blocks)
        scope.num_blocks -= leased - self._pool.num_leased
        scope.num_idle += self._pool.num_idle - idle
        del scope.entries[entry]
        if not scope.entries:
            del self._scopes[entry.scope]
        self._ended.append(EndedLease(entry, reason, names))

    def ended_elsewhere(self, entry: Entry, reason: EndReason, names: list[str]) -> None:
        """Tell the end of a lease that held blocks of the store alone."""
        self._ended.append(EndedLease(entry, reason, names))

    def rest(self, entry: Entry) -> None:
        """This leased entry is idle from now on. Calls come in the order of last use."""
        scope = self._scopes[entry.scope]
        scope.idle[entry] = None
        self._count_idle(scope, entry, 1)

    def wake(self, entry: Entry) -> None:
        """This entry is used again. Nothing happens if it is not leased or not idle."""
        scope = self._scopes.get(entry.scope)
        if scope is not None and entry in scope.idle:
            del scope.idle[entry]
            self._count_idle(scope, entry, -1)

    def trim(self) -> list[Entry]:
        """End idle leases beyond their budget. Return the entries.

        The scope whose idle leases hold the most yields first, its least recently used entry first.
        """
        yielded: list[Entry] = []
        while self._pool.num_idle > self.max_idle_blocks:
            scope = max(self._scopes.values(), key=lambda scope: scope.num_idle)
            entry = next(iter(scope.idle))
            self.end(entry, "yielded")
            self.num_idle_yielded += 1
            yielded.append(entry)
        return yielded

    def take_ended(self) -> list[EndedLease]:
        """The leases that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _count_idle(self, scope: _Scope, entry: Entry, change: int) -> None:
        before = self._pool.num_idle
        self._pool.count_idle(entry.blocks, change)
        scope.num_idle += self._pool.num_idle - before

    def _may_claim(self, scope: str, new: int, excess: int) -> bool:
        """Whether a scope may claim blocks.

        It must be within its share, and the scopes above theirs must have enough.
        """
        held = self._scopes[scope].num_blocks if scope in self._scopes else 0
        if held + new > self._share_of(scope):
            return False
        above = (kept.num_blocks - self._share_of(name) for name, kept in self._scopes.items())
        return sum(blocks for blocks in above if blocks > 0) >= excess

    def _claim(self, new: int) -> list[Entry]:
        """End leases of scopes above their share, the soonest expiry first.

        No scope ends below its share by more than its last lease.
        """
        yielded: list[Entry] = []
        above = [
            entry
            for name, scope in self._scopes.items()
            if scope.num_blocks > self._share_of(name)
            for entry in scope.entries
        ]
        for entry in sorted(above, key=lambda entry: entry.expires_at):
            if self._pool.num_leased + new <= self.max_blocks:
                break
            if self._scopes[entry.scope].num_blocks > self._share_of(entry.scope):
                self.end(entry, "yielded")
                yielded.append(entry)
        return yielded

    def _share_of(self, scope: str) -> int:
        return self._shares.get(scope, self.scope_blocks)

    def check(self) -> None:
        """Prove that leases, references and budgets agree; raises AssertionError."""
        references: dict[int, int] = {}
        resting: dict[int, int] = {}
        for name, scope in self._scopes.items():
            awake: set[int] = set()
            idle: set[int] = set()
            for entry in scope.entries:
                assert entry.is_leased and entry.scope == name
                assert entry.is_idle == (entry in scope.idle)
                (idle if entry.is_idle else awake).update(b.block_id for b in entry.blocks)
                for block in entry.blocks:
                    references[block.block_id] = references.get(block.block_id, 0) + 1
                    if entry.is_idle:
                        resting[block.block_id] = resting.get(block.block_id, 0) + 1
            assert scope.idle.keys() <= scope.entries.keys()
            assert scope.num_blocks == len(awake | idle) and scope.num_idle == len(idle - awake)
        for block in self._pool.blocks:
            assert block.lease_count == references.get(block.block_id, 0)
            assert block.idle_count == resting.get(block.block_id, 0)
        assert self._pool.num_leased <= self.max_blocks
