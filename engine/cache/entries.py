"""Entries: the prefixes that breakpoints wrote, with their leases and expiries.

An entry at n tokens is the promise that the KV of one scope's first n tokens can be read until it
expires. A leased entry has a reference on each of its blocks. An entry without a lease is
best-effort: no breakpoint asked for a lease (`automatic`), or it was over the budget (`leases.py`),
was sacrificed, or yielded to another. It has no reference, and it ends when the first of its
blocks is reused. Its blocks stand in the same order of use as all others. Time is handed in as a
number: this module reads no clock.

A request may be looked up some time after it arrived, and it reads entries that were readable at
its arrival. So an entry whose time is over is *lapsed* for some seconds before it is removed. It
has no lease, is not reported, and is kept like a best-effort entry. Only requests that arrived
before its expiry can read it.

With a store an entry's whole copy is kept there too, and may have the lease (`store_tier.py`).
"""

from collections.abc import Sequence

from engine.cache.block import Block, Entry, Recorded, Refresh
from engine.cache.device_leases import Leases
from engine.cache.digests import TOKEN_BYTES, PromptDigests
from engine.cache.ids import Digest
from engine.cache.lifetimes import LifetimeCounts
from engine.cache.lookup import Mark
from engine.cache.order import Order
from engine.cache.pool import BlockPool
from engine.cache.store_tier import BlockKey, StoreTier
from engine.protocol import TTLS, MissReason, Ttl
from engine.protocol.reports import LeaseEnd

MAX_TOMBSTONES = 65_536
ARRIVAL_GRACE_SECONDS = 60.0
"""For how long engines keep an expired entry for turns that arrived before."""


