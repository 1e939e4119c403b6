"""Leases: entries' references on device blocks, the budget for them, and the order of their end.

A lease whose entry has a whole copy in the store is *lowered* where its room is needed: the store
holds the copy, and the entry stays leased. Leases without a copy end instead (`next_to_end`).

A scope may lease the whole budget until another scope needs its share. An entry that gets no lease
is best-effort.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from engine.cache.block import Entry
from engine.cache.order import Order
from engine.cache.pool import BlockPool

EndReason = Literal["expired", "sacrificed", "yielded", "dropped", "damaged"]


class EndedLease(NamedTuple):
    entry: Entry
    reason: EndReason
    names: list[str]


class Lease(Protocol):
    """The part of an entry that the order of ends reads."""

    @property
    def expires_at(self) -> float: ...


L = TypeVar("L", bound=Lease)


class ScopeLeases(NamedTuple, Generic[L]):
    """One scope's leases."""

    # The blocks that they hold.
    num_blocks: int
    # The scope's share of the budget, in blocks.
    share: int
    # The lease that would expire first.
    first: L | None


class Claim(NamedTuple):
    """A new lease that the budget has no room for."""

    # What its scope holds with it, in blocks.
    num_blocks: int
    # The scope's share of the budget, in blocks.
    share: int
    # What all scopes hold with it beyond the budget, in blocks.
    excess: int


def next_to_end(scopes: Iterable[ScopeLeases[L]], claim: Claim | None = None) -> L | None:
    """The lease that ends next, on every engine. None if none may.

    Without a claim nothing else can run: the lease that would expire first is sacrificed. For a
    claim the scopes above their share yield, what would expire first before others. They do so if
    the claim stays within its scope's share, and they have enough above theirs. So no lease ends in
    vain, and no scope gets below its share by more than its last lease.
    """
    able = list(scopes)
    if claim is not None:
        able = [scope for scope in able if scope.num_blocks > scope.share]
        above = sum(scope.num_blocks - scope.share for scope in able)
        if claim.num_blocks > claim.share or above < claim.excess:
            return None
    firsts = (scope.first for scope in able if scope.first is not None)
    return min(firsts, key=lambda lease: lease.expires_at, default=None)


class _Scope:
    """One scope's leases, which hold `num_blocks`.

    `by_use` are those of its `entries` with a copy in the store, in the order of their last use;
    `by_end` are all, in the order of their expiry.
    """

    __slots__ = ("by_end", "by_use", "entries", "num_blocks")

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}
        self.by_use = Order[Entry](
            lambda entry: (
                (entry.used_at, 0.0) if entry in self.entries and entry.stored is not None else None
            )
        )
        self.by_end = Order[Entry](
            lambda entry: (entry.expires_at, 0.0) if entry in self.entries else None
        )
        self.num_blocks = 0


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
        self.num_granted = 0
        """The leases that began, those of an earlier epoch that are readable again among them: as
        many as have ended since, and are live."""
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

        Leases with a copy make way first: the scope's own, and those of scopes above their share,
        the least recently used first. Then, if `may_end`, those of scopes above their share end.
        Others of its scope may share blocks with the new one, so their end may cost it some.
        """
        pool = self._pool
        if len(entry.blocks) > self.max_blocks:
            return False
        while (excess := pool.num_leased + pool.num_unleased(entry.blocks) - self.max_blocks) > 0:
            other = self._first_to_lower(entry.scope)
            if other is not None:
                self._lower(other)
                continue
            scope_leases = self._scopes.get(entry.scope)
            held = (scope_leases.num_blocks if scope_leases is not None else 0) + pool.num_unleased(
                entry.blocks
            )
            claim = Claim(held, self._share_of(entry.scope), excess)
            other = next_to_end(self._held(), claim) if may_end else None
            if other is None:
                return False
            self.end(other, "yielded")
        scope = self._scopes.setdefault(entry.scope, _Scope())
        leased = pool.num_leased
        pool.lease(entry.blocks)
        self.num_granted += not entry.is_leased
        entry.is_leased = True
        entry.was_sacrificed = False
        entry.why_unleased = None
        entry.lease_tier = "device"
        scope.entries[entry] = None
        scope.by_use.push(entry)
        scope.by_end.push(entry)
        scope.num_blocks += pool.num_leased - leased
        return True

    def reorder(self, entry: Entry) -> None:
        """The store has a whole copy of the entry from now on, or its expiry is earlier."""
        scope = self._scopes.get(entry.scope)
        if scope is not None:
            scope.by_use.push(entry)
            scope.by_end.push(entry)

    # Ending.

    def end(self, entry: Entry, reason: EndReason) -> None:
        """End a lease. The entry is best-effort from now on."""
        names = self._leave_device(entry)
        entry.is_leased = False
        entry.was_sacrificed = reason == "sacrificed"
        entry.why_unleased = reason if reason in ("sacrificed", "yielded") else None
        self._changed(entry)
        self.tell_end(entry, reason, names)

    def tell_end(self, entry: Entry, reason: EndReason, names: list[str]) -> None:
        """Tell the end of a lease. `names` are those that no lease holds any more."""
        self._ended.append(EndedLease(entry, reason, names))

    def take_ended(self) -> list[EndedLease]:
        """The leases that ended since the last call."""
        ended = self._ended
        self._ended = []
        return ended

    def sacrifice(self) -> bool:
        """Lower the least recently used lease that has a copy, else end the one that would expire
        first. False if there is no lease."""
        entry = self._first_to_lower()
        if entry is not None:
            self._lower(entry)
        elif (entry := next_to_end(self._held())) is not None:
            self.end(entry, "sacrificed")
        return entry is not None

    # Inside.

    def _held(self) -> Iterator[ScopeLeases[Entry]]:
        for name, scope in self._scopes.items():
            yield ScopeLeases(scope.num_blocks, self._share_of(name), scope.by_end.first())

    def _lower(self, entry: Entry) -> None:
        """The store holds the entry's copy from now on. Its names stay leased."""
        self._leave_device(entry)
        entry.lease_tier = "disk"
        self.num_lowered += 1
        self._changed(entry)

    def _leave_device(self, entry: Entry) -> list[str]:
        """Give a lease's references back. Return the names that no lease here holds any more."""
        entry.depend()
        scope = self._scopes[entry.scope]
        leased = self._pool.num_leased
        names = self._pool.end_lease(entry.blocks)
        scope.num_blocks -= leased - self._pool.num_leased
        del scope.entries[entry]
        if not scope.entries:
            del self._scopes[entry.scope]
        return names

    def _first_to_lower(self, needy: str | None = None) -> Entry | None:
        """The least recently used of all that have a copy.

        With a `needy` scope only its own, and those of scopes above their share, are looked at.
        """
        firsts = [
            first
            for name, scope in self._scopes.items()
            if (first := scope.by_use.first()) is not None
            and (needy in (None, name) or scope.num_blocks > self._share_of(name))
        ]
        return min(firsts, key=lambda entry: entry.used_at, default=None)

    def _share_of(self, scope: str) -> int:
        return self._shares.get(scope, self.scope_blocks)
