"""The book of leases on the device: entries' references on its blocks, and the budget for them.

Which lease makes way for another is decided in `leases.py`.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine.cache.block import Entry
from engine.cache.leases import (
    Claim,
    ScopeLeases,
    ending_key,
    lowering_key,
    next_to_lower,
    next_to_sacrifice,
    next_to_yield,
)
from engine.cache.order import Key, Order
from engine.cache.pool import BlockPool
from engine.protocol.reports import LeaseEnd


class EndedLease(NamedTuple):
    entry: Entry
    reason: LeaseEnd
    names: list[str]


class _Scope:
    """One scope's leases."""

    __slots__ = ("entries", "num_blocks", "to_end", "to_lower")

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}
        # The blocks that they lease together.
        self.num_blocks = 0
        self.to_end = Order[Entry](self._ending_key)
        # Those that have a copy in the store.
        self.to_lower = Order[Entry](self._lowering_key)

    def _ending_key(self, entry: Entry) -> Key | None:
        return ending_key(entry) if entry in self.entries else None

    def _lowering_key(self, entry: Entry) -> Key | None:
        has_copy = entry in self.entries and entry.stored is not None
        return lowering_key(entry) if has_copy else None

    def push(self, entry: Entry) -> None:
        self.to_lower.push(entry)
        self.to_end.push(entry)


class Leases:
    """All leases on one pool. `take` may lower or end other leases.

    An entry whose lease leaves the device depends on its blocks at once, so that no content is lost
    in between.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        lease_share: float,
        scope_lease_share: float,
        changed: Callable[[Entry], None] = lambda _entry: None,
    ) -> None:
        """Shares are 0 to 1. `changed` is called with entries whose lease has left the device."""
        self._pool = pool
        self.max_blocks = int(pool.num_blocks * lease_share)
        self.scope_blocks = int(self.max_blocks * scope_lease_share)
        self.num_lowered = 0
        # How many leases began, together with the leases of an earlier epoch that are readable
        # again. It equals the number of leases that have ended since and of live ones.
        self.num_granted = 0
        self._changed = changed
        self._shares: dict[str, int] = {}
        self._scopes: dict[str, _Scope] = {}
        self._ended: list[EndedLease] = []

    def set_share(self, scope: str, share: float | None) -> None:
        """Set a scope's own share of the budget, 0 to 1. None is the common share."""
        if share is None:
            self._shares.pop(scope, None)
        else:
            self._shares[scope] = int(self.max_blocks * share)

    # Beginning.

    def take(self, entry: Entry, *, may_end: bool = True) -> bool:
        """Lease this entry's blocks. False if there is no room.

        Leases with a copy are lowered for it. Then others end for it, if `may_end`.
        """
        pool = self._pool
        if len(entry.blocks) > self.max_blocks or not self._make_room(entry, may_end):
            return False
        scope = self._scopes.setdefault(entry.scope, _Scope())
        leased = pool.num_leased
        pool.lease(entry.blocks)
        self.num_granted += not entry.is_leased
        entry.is_leased = True
        entry.was_sacrificed = False
        entry.why_unleased = None
        entry.lease_tier = "device"
        scope.entries[entry] = None
        scope.push(entry)
        scope.num_blocks += pool.num_leased - leased
        return True

    def has_room(self, name: str, num_new: int) -> bool:
        """Whether a scope's new lease would get room for `num_new` blocks that no lease has.

        Other leases may have to end for it."""
        excess = self._pool.num_leased + num_new - self.max_blocks
        if num_new > self.max_blocks:
            return False
        if excess <= 0:
            return True
        scope = self._scopes.get(name)
        num_leased = 0 if scope is None else scope.num_blocks
        claim = Claim(num_leased + num_new, self._share_of(name), excess)
        return next_to_yield(self._by_ending(), claim) is not None

    def _make_room(self, entry: Entry, may_end: bool) -> bool:
        """Have other leases make way for this entry's. False if that is not enough."""
        pool = self._pool
        while True:
            # Those that make way may share blocks with the new one, so it may need more now.
            num_new = pool.num_unleased(entry.blocks)
            excess = pool.num_leased + num_new - self.max_blocks
            if excess <= 0:
                return True
            lowered = next_to_lower(self._by_lowering(), entry.scope)
            if lowered is not None:
                self._lower(lowered)
                continue
            if not may_end:
                return False
            scope = self._scopes.get(entry.scope)
            num_leased = 0 if scope is None else scope.num_blocks
            claim = Claim(num_leased + num_new, self._share_of(entry.scope), excess)
            yielding = next_to_yield(self._by_ending(), claim)
            if yielding is None:
                return False
            self.end(yielding, "yielded")

    def reorder(self, entry: Entry) -> None:
        """The store has a whole copy of the entry from now on, or its expiry is earlier."""
        scope = self._scopes.get(entry.scope)
        if scope is not None:
            scope.push(entry)

    # Ending.

    def end(self, entry: Entry, reason: LeaseEnd) -> None:
        """End a lease. The entry is best-effort from now on."""
        names = self._leave_device(entry)
        entry.is_leased = False
        entry.was_sacrificed = reason == "sacrificed"
        entry.why_unleased = reason if reason in ("sacrificed", "yielded") else None
        self._changed(entry)
        self.tell_end(entry, reason, names)

    def tell_end(self, entry: Entry, reason: LeaseEnd, names: list[str]) -> None:
        """Tell the end of a lease. `names` are the names of blocks that have no lease now."""
        self._ended.append(EndedLease(entry, reason, names))

    def take_ended(self) -> list[EndedLease]:
        """The leases that ended since the last call."""
        ended = self._ended
        self._ended = []
        return ended

    def sacrifice(self) -> bool:
        """Nothing else can run: lower a lease, or end one. False if there is none."""
        lowered = next_to_lower(self._by_lowering())
        if lowered is not None:
            self._lower(lowered)
            return True
        sacrificed = next_to_sacrifice(scope.to_end.first() for scope in self._scopes.values())
        if sacrificed is None:
            return False
        self.end(sacrificed, "sacrificed")
        return True

    # Inside.

    def _by_ending(self) -> Iterator[ScopeLeases[Entry]]:
        for name, scope in self._scopes.items():
            yield ScopeLeases(scope.num_blocks, self._share_of(name), scope.to_end.first())

    def _by_lowering(self) -> Iterator[ScopeLeases[Entry]]:
        for name, scope in self._scopes.items():
            first = scope.to_lower.first()
            yield ScopeLeases(scope.num_blocks, self._share_of(name), first, name)

    def _lower(self, entry: Entry) -> None:
        """From now on the lease is on the entry's copy in the store. Its names stay leased."""
        self._leave_device(entry)
        entry.lease_tier = "disk"
        self.num_lowered += 1
        self._changed(entry)

    def _leave_device(self, entry: Entry) -> list[str]:
        """Give a lease's references back. Return the names of blocks without a lease now."""
        entry.depend()
        scope = self._scopes[entry.scope]
        leased = self._pool.num_leased
        names = self._pool.end_lease(entry.blocks)
        scope.num_blocks -= leased - self._pool.num_leased
        del scope.entries[entry]
        if not scope.entries:
            del self._scopes[entry.scope]
        return names

    def _share_of(self, scope: str) -> int:
        return self._shares.get(scope, self.scope_blocks)
