"""Leases: entries' references on device blocks, the budget for them, and the order of their end.

A lease whose entry has a whole copy in the store is *lowered* where its room is needed: the store
holds the copy, and the entry stays leased. Leases without a copy end instead (`next_to_end`).

A scope may lease the whole budget until another scope needs its share. An entry that was not used
for the shortest TTL is *idle*. Idle entries with a longer TTL keep their leases within a budget of
their own as soon as others need the room. So unused content can't take the place of used content
for an hour.

The budget is *contended* once more blocks than CONTENDED_SHARE of it were newly asked for within
the shortest TTL. Then entries of a lower rank (`Entry.rank`) get leases only while the budget is
filled to their part of RANK_SHARES, or while their scope holds less than that part of its share.
The rest is kept for higher ranks: trunk reservation, as telephone networks call it. A budget that
no lease holds is not contended. An entry that gets no lease is best-effort. No lease ends for this.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from engine.cache.block import Entry
from engine.cache.order import Order
from engine.cache.pool import BlockPool

MAX_LOOKED_AT = 64
"""Idle leases that one step looks at for one with a copy."""
CONTENDED_SHARE = 0.5
RANK_SHARES = (0.5, 0.75, 1.0)
"""The part of the budget that each rank may fill while the budget is contended."""

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
    """One scope's leases: the blocks that they hold, the scope's share of the budget in blocks, and
    the lease that would expire first."""

    num_blocks: int
    share: int
    first: L | None


class Claim(NamedTuple):
    """A new lease: with it its scope holds `num_blocks`, and all `excess` more than the budget."""

    num_blocks: int
    share: int
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
        able = [one for one in able if one.num_blocks > one.share]
        above = sum(one.num_blocks - one.share for one in able)
        if claim.num_blocks > claim.share or above < claim.excess:
            return None
    firsts = (one.first for one in able if one.first is not None)
    return min(firsts, key=lambda lease: lease.expires_at, default=None)


class Demand:
    """A count of blocks that were newly asked for, in which older requests fade.

    A steady rate settles at the blocks that are asked for within `seconds`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._blocks, self._at = 0.0, -math.inf

    def at(self, now: float) -> float:
        """The count. A `now` before the last one counts as the last one."""
        return self._blocks * math.exp(-max(now - self._at, 0.0) / self._seconds)

    def add(self, num_blocks: int, now: float) -> None:
        self._blocks, self._at = self.at(now) + num_blocks, max(self._at, now)


class _Scope:
    """One scope's leases.

    `idle` are the idle ones of its `entries`, in the order of their last use. `by_use` are those
    with a copy in the store, idle ones first; `by_end` are all, in the order of their expiry.

    `num_idle` of its `num_blocks` are held by idle leases alone.
    """

    __slots__ = ("by_end", "by_use", "entries", "idle", "num_blocks", "num_idle")

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}
        self.idle: dict[Entry, None] = {}
        self.by_use = Order[Entry](
            lambda one: (
                (not one.is_idle, one.used_at)
                if one in self.entries and one.stored is not None
                else None
            )
        )
        self.by_end = Order[Entry](
            lambda one: (one.expires_at, 0.0) if one in self.entries else None
        )
        self.num_blocks = self.num_idle = 0


