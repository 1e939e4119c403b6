"""Leases: entries' references on device blocks, the budget for them, and the order of yielding.

A lease whose entry has a whole copy in the store is *lowered* where its room is needed: the store
holds the copy, and the entry stays leased. Leases without a copy end instead.

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

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from engine.cache.block import Entry
from engine.cache.demand import Demand
from engine.cache.order import EntryOrder, Key
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
        self.by_use = EntryOrder(self._use_of)
        self.by_end = EntryOrder(self._end_of)
        self.num_blocks = 0
        self.num_idle = 0

    def _use_of(self, entry: Entry) -> Key | None:
        is_able = entry in self.entries and entry.stored is not None
        return (not entry.is_idle, entry.used_at) if is_able else None

    def _end_of(self, entry: Entry) -> Key | None:
        return (entry.expires_at, 0.0) if entry in self.entries else None


class Leases:
    """All leases on one pool. `take` and `trim` may lower or end other leases."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        lease_share: float,
        scope_lease_share: float,
        idle_lease_share: float,
        demand_seconds: float,
        rank_shares: Sequence[float] = RANK_SHARES,
    ) -> None:
        """Shares are 0 to 1. `demand_seconds` is the shortest TTL in seconds."""
        self._pool = pool
        self.max_blocks = int(pool.num_blocks * lease_share)
        self.scope_blocks = int(self.max_blocks * scope_lease_share)
        self.max_idle_blocks = int(self.max_blocks * idle_lease_share)
        self.num_idle_yielded = 0
        self.num_lowered = 0
        self._left: list[Entry] = []
        self._demand = Demand(demand_seconds)
        self._rank_shares = tuple(rank_shares)
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

    def take(self, entry: Entry, *, may_end: bool = True) -> bool:
        """Lease this entry's blocks. False if there is no room.

        Leases with a copy make way first, then idle ones beyond their budget, then those of scopes
        above their share. Only the first do if `may_end` is false.
        """
        if len(entry.blocks) > self.max_blocks:
            return False
        is_reserved = self._is_reserved(entry)
        if not entry.uses:
            fresh = sum(not block.lease_count and not block.dependents for block in entry.blocks)
            self._demand.add(fresh, entry.used_at)
        if is_reserved:
            return False
        if self._excess(entry) > 0:
            self._lower_for(entry)
        if self._excess(entry) > 0 and may_end:
            self._claim_idle(entry)
        new = self._pool.num_unleased(entry.blocks)
        if (excess := self._excess(entry)) > 0:
            if not may_end or not self._may_claim(entry.scope, new, excess):
                return False
            self._claim(new)
        scope = self._scopes.setdefault(entry.scope, _Scope())
        idle = self._pool.num_idle
        self._pool.lease(entry.blocks)
        entry.is_leased, entry.was_sacrificed, entry.why_unleased = True, False, None
        entry.lease_tier = "device"
        scope.entries[entry] = None
        scope.by_use.push(entry)
        scope.by_end.push(entry)
        scope.num_blocks += new
        scope.num_idle += self._pool.num_idle - idle
        if entry.is_idle:
            # The entry was found long ago and is brought back only now.
            self.rest(entry)
        return True

    def end(self, entry: Entry, reason: EndReason) -> None:
        names = self._release(entry)
        entry.is_leased = False
        entry.why_unleased = reason if reason in ("sacrificed", "yielded") else None
        self._ended.append(EndedLease(entry, reason, names))

    def has_copy(self, entry: Entry) -> None:
        """The store has a whole copy of the entry from now on."""
        if (scope := self._scopes.get(entry.scope)) is not None:
            scope.by_use.push(entry)

    def ends_sooner(self, entry: Entry) -> None:
        """The entry's expiry was moved to an earlier time."""
        if (scope := self._scopes.get(entry.scope)) is not None:
            scope.by_end.push(entry)

    def lower_one(self) -> bool:
        """Lower the least recently used lease that has a copy, an idle one if there is one.

        False if there is none.
        """
        entry = self._first_to_lower()
        if entry is not None:
            self._lower(entry)
        return entry is not None

    def sacrifice(self) -> bool:
        """End the lease that would end first. False if there is none."""
        entry = self._first_to_end(self._scopes)
        if entry is not None:
            self.end(entry, "sacrificed")
            entry.was_sacrificed = True
            self._left.append(entry)
        return entry is not None

    def take_left(self) -> list[Entry]:
        """The entries whose leases left the device since the last call, and did not just end."""
        left, self._left = self._left, []
        return left

    def _lower(self, entry: Entry) -> None:
        """The store holds the entry's copy from now on. Its names stay leased."""
        self._release(entry)
        entry.lease_tier = "disk"
        self.num_lowered += 1
        self._left.append(entry)

    def _yield(self, entry: Entry) -> None:
        self.end(entry, "yielded")
        self._left.append(entry)

    def _release(self, entry: Entry) -> list[str]:
        """Give a lease's references back. Return the names that no lease here holds any more."""
        self.wake(entry)
        scope, leased, idle = self._scopes[entry.scope], self._pool.num_leased, self._pool.num_idle
        names = self._pool.end_lease(entry.blocks)
        scope.num_blocks -= leased - self._pool.num_leased
        scope.num_idle += self._pool.num_idle - idle
        del scope.entries[entry]
        if not scope.entries:
            del self._scopes[entry.scope]
        return names

    def ended_elsewhere(self, entry: Entry, reason: EndReason, names: list[str]) -> None:
        """Tell the end of a lease that held blocks of the store alone."""
        self._ended.append(EndedLease(entry, reason, names))

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

    def trim(self, *, may_end: bool) -> None:
        """Lower idle leases beyond their budget, and end those without a copy if `may_end`.

        The scope whose idle leases hold the most is first, its least recently used entry first.
        """
        while self._pool.num_idle > self.max_idle_blocks:
            scope = max(self._scopes.values(), key=lambda scope: scope.num_idle)
            first = islice(scope.idle, MAX_LOOKED_AT)
            entry = next((one for one in first if may_end or one.stored is not None), None)
            if entry is None:
                return
            self._trim(entry)

    def take_ended(self) -> list[EndedLease]:
        """The leases that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _count_idle(self, scope: _Scope, entry: Entry, change: int) -> None:
        before = self._pool.num_idle
        self._pool.count_idle(entry.blocks, change)
        scope.num_idle += self._pool.num_idle - before

    def _trim(self, entry: Entry) -> None:
        if entry.stored is not None:
            self._lower(entry)
        else:
            self._yield(entry)
            self.num_idle_yielded += 1

    def _excess(self, entry: Entry) -> int:
        """Blocks beyond the budget with this lease. Others of its scope may share blocks with it,
        so their end may cost it some."""
        new = self._pool.num_unleased(entry.blocks)
        return self._pool.num_leased + new - self.max_blocks

    def _lower_for(self, needy: Entry) -> None:
        """Lower leases until a new one fits: idle ones, the scope's own, and of scopes above their
        share; the least recently used first."""
        while self._excess(needy) > 0:
            entry = self._first_to_lower(needy.scope)
            if entry is None:
                return
            self._lower(entry)

    def _first_to_lower(self, needy: str | None = None) -> Entry | None:
        """The first by idleness and last use of all that have a copy.

        With a `needy` scope only idle ones, its own, and those of scopes above their share are
        looked at.
        """
        firsts = [first for scope in self._scopes.values() if (first := scope.by_use.first())]
        able = (
            entry
            for entry in firsts
            if needy in (None, entry.scope) or entry.is_idle or self._is_above_share(entry.scope)
        )
        return min(able, key=lambda entry: (not entry.is_idle, entry.used_at), default=None)

    def _first_to_end(self, scopes: Iterable[str]) -> Entry | None:
        firsts = [first for name in scopes if (first := self._scopes[name].by_end.first())]
        return min(firsts, key=lambda entry: entry.expires_at, default=None)

    def _claim_idle(self, needy: Entry) -> None:
        """End idle leases beyond their budget, if that is enough."""
        if self._excess(needy) > self._pool.num_idle - self.max_idle_blocks:
            return
        while self._excess(needy) > 0 and self._pool.num_idle > self.max_idle_blocks:
            scope = max(self._scopes.values(), key=lambda scope: scope.num_idle)
            self._trim(next(iter(scope.idle)))

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

    def _may_claim(self, scope: str, new: int, excess: int) -> bool:
        """Whether a scope may claim blocks.

        It must be within its share, and the scopes above theirs must have enough.
        """
        held = self._scopes[scope].num_blocks if scope in self._scopes else 0
        if held + new > self._share_of(scope):
            return False
        above = (kept.num_blocks - self._share_of(name) for name, kept in self._scopes.items())
        return sum(blocks for blocks in above if blocks > 0) >= excess

    def _claim(self, new: int) -> None:
        """End leases of scopes above their share, the soonest expiry first.

        No scope ends below its share by more than its last lease.
        """
        while self._pool.num_leased + new > self.max_blocks:
            above = [name for name in self._scopes if self._is_above_share(name)]
            entry = self._first_to_end(above)
            if entry is None:
                return
            self._yield(entry)

    def _is_above_share(self, scope: str) -> bool:
        return self._scopes[scope].num_blocks > self._share_of(scope)

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
            scope.by_use.check(scope.entries)
            scope.by_end.check(scope.entries)
            assert scope.num_blocks == len(awake | idle) and scope.num_idle == len(idle - awake)
        for block in self._pool.blocks:
            assert block.lease_count == references.get(block.block_id, 0)
            assert block.idle_count == resting.get(block.block_id, 0)
        assert self._pool.num_leased <= self.max_blocks