class Entries:
    def __init__(
        self,
        pool: BlockPool,
        *,
        lease_share: float,
        scope_lease_share: float = 0.5,
        grace_seconds: float = 0.0,
        host: BlockPool | None = None,
        store: StoreTier | None = None,
    ) -> None:
        """`lease_share`: the part of the pool's blocks that may be leased, 0 to 1.

        `scope_lease_share`: the part of the budget that a scope may claim from scopes that have
        more; `set_share` overrides it for a scope. `grace_seconds`: how long a lapsed
        entry is kept.
        """
        self._pool = pool
        self._host = host
        self._store = store
        self.leases = Leases(
            pool,
            lease_share=lease_share,
            scope_lease_share=scope_lease_share,
            changed=self._note,
        )
        if store is not None:
            store.on_copied = self._has_copy
            store.on_displaced = self._displaced
        self._grace_seconds = grace_seconds
        self._num_lapsed = 0
        self._by_key: dict[Digest, Entry] = {}
        self._tombstones: dict[Digest, MissReason] = {}
        self._by_expiry = Order[Entry](
            lambda entry: (
                (entry.expires_at, 0.0) if self._is_in(entry) and not entry.is_lapsed else None
            )
        )
        # When a lapsed entry ends, unless it is refreshed before.
        self._by_removal = Order[Entry](
            lambda entry: (
                (entry.expires_at + grace_seconds, 0.0)
                if self._is_in(entry) and entry.is_lapsed
                else None
            )
        )
        self.lifetimes = LifetimeCounts()

    def __len__(self) -> int:
        """The number of entries, without lapsed ones, which no new request can read."""
        return len(self._by_key) - self._num_lapsed

    @property
    def num_leases(self) -> int:
        """The number of leases in all tiers."""
        return sum(entry.is_leased for entry in self._by_key.values())

    @property
    def num_automatic(self) -> int:
        """The number of entries that nobody asked to lease, without lapsed ones."""
        entries = self._by_key.values()
        return sum(not (entry.is_asked_for or entry.is_lapsed) for entry in entries)

    # Reading.

    def get(self, key: Digest) -> Entry | None:
        """The entry at this key, readable or not."""
        return self._by_key.get(key)

    def find(self, digests: PromptDigests, tokens: int, now: float) -> Entry | None:
        """The entry at this offset that was readable at `now` and has exactly these tokens."""
        entry = self._by_key.get(digests.at(tokens))
        if entry is None or entry.tokens != tokens:
            return None
        if entry.is_broken:
            self._evict(entry, now)
            return None
        if not entry.ready_at <= now < entry.expires_at:
            return None
        return entry if entry.begins_with(digests.packed[: entry.tokens * TOKEN_BYTES]) else None

    def refresh(self, entry: Entry, now: float, *, hold: bool = True) -> Refresh:
        """Refresh an entry that is read, or at which a breakpoint stands.

        The entry's TTL starts again, unless the entry has a lifetime of its own. A lost lease is
        taken again. The refresh counts at once, and stays unless it is taken back. With `hold` a
        lease is asked for. Without it no lease begins that nobody asked for earlier.
        """
        entry.is_asked_for |= hold
        until = now + self.seconds(entry.ttl) if entry.seconds is None else entry.kept_until
        entry.refreshed_until.append(until)
        self._set_expiry(entry)
        entry.used_at = max(entry.used_at, now)
        if not entry.is_lapsed and not entry.is_leased_on_device:
            self._try_lease(entry)
        self._want_copy(entry)
        return Refresh(entry, until)

    def confirm(self, refresh: Refresh) -> None:
        """The request of this refresh has begun to answer."""
        self.lifetimes.gaps.add(max(refresh.until - refresh.entry.kept_until, 0.0))
        refresh.entry.refreshed_until.remove(refresh.until)
        self._extend(refresh.entry, refresh.until)

    def take_back(self, refresh: Refresh) -> None:
        """The request of this refresh never answered. The entry expires as without it."""
        refresh.entry.refreshed_until.remove(refresh.until)
        self._set_expiry(refresh.entry)

    def seconds(self, ttl: Ttl, seconds: float | None = None) -> float:
        """A lifetime: the breakpoint's own `seconds`, else the TTL's."""
        return TTLS[ttl].seconds if seconds is None else seconds

    def why_missing(self, key: Digest, now: float) -> MissReason | None:
        """Why there is no readable entry at this key, as far as it is remembered."""
        entry = self._by_key.get(key)
        if entry is None:
            return self._tombstones.get(key)
        if entry.is_broken:
            return entry.why_broken
        if entry.ready_at > now:
            return "in_progress_race"
        return "ttl_expired" if entry.expires_at <= now else None

    # Writing.

    def write(
        self,
        scope: str,
        digests: PromptDigests,
        mark: Mark,
        blocks: Sequence[Block],
        *,
        arrived_at: float,
        now: float,
    ) -> Entry | None:
        """Write a breakpoint's entry, or extend an equal one.

        The TTL, or a lifetime of its own, counts from `arrived_at`. The entry is readable from
        `now` on. None if the time is over.
        """
        key = digests.at(mark.tokens)
        expires_at = arrived_at + self.seconds(mark.ttl, mark.seconds)
        entry = self._by_key.get(key)
        if entry is not None and not entry.is_broken and entry.expires_at > now:
            has_own_lifetime = entry.seconds is not None or mark.seconds is not None
            if entry.ready_at > arrived_at or has_own_lifetime:
                # Another request wrote and paid for it meanwhile, or the breakpoint sets the end.
                self._extend(entry, expires_at)
            else:
                self._extend(entry, arrived_at + self.seconds(entry.ttl))
            entry.used_at = max(entry.used_at, now)
            if mark.hold and not entry.is_asked_for:
                entry.is_asked_for = True
                if not entry.is_partly_away:
                    self._try_lease(entry)
            self.bring_back(entry, blocks)
        else:
            if entry is not None:
                self.end(entry, "ttl_expired")
            if expires_at <= now:
                return None
            entry = Entry(
                scope=scope,
                key=key,
                tokens=mark.tokens,
                ttl=mark.ttl,
                blocks=list(blocks),
                ready_at=now,
                expires_at=expires_at,
                kept_until=expires_at,
                used_at=now,
                is_asked_for=mark.hold,
                seconds=mark.seconds,
            )
            if digests.kind is not None and digests.kind.start < mark.tokens:
                entry.kind = digests.kind
            self.take_in(entry)
        self._want_copy(entry)
        return entry

    def bring_back(self, entry: Entry, blocks: Sequence[Block]) -> None:
        """A reader has brought the entry's content to the device: it is leased there if possible.

        Nothing happens if the content was there, or if the entry has ended.
        """
        if self._is_in(entry) and not entry.is_broken and entry.is_partly_away:
            self._undepend(entry)
            entry.blocks = list(blocks[: len(entry.blocks)])
            if not self._try_lease(entry):
                self._depend(entry)

    def take_in(self, entry: Entry) -> None:
        """Add an entry with its blocks. One that is leased has its references already."""
        self._by_key[entry.key] = entry
        self._tombstones.pop(entry.key, None)
        self._by_expiry.push(entry)
        if not entry.is_leased and not self._try_lease(entry):
            self._depend(entry)

    def restore(self, entry: Entry, keys: Sequence[BlockKey]) -> bool:
        """Take in an entry of an earlier epoch whose files are all in the store.

        It is leased in the store if `is_leased` says so. False if the store has no room for it, or
        if an equal entry is there.
        """
        assert self._store is not None
        if entry.key in self._by_key or not self._store.restore(entry, keys):
            return False
        entry.blocks = list(entry.stored or ())
        entry.lease_tier = "disk"
        entry.recorded = Recorded(entry.stored or [], entry.is_leased)
        self.leases.num_granted += entry.is_leased
        self.take_in(entry)
        return True

    # Ending.

    def next_expiry(self) -> float | None:
        """The time of the next expiry, None if there is none."""
        first = self._by_expiry.first()
        return first.expires_at if first is not None else None

    def expire(self, now: float) -> None:
        """End all entries whose time is over, exactly at their expiry, and all evicted ones."""
        for entry in self._pool.take_broken() + (self._host.take_broken() if self._host else []):
            if self._is_in(entry):
                self._evict(entry, now)
        while (due := self._by_expiry.first(until=now)) is not None:
            self.lifetimes.expired.add(due.expires_at - due.ready_at)
            if due.expires_at + self._grace_seconds > now:
                self._lapse(due)
            else:
                self.end(due, "ttl_expired", "expired")
        while (lapsed := self._by_removal.first(until=now)) is not None:
            self.end(lapsed, "ttl_expired")

    def drop(
        self, scope: str | None, key: Digest | None = None, reason: LeaseEnd = "dropped"
    ) -> int:
        """End a scope's entry, or all of them, before their time. Return their number.

        Their leases end with the reason. A file of their copies is deleted unless another copy
        has it.
        """
        keys = list(self._by_key) if key is None else [key]
        entries = (self._by_key.get(key) for key in keys)
        doomed = [entry for entry in entries if entry is not None and scope in (None, entry.scope)]
        num_live = sum(not entry.is_lapsed for entry in doomed)
        for entry in doomed:
            copy = self._store.copy_of(entry) if self._store is not None else []
            self.end(entry, "dropped", reason)
            if self._store is not None:
                self._store.drop_entry(copy)
        return num_live

    def drop_adapter(self, digest: str) -> int:
        """End the entries that an adapter acts on, since nobody can read them any more.

        Return how many were live. The files of their copies stay: if the same weights are loaded
        again, the content can be read again.
        """
        entries = self._by_key.values()
        doomed = [entry for entry in entries if entry.kind and entry.kind.digest == digest]
        num_live = sum(map(self.is_live, doomed))
        for entry in doomed:
            self.end(entry, "adapter_unloaded", "dropped")
        return num_live

    def damaged(self, block: Block, now: float) -> None:
        """A file of the store is damaged: end the entries that stand on it.

        An entry whose content is in a higher tier only loses its copy, and gets another.
        """
        assert self._store is not None
        for entry in self._store.copies.of(block):
            if any(entry_block is block for entry_block in entry.blocks):
                self.lifetimes.evicted.add(max(now - entry.ready_at, 0.0))
                self.lifetimes.idle.add(0.0)
                self.end(entry, "damaged", "damaged")
            else:
                self._lose_copy(entry, "damaged")
                self._store.end(entry)
                self._store.want(entry)
        self._store.forget(block)

    def end(self, entry: Entry, miss_reason: MissReason, lease_end: LeaseEnd | None = None) -> None:
        """End an entry, and its lease if it has one.

        `miss_reason` answers later look-ups. `lease_end` is counted for the lease: it has expired
        where nothing else is told.
        """
        del self._by_key[entry.key]
        self._num_lapsed -= entry.is_lapsed
        if entry.is_leased:
            self._end_lease(entry, lease_end or "expired")
        self._undepend(entry)
        if self._store is not None:
            self._store.end(entry)
        self._tombstones[entry.key] = miss_reason
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def live(self) -> list[Entry]:
        """All entries whose content is there and whose time is not over."""
        entries = self._by_key.values()
        return [entry for entry in entries if not entry.is_broken and not entry.is_lapsed]

    def is_live(self, entry: Entry) -> bool:
        return self._is_in(entry) and not entry.is_broken and not entry.is_lapsed

    def _is_in(self, entry: Entry) -> bool:
        return self._by_key.get(entry.key) is entry

    # Times.

    def _extend(self, entry: Entry, kept_until: float) -> None:
        entry.kept_until = max(entry.kept_until, kept_until)
        self._set_expiry(entry)

    def _set_expiry(self, entry: Entry) -> None:
        expires_at = max([entry.kept_until, *entry.refreshed_until])
        if expires_at == entry.expires_at:
            return
        before = entry.expires_at
        entry.expires_at = expires_at
        self._note(entry)
        if expires_at < before or entry.is_lapsed:
            self.leases.reorder(entry)
            # A lapsed entry may be live again. If its new expiry is past too, it lapses anew.
            self._num_lapsed -= entry.is_lapsed
            entry.is_lapsed = False
            self._by_expiry.push(entry)

    def _lapse(self, entry: Entry) -> None:
        """The entry's time is over. From now on only requests that arrived before can read it."""
        if entry.is_leased:
            self._end_lease(entry, "expired")
        entry.is_lapsed = True
        self._num_lapsed += 1
        self._by_removal.push(entry)

    def _evict(self, entry: Entry, now: float) -> None:
        """End a best-effort entry whose content was reused for room."""
        if entry.is_lapsed:
            self.end(entry, "ttl_expired")
            return
        refreshed_at = entry.expires_at - self.seconds(entry.ttl, entry.seconds)
        self.lifetimes.evicted.add(max(now - entry.ready_at, 0.0))
        self.lifetimes.idle.add(max(now - refreshed_at, 0.0))
        self.end(entry, entry.why_broken)

    # Leases and copies.

    def _try_lease(self, entry: Entry) -> bool:
        """Lease on the device, else in the store. False if it is not leased on the device.

        If the store has a copy, no other lease ends for this one. An entry gets no lease unless a
        breakpoint asked for one.
        """
        if not entry.is_asked_for:
            entry.why_unleased = "automatic"
            return False
        is_away = entry.is_partly_away
        if not is_away and self.leases.take(entry, may_end=entry.stored is None):
            self._undepend(entry)
            return True
        if not entry.is_leased and not self._lease_in_store(entry):
            entry.why_unleased = "over_budget"
            if is_away:
                is_below = any(block.tier == "disk" for block in entry.blocks)
                entry.why_unleased = "on_disk" if is_below else "on_host"
        return False

    def _lease_in_store(self, entry: Entry) -> bool:
        """Lease the store's copy of an entry. False if it gets no lease there.

        It gets none if the store has no whole copy of it, if its time is over, or if no breakpoint
        asked for a lease.
        """
        if self._store is None or entry.stored is None or entry.is_lapsed:
            return False
        if not entry.is_asked_for:
            return False
        self.leases.num_granted += 1
        entry.is_leased = True
        entry.lease_tier = "disk"
        entry.was_sacrificed = False
        entry.why_unleased = None
        self._note(entry)
        return True

    def _end_lease(self, entry: Entry, reason: LeaseEnd) -> None:
        """End a lease, on the device or in the store. From then on the entry depends on its blocks.

        The store keeps its copy as long as the entry is there.
        """
        if entry.lease_tier == "device":
            self.leases.end(entry, reason)
            return
        assert self._store is not None and entry.stored is not None
        entry.is_leased = False
        names = [
            name
            for block, mine in zip(entry.blocks, entry.stored, strict=True)
            if not block.is_promised
            and not any(other.is_leased for other in self._store.copies.of(mine))
            for name in block.names
        ]
        self._depend(entry)
        self.leases.tell_end(entry, reason, names)

    def _has_copy(self, entry: Entry) -> None:
        """The store has the entry's copy now: it is leased there if it is leased nowhere else."""
        self.leases.reorder(entry)
        if self._is_in(entry) and not entry.is_leased and not entry.is_broken:
            self._lease_in_store(entry)

    def _displaced(self, entry: Entry) -> None:
        """The store's copy of an entry makes way. An entry with blocks in the store alone ends."""
        if any(block.tier == "disk" for block in entry.blocks):
            self.end(entry, "best_effort_evicted", "yielded")
        else:
            self._lose_copy(entry, "yielded")

    def _lose_copy(self, entry: Entry, reason: LeaseEnd) -> None:
        """An entry's copy in the store goes. Its content is above, so its lease must be there."""
        if not entry.is_leased or entry.lease_tier == "device":
            return
        if not entry.is_partly_away and self.leases.take(entry, may_end=False):
            self._undepend(entry)
        else:
            self._end_lease(entry, reason)
            entry.why_unleased = "yielded" if reason == "yielded" else "over_budget"

    def _want_copy(self, entry: Entry) -> None:
        """Have the store keep a copy, or note what has changed of the entry."""
        if self._store is not None and not entry.is_lapsed and not entry.is_broken:
            self._store.want(entry)
            self._store.note(entry)

    def _note(self, entry: Entry) -> None:
        """The entry's time or lease has changed."""
        if self._store is not None:
            self._store.note(entry)

    def _depend(self, entry: Entry) -> None:
        self._note(entry)
        entry.depend()

    def _undepend(self, entry: Entry) -> None:
        self._note(entry)
        for block in reversed(entry.blocks):
            if entry in block.dependents:
                block.dependents.remove(entry)
                block.home.requeue(block)
