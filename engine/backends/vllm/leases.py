"""Entries held on vLLM's own KV blocks: leases, best-effort entries, protection of what is read.

A lease is one more reference (`BlockPool.touch`) on every block that a later hit at its offset
needs, in all KV cache groups. So vLLM's LRU can't reuse these blocks. Leases have a budget of
unique blocks, and each scope has a share of it. Which lease makes way is decided by the functions
and keys of `engine.cache.leases`. Its docstring says where the first rule is weaker here.

An entry without a lease holds nothing. vLLM tells when the first of its blocks is reused
(`BlockPool.unpin_blocks`).

Times only put entries in order. The server releases entries that have expired. Nothing here is
thread-safe: all calls come from the scheduler's thread.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from engine.backends.vllm.directive import Loss, LossReason, Want, Watch
from engine.backends.vllm.internals import CacheManager, VllmBlock, keeps_states
from engine.cache.digests import TOKEN_BYTES
from engine.cache.leases import Claim, ScopeLeases, ending_key, next_to_sacrifice, next_to_yield
from engine.cache.order import Key, Order
from engine.protocol import EntryState
from engine.protocol.reports import BlockStats
from engine.store.journal import End, Put, Record

if TYPE_CHECKING:
    from engine.backends.vllm.tiers import LeaseTier

Blocks = tuple[VllmBlock, ...]

MAX_UNTOLD_LOSSES = 65_536
"""Losses that the server has not asked for yet. Beyond that the oldest are forgotten."""


@dataclass(eq=False, slots=True)
class VllmEntry:
    """An entry, or a place that the server watches."""

    key: str
    scope: str
    tokens: int
    expires_at: float
    # Without blocks the copy below is all that is left of the entry.
    blocks: Blocks
    # The blocks' own hashes when the entry was made. A block with another hash has other content.
    hashes: tuple[bytes | None, ...]
    # It has a lease on the device.
    is_leased: bool = False
    # The requests that want it and have not ended.
    claims: set[str] = field(default_factory=set)
    # A request that wants it got a token, or an earlier process had it.
    is_confirmed: bool = False
    # It is no entry, but a place that a name stands on. Only its loss matters.
    is_watch: bool = False
    # The keys of a whole copy in the tier below.
    below: tuple[bytes, ...] = ()
    # The copy below holds its lease.
    is_lowered: bool = False

    @property
    def tier_keys(self) -> tuple[bytes, ...]:
        """The keys by which the tier below has its blocks, or would have them."""
        return self.below or tuple(key for key in self.hashes if key is not None)

    @property
    def is_intact(self) -> bool:
        """Whether all its blocks still have their content."""
        return all(
            block.block_hash == digest
            for block, digest in zip(self.blocks, self.hashes, strict=True)
        )


class LeaseManager:
    """The connector's book: entries, leases and protections on vLLM's blocks."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        lease_share: float,
        scope_lease_share: float,
        on_reuse: Callable[[VllmBlock], None],
    ) -> None:
        """`lease_share` is the part of the pool's blocks that leases may hold, 0 to 1.

        `scope_lease_share` is the part of those blocks that a scope may claim from scopes that have
        more. vLLM calls `on_reuse` when it reuses a block that an entry depends on. It must call
        `note_reuse`.
        """
        self._cache = cache
        self._on_reuse = on_reuse
        self._pool = cache.block_pool
        managers = cache.coordinator.single_type_managers
        self._has_states = any(keeps_states(manager.kv_cache_spec) for manager in managers)
        self.block_tokens = cache.coordinator.scheduler_block_size
        self.total_blocks = self._pool.num_gpu_blocks - 1  # one is vLLM's null block
        self.max_leased_blocks = int(self.total_blocks * lease_share)
        self.scope_leased_blocks = int(self.max_leased_blocks * scope_lease_share)
        self._shares: dict[str, int] = {}
        self._entries: dict[str, VllmEntry] = {}
        self._leases: dict[str, dict[VllmEntry, None]] = {}
        self._by_end: dict[str, Order[VllmEntry]] = {}
        self._lease_refs: Counter[int] = Counter()
        self._scope_refs: dict[str, Counter[int]] = {}
        self._protected: Counter[int] = Counter()
        self._dependents: dict[int, set[VllmEntry]] = {}
        self._losses: deque[Loss] = deque(maxlen=MAX_UNTOLD_LOSSES)
        self._lost_watches: dict[str, None] = {}
        self.evicted_blocks = 0
        self.num_lowered = 0
        self.below: LeaseTier | None = None  # under vLLM's blocks, by their hashes

    # What requests do.

    def align(self, tokens: int) -> int:
        """Floor an offset to one at which a hit can end."""
        return max(0, tokens - tokens % self.block_tokens)

    def set_share(self, scope: str, blocks: int | None) -> None:
        """Set how many blocks a scope may claim from scopes that hold more. None: the default."""
        if blocks is None:
            self._shares.pop(scope, None)
        else:
            self._shares[scope] = blocks

    def protect(self, key: str) -> Blocks | None:
        """Reference an entry's blocks for a request that will read them. None if it is gone."""
        entry = self._find(key)
        if entry is None:
            return None
        self._pool.touch(entry.blocks)
        self._protected.update(block.block_id for block in entry.blocks)
        return entry.blocks

    def unprotect(self, blocks: Blocks) -> None:
        """Give back what `protect` gave."""
        _subtract(self._protected, blocks)
        self._pool.free_blocks(reversed(blocks))

    def expect(
        self, wants: Sequence[Want], block_hashes: Sequence[bytes], unix_offset: float
    ) -> None:
        """Have the tier below keep the blocks of these entries. `wants` are ordered by length.

        The tier hears of the blocks before they are computed, because vLLM offloads a prompt step
        by step. Entries that nobody asked to hold are not kept there: leases need the room.
        """
        if self.below is None:
            return
        wants = [want for want in wants if want.is_asked_for]
        ends = list(accumulate((want.expires_at for want in reversed(wants)), max))
        for group, manager in enumerate(self._cache.coordinator.single_type_managers):
            step = manager.block_size // self._pool.hash_block_size
            begin = 0
            hashes = block_hashes[step - 1 :: step]
            suffix = group.to_bytes(4, "big")
            for want, end in zip(wants, reversed(ends), strict=True):
                stop = self.align(want.tokens) // manager.block_size
                keys = [digest + suffix for digest in hashes[begin:stop]]
                self.below.want(keys, end + unix_offset)
                begin = max(begin, stop)

    def add(
        self, want: Want, scope: str, block_hashes: Sequence[bytes], claim: str
    ) -> VllmEntry | None:
        """Make an entry of a prefix whose blocks are hashed. None if they are not all there.

        A live entry of that key stays, and is leased if it can be. `claim` is the id of the request
        that wants it: see `end_claim`.
        """
        entry = self._find(want.key)
        new_entry = None
        if entry is None or not entry.blocks:
            new_entry = self._make(want, scope, block_hashes)
        if entry is None:
            entry = new_entry
        elif new_entry is not None:  # it was only in the tier below, and is here again
            entry.blocks = new_entry.blocks
            entry.hashes = new_entry.hashes
            self._entries[want.key] = entry
        if entry is None:
            return None
        entry.expires_at = max(entry.expires_at, want.expires_at)
        if entry.blocks and not entry.is_leased:
            is_leased = want.is_asked_for and self._try_lease(entry)
            if not is_leased and new_entry is not None:
                self._pool.touch(entry.blocks)
                self._depend(entry)
        entry.claims.add(claim)
        return entry

    def watch(self, watches: Sequence[Watch], block_hashes: Sequence[bytes]) -> None:
        """Have the server told when the blocks that end these places are reused.

        `watches` are ordered by length. Nothing is held. If an equal block is left, it is not
        looked for: names are hints, and the next request with the same name watches again.
        """
        new_watches = [watch for watch in watches if self._find(watch.key) is None]
        ends = self._find_ends([watch.tokens for watch in new_watches], block_hashes)
        for watch in new_watches:
            blocks = ends.get(watch.tokens)
            if blocks is None:
                self._lost_watches[watch.key] = None
                continue
            self._lost_watches.pop(watch.key, None)
            hashes = tuple(block.block_hash for block in blocks)
            entry = VllmEntry(watch.key, "", watch.tokens, 0.0, blocks, hashes, is_watch=True)
            self._entries[watch.key] = entry
            # A reference is taken and given back, because vLLM then tells of the block's reuse.
            self._pool.touch(blocks)
            self._depend(entry)

    def end_claim(self, entry: VllmEntry, claim: str, *, is_started: bool) -> None:
        """Note that a request that claimed the entry has ended.

        The entry ends if no request claims it any more and none of them got a token.
        """
        entry.claims.discard(claim)
        entry.is_confirmed |= is_started
        if not entry.is_confirmed and not entry.claims and self._entries.get(entry.key) is entry:
            self._remove(entry)

    # What the server does.

    def release(self, keys: Sequence[str]) -> int:
        """End entries. The result is how many there were."""
        entries = [self._entries[key] for key in keys if key in self._entries]
        for entry in entries:
            self._remove(entry)
        if self.below is not None:
            self.below.record([End(key=key) for key in keys])
        return len(entries)

    def record(self, records: Iterable[Record]) -> None:
        """Have the tier below write records to its journal, with the keys of entries' blocks.

        A record of an entry that is not known, or has no keys, is left out.
        """
        known_records = list[Record]()
        for record in records:
            if isinstance(record, Put):
                entry = self._entries.get(record.key)
                keys = None if entry is None else entry.tier_keys
                if not keys:
                    continue
                record = msgspec.structs.replace(record, files=list(keys))
            known_records.append(record)
        if self.below is not None:
            self.below.record(known_records)

    def restore(self) -> list[Put]:
        """Hold the entries that the tier below has from an earlier process."""
        puts = [] if self.below is None else self.below.take_restored()
        for put in puts:
            tokens = len(put.packed) // TOKEN_BYTES
            entry = VllmEntry(put.key, put.scope, tokens, 0.0, (), (), below=tuple(put.files))
            entry.is_confirmed = True
            entry.is_lowered = put.times.is_leased
            self._entries[put.key] = entry
        return puts

    def unlease(self, keys: Iterable[str]) -> None:
        """End leases that have expired by the server's clock. Their entries become best-effort."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.is_leased:
                self._end_lease(entry)
                self._depend(entry)
            elif entry is not None:
                entry.is_lowered = False

    def state(self, key: str) -> EntryState:
        entry = self._find(key)
        if entry is None:
            return "none"
        return "leased" if entry.is_leased or entry.is_lowered else "best_effort"

    def take_losses(self) -> list[Loss]:
        """What was lost since the last call, in order. Beyond 65,536 the oldest are forgotten.

        Places that names stand on come last. Those that are watched anew are not among them.
        """
        # The tier below may have lost copies. Their entries end, or lose their lease there.
        gone = set() if self.below is None else self.below.take_gone()
        for entry in list(self._entries.values()) if gone else ():
            if gone.isdisjoint(entry.below):
                continue
            entry.below = ()
            if not entry.blocks:
                self._remove(entry)
                self._note_loss(entry, "evicted")
            elif entry.is_lowered:
                entry.is_lowered = False
                self._note_loss(entry, "yielded")
        losses = [*self._losses, *(Loss(key=key, reason="evicted") for key in self._lost_watches)]
        self._lost_watches = {}
        self._losses.clear()
        return losses

    def block_states(self, our_ids: Collection[int]) -> BlockStats:
        """How many blocks are in each state, and how many have more than one reference.

        `our_ids` are the ids of blocks that tracked requests use. Other active blocks are foreign.
        A walk over all blocks takes 10 ms for 100,000.
        """
        count: Counter[str] = Counter()
        for block in self._pool.blocks:
            if block.is_null:
                continue
            count["shared"] += block.ref_cnt > 1
            if block.ref_cnt:
                is_lease = block.ref_cnt == self._lease_refs.get(block.block_id, 0)
                count["leased" if is_lease else "active"] += 1
                is_known = block.block_id in our_ids or block.block_id in self._protected
                count["foreign"] += not is_lease and not is_known
            elif block.block_hash is None:
                count["free"] += 1
            else:
                entries = self._dependents.get(block.block_id, ())
                is_entry = any(not entry.is_watch for entry in entries)
                count["best_effort" if is_entry else "cached"] += 1
        names = ("free", "active", "leased", "best_effort", "cached", "shared", "foreign")
        return BlockStats(total=self.total_blocks, **{name: count[name] for name in names})

    @property
    def num_leased_blocks(self) -> int:
        return len(self._lease_refs)

    # What vLLM does.

    def sacrifice(self, hit: Collection[int] = ()) -> bool:
        """End the lease that would expire first, because nothing else can run.

        Its entry becomes best-effort. `hit` are the ids of the blocks that the waiting request
        reads. A lease that has no other blocks is passed over, because its end would free nothing.
        False if there is no lease to end.
        """
        entry = next_to_sacrifice(held.first for held in self._held(hit))
        if entry is not None:
            self._lose_lease(entry, "sacrificed")
        return entry is not None

    def is_sole_user(self) -> bool:
        """Whether every block in use has our references only."""
        counts = self._lease_refs + self._protected
        num_used = self.total_blocks - self._pool.get_num_free_blocks()
        return num_used == len(counts) and all(
            self._pool.blocks[block_id].ref_cnt == count for block_id, count in counts.items()
        )

    def reset(self) -> None:
        """End every entry, because the cache is emptied. Call `unprotect` for all blocks before."""
        for entry in list(self._entries.values()):
            self._remove(entry)
            self._note_loss(entry, "reset")

    def abandon(self) -> None:
        """Give every reference back, whatever state the books are in. They are of no use after."""
        counts = self._lease_refs + self._protected
        self._lease_refs.clear()
        self._protected.clear()
        for block_id, count in counts.items():
            self._pool.free_blocks([self._pool.blocks[block_id]] * count)

    def count_eviction(self) -> None:
        self.evicted_blocks += 1

    def note_reuse(self, block: VllmBlock) -> None:
        """Note that a block gets other content. Entries without a lease that stood on it end."""
        for entry in list(self._dependents.get(block.block_id, ())):
            self._lose_content(entry)

    # Inside.

    def _find(self, key: str) -> VllmEntry | None:
        """The entry, if its content is still there. If vLLM has evicted it, the entry ends, or is
        below alone from now on."""
        entry = self._entries.get(key)
        if entry is not None and not entry.is_intact:
            self._lose_content(entry)
        return self._entries.get(key)

    def _make(self, want: Want, scope: str, block_hashes: Sequence[bytes]) -> VllmEntry | None:
        tokens = self.align(want.tokens)
        if tokens == 0:
            return None
        # Of every group exactly the blocks that a later hit at this offset takes.
        num_hashes = tokens // self._pool.hash_block_size
        groups, hit, _ = self._cache.coordinator.find_longest_cache_hit(
            list(block_hashes[:num_hashes]), tokens
        )
        if hit < tokens:
            return None
        blocks = tuple(block for group in groups for block in group if not block.is_null)
        hashes = tuple(block.block_hash for block in blocks)
        entry = VllmEntry(want.key, scope, tokens, want.expires_at, blocks, hashes)
        self._entries[entry.key] = entry
        return entry

    def _find_ends(self, offsets: list[int], block_hashes: Sequence[bytes]) -> dict[int, Blocks]:
        """The blocks at those `offsets` at which a hit can end. The offsets are in rising order.

        In a hybrid a hit ends where a state is kept. Each look-up finds the nearest kept state at
        or in front of the last offset.
        """
        ends: dict[int, Blocks] = {}
        while offsets:
            tokens = offsets[-1]
            groups, hit, _ = self._cache.coordinator.find_longest_cache_hit(
                list(block_hashes[: tokens // self._pool.hash_block_size]), tokens
            )
            if self._has_states:
                if hit == tokens:
                    ends[hit] = tuple(group[-1] for group in groups if group)
                offsets = [offset for offset in offsets[:-1] if offset <= hit]
                continue
            size = self._cache.coordinator.single_type_managers[0].block_size
            for offset in offsets:
                # The block that ends there. If it is missing, the nearest one in front of it.
                blocks = groups[0][: offset // size] if offset <= hit else ()
                block = next((block for block in reversed(blocks) if not block.is_null), None)
                if block is not None:
                    ends[offset] = (block,)
            break
        return ends

    def _try_lease(self, entry: VllmEntry) -> bool:
        while True:
            # Those that make way may share blocks with the new one, so it may need more now.
            num_new = sum(block.block_id not in self._lease_refs for block in entry.blocks)
            excess = len(self._lease_refs) + num_new - self.max_leased_blocks
            if excess <= 0:
                break
            num_claimed = len(self._scope_refs.get(entry.scope, ())) + num_new
            # The next lease to end of this scope, and of each scope above its share. Those with a
            # copy below come first, because they lose nothing.
            firsts = [
                scope_leases.first
                for scope, scope_leases in zip(self._leases, self._held(), strict=True)
                if scope_leases.first is not None
                and (scope == entry.scope or scope_leases.num_blocks > scope_leases.share)
                and self._has_copy(scope_leases.first)
            ]
            loser = min(firsts, key=ending_key, default=None)
            if loser is None:
                claim = Claim(num_claimed, self._share(entry.scope), excess)
                loser = next_to_yield(self._held(), claim)
            if loser is None:
                return False
            self._lose_lease(loser, "yielded")
        self._undepend(entry)
        self._pool.touch(entry.blocks)
        ids = [block.block_id for block in entry.blocks]
        self._lease_refs.update(ids)
        self._scope_refs.setdefault(entry.scope, Counter()).update(ids)
        self._leases.setdefault(entry.scope, {})[entry] = None
        entry.is_leased = True
        entry.is_lowered = False
        if entry.scope not in self._by_end:
            self._by_end[entry.scope] = Order(_ending_key)
        self._by_end[entry.scope].push(entry)
        return True

    def _held(self, hit: Collection[int] = ()) -> Iterator[ScopeLeases[VllmEntry]]:
        """Each scope's leases. No `first` has only blocks of `hit`."""
        for scope, entries in self._leases.items():
            first = self._by_end[scope].first()
            if hit:
                others = (
                    entry
                    for entry in entries
                    if any(block.block_id not in hit for block in entry.blocks)
                )
                first = min(others, key=ending_key, default=None)
            yield ScopeLeases(len(self._scope_refs[scope]), self._share(scope), first)

    def _share(self, scope: str) -> int:
        return self._shares.get(scope, self.scope_leased_blocks)

    def _lose_lease(self, entry: VllmEntry, reason: LossReason) -> None:
        self._end_lease(entry)
        self._depend(entry)
        if self._has_copy(entry):
            entry.is_lowered = True
            self.num_lowered += 1
        else:
            self._note_loss(entry, reason)

    def _lose_content(self, entry: VllmEntry) -> None:
        """Note that vLLM has reused a block of an entry. The entry ends, or is below alone now."""
        if not entry.is_watch and not entry.is_leased and self._has_copy(entry):
            self._undepend(entry)
            entry.blocks = ()
            entry.hashes = ()
        else:
            self._remove(entry)
            self._note_loss(entry, "evicted")

    def _has_copy(self, entry: VllmEntry) -> bool:
        keys = entry.tier_keys
        if self.below is not None and not entry.below and keys and self.below.keeps(keys):
            entry.below = keys
        return bool(entry.below)

    def _end_lease(self, entry: VllmEntry) -> None:
        """End a lease in the books only. The caller gives the references back."""
        entry.is_leased = False
        _subtract(self._lease_refs, entry.blocks)
        _subtract(self._scope_refs[entry.scope], entry.blocks)
        del self._leases[entry.scope][entry]
        if not self._leases[entry.scope]:
            del self._leases[entry.scope], self._scope_refs[entry.scope], self._by_end[entry.scope]

    def _depend(self, entry: VllmEntry) -> None:
        """Give one reference on each block back, and hear of it when a block is reused."""
        for block in entry.blocks:
            self._dependents.setdefault(block.block_id, set()).add(entry)
        # From the tail, so that LRU takes a chain from its end.
        self._pool.unpin_blocks(reversed(entry.blocks), self._on_reuse)

    def _undepend(self, entry: VllmEntry) -> None:
        for block in entry.blocks:
            dependents = self._dependents.get(block.block_id)
            if dependents is not None:
                dependents.discard(entry)
                if not dependents:
                    del self._dependents[block.block_id]

    def _note_loss(self, entry: VllmEntry, reason: LossReason) -> None:
        if entry.is_watch:
            self._lost_watches[entry.key] = None
            return
        self._losses.append(Loss(key=entry.key, reason=reason))

    def _remove(self, entry: VllmEntry) -> None:
        del self._entries[entry.key]
        if entry.is_leased:
            self._end_lease(entry)
            self._pool.free_blocks(reversed(entry.blocks))
        else:
            self._undepend(entry)


def _ending_key(entry: VllmEntry) -> Key | None:
    """The key of an entry in the order of its scope's leases. None without a lease."""
    return ending_key(entry) if entry.is_leased else None


def _subtract(counts: Counter[int], blocks: Blocks) -> None:
    for block in blocks:
        counts[block.block_id] -= 1
        if not counts[block.block_id]:
            del counts[block.block_id]