class Leases:
    """All leases on one pool. `take` and `trim` may lower or end other leases.

    An entry whose lease leaves the device depends on its blocks at once, so that no content is lost
    in between.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        lease_share: float,
        scope_lease_share: float,
        idle_lease_share: float,
        demand_seconds: float,
        rank_shares: Sequence[float] = RANK_SHARES,
        changed: Callable[[Entry], None] = lambda _entry: None,
    ) -> None:
        """Shares are 0 to 1. `demand_seconds` is the shortest TTL in seconds.

        `changed` is called with each entry whose lease has left the device.
        """
        self._pool = pool
        self.max_blocks = int(pool.num_blocks * lease_share)
        self.scope_blocks = int(self.max_blocks * scope_lease_share)
        self.max_idle_blocks = int(self.max_blocks * idle_lease_share)
        self.num_idle_yielded = self.num_lowered = 0
        self._demand = Demand(demand_seconds)
        self._rank_shares = tuple(rank_shares)
        self._changed = changed
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

    # Beginning.

    def take(self, entry: Entry, *, may_end: bool = True) -> bool:
        """Lease this entry's blocks. False if there is no room.

        Other leases make way (`_make_room`); with `may_end` false only those with a copy.
        """
        if len(entry.blocks) > self.max_blocks:
            return False
        is_reserved = self._is_reserved(entry)
        if not entry.uses:
            fresh = sum(not block.lease_count and not block.dependents for block in entry.blocks)
            self._demand.add(fresh, entry.used_at)
        if is_reserved or not self._make_room(entry, may_end):
            return False
        scope = self._scopes.setdefault(entry.scope, _Scope())
        leased, idle = self._pool.num_leased, self._pool.num_idle
        self._pool.lease(entry.blocks)
        entry.is_leased, entry.was_sacrificed, entry.why_unleased = True, False, None
        entry.lease_tier = "device"
        scope.entries[entry] = None
        scope.by_use.push(entry)
        scope.by_end.push(entry)
        scope.num_blocks += self._pool.num_leased - leased
        scope.num_idle += self._pool.num_idle - idle
        if entry.is_idle:
            # The entry was found long ago and is brought back only now.
            self.rest(entry)
        return True

    def reorder(self, entry: Entry) -> None:
        """The store has a whole copy of the entry from now on, or its expiry is earlier."""
        if (scope := self._scopes.get(entry.scope)) is not None:
            scope.by_use.push(entry)
            scope.by_end.push(entry)

    def rest(self, entry: Entry) -> None:
        """This leased entry is idle from now on. Calls come in the order of last use."""
        scope = self._scopes[entry.scope]
        scope.idle[entry] = None
        scope.by_use.push(entry)
        self._count_idle(scope, entry, 1)

    def wake(self, entry: Entry) -> None:
        """This entry is used again. Nothing happens if it is not leased or not idle."""
        scope = self._scopes.get(entry.scope)
        if scope is not None and entry in scope.idle:
            del scope.idle[entry]
            self._count_idle(scope, entry, -1)

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
        ended, self._ended = self._ended, []
        return ended

    def sacrifice(self) -> bool:
        """Lower the least recently used lease that has a copy, an idle one if there is one; else
        end the one that would expire first. False if there is no lease."""
        if (entry := self._first_to_lower()) is not None:
            self._lower(entry)
        elif (entry := next_to_end(self._held())) is not None:
            self.end(entry, "sacrificed")
        return entry is not None

    def trim(self, *, may_end: bool) -> None:
        """Lower idle leases beyond their budget, and end those without a copy if `may_end`."""
        while self._pool.num_idle > self.max_idle_blocks:
            first = islice(self._most_idle(), MAX_LOOKED_AT)
            entry = next((one for one in first if may_end or one.stored is not None), None)
            if entry is None:
                return
            self._end_idle(entry)

    # Inside.

    def _make_room(self, needy: Entry, may_end: bool) -> bool:
        """Lower and end leases until a new one fits. False if it does not.

        Leases with a copy make way first: idle ones, the scope's own, and of scopes above their
        share, the least recently used first. Then idle ones beyond their budget end, if that is
        enough; then those of scopes above their share. Others of its scope may share blocks with
        the new one, so their end may cost it some.
        """
        ends_idle = False
        pool = self._pool
        while (excess := pool.num_leased + pool.num_unleased(needy.blocks) - self.max_blocks) > 0:
            if (entry := self._first_to_lower(needy.scope)) is not None:
                self._lower(entry)
                continue
            if not may_end:
                return False
            beyond = self._pool.num_idle - self.max_idle_blocks
            ends_idle = beyond > 0 and (ends_idle or excess <= beyond)
            if ends_idle:
                self._end_idle(next(self._most_idle()))
                continue
            scope = self._scopes.get(needy.scope)
            new = self._pool.num_unleased(needy.blocks)
            held = (scope.num_blocks if scope is not None else 0) + new
            entry = next_to_end(self._held(), Claim(held, self._share_of(needy.scope), excess))
            if entry is None:
                return False
            self.end(entry, "yielded")
        return True

    def _held(self) -> Iterator[ScopeLeases[Entry]]:
        for name, scope in self._scopes.items():
            yield ScopeLeases(scope.num_blocks, self._share_of(name), scope.by_end.first())

    def _lower(self, entry: Entry) -> None:
        """The store holds the entry's copy from now on. Its names stay leased."""
        self._leave_device(entry)
        entry.lease_tier = "disk"
        self.num_lowered += 1
        self._changed(entry)

    def _end_idle(self, entry: Entry) -> None:
        if entry.stored is not None:
            self._lower(entry)
        else:
            self.end(entry, "yielded")
            self.num_idle_yielded += 1

    def _most_idle(self) -> Iterator[Entry]:
        """The idle leases of the scope whose idle leases hold the most, by last use."""
        return iter(max(self._scopes.values(), key=lambda scope: scope.num_idle).idle)

    def _leave_device(self, entry: Entry) -> list[str]:
        """Give a lease's references back. Return the names that no lease here holds any more."""
        self.wake(entry)
        entry.depend()
        scope, leased, idle = self._scopes[entry.scope], self._pool.num_leased, self._pool.num_idle
        names = self._pool.end_lease(entry.blocks)
        scope.num_blocks -= leased - self._pool.num_leased
        scope.num_idle += self._pool.num_idle - idle
        del scope.entries[entry]
        if not scope.entries:
            del self._scopes[entry.scope]
        return names

    def _count_idle(self, scope: _Scope, entry: Entry, change: int) -> None:
        before = self._pool.num_idle
        self._pool.count_idle(entry.blocks, change)
        scope.num_idle += self._pool.num_idle - before

    def _first_to_lower(self, needy: str | None = None) -> Entry | None:
        """The first by idleness and last use of all that have a copy.

        With a `needy` scope only idle ones, its own, and those of scopes above their share are
        looked at.
        """
        firsts = [
            first
            for name, scope in self._scopes.items()
            if (first := scope.by_use.first()) is not None
            and (needy in (None, name) or first.is_idle or scope.num_blocks > self._share_of(name))
        ]
        return min(firsts, key=lambda entry: (not entry.is_idle, entry.used_at), default=None)

    def _is_reserved(self, entry: Entry) -> bool:
        """Whether what is left of a contended budget is kept for entries of a higher rank."""
        part = self._rank_shares[entry.rank]
        new = self._pool.num_unleased(entry.blocks)
        leased = self._pool.num_leased
        if entry.is_leased or not leased or not new or leased + new <= part * self.max_blocks:
            return False
        scope = self._scopes.get(entry.scope)
        held = scope.num_blocks if scope is not None else 0
        if held + new <= part * self._share_of(entry.scope):
            return False
        is_contended = self._demand.at(entry.used_at) > CONTENDED_SHARE * self.max_blocks
        return part < 1 and is_contended

    def _share_of(self, scope: str) -> int:
        return self._shares.get(scope, self.scope_blocks)
