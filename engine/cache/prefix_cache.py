"""The prefix cache: pool, entries and names as one thing, in the order a request meets them.

`look_up` is called at arrival, `begin` when the request may run, `write` when its response begins.
Sampling, scheduling and clocks are not known here; times are handed in.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from engine.cache.block import Block, Entry, Refresh
from engine.cache.digests import ChainHasher, ChainKind, PromptDigests
from engine.cache.entries import Entries
from engine.cache.host_tier import HostTier
from engine.cache.ids import Digest, TokenId
from engine.cache.lookup import Mark, Segment, asks_for, bill, eligible, longest_hit
from engine.cache.misses import Misses
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.cache.recurrent import RecurrentState, state_position
from engine.cache.store_tier import StoreTier
from engine.cache.table import BlockCopy, BlockTable, Source
from engine.protocol import (
    Breakpoint,
    BreakpointReport,
    ChainHeld,
    HeldName,
    InputUsage,
    MissReason,
    Receipt,
    Tier,
)
from engine.sizing import blocks_for

MAX_SCOPES = 4096
"""The number of scopes whose names a cache remembers, for reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheQuery:
    """One prompt as the cache sees it."""

    scope: str
    # One token for each slot.
    tokens: Sequence[TokenId]
    # The prompt's chain digests. The kind of the chain is in them.
    digests: PromptDigests
    # Each end is rounded down to the granularity.
    segments: Sequence[Segment]
    breakpoints: Sequence[Breakpoint]
    # The shortest prefix first. Their `tokens` count slots.
    names: Sequence[HeldName]
    # A breakpoint is eligible from this many tokens on.
    min_cache_tokens: int
    # When the turn arrived, in seconds of the engine's clock: TTLs count from then.
    arrived_at: float
    # The scope's share of the lease budget, 0 to 1. None: the common share.
    lease_share: float | None = None
    # The segment that a look-up goes back to, over any number of positions. None: the look-up goes
    # back over the window.
    lookback_to: int | None = None
    # The kind of the chain that the prompt's adapter acts on. None: no adapter acts on the prompt.
    adapter: ChainKind | None = None
    # The positions that were cut out of the prompt. Behind the cut, a token's position is its slot
    # plus this. Reported counts are counts of positions.
    cut: int = 0


@dataclass(slots=True)
class Lookup:
    """The result of a look-up."""

    marks: list[Mark]
    # The entry that is read. None: no entry is.
    hit: Entry | None
    # The number of the entry's tokens that are read.
    read: int
    # Why the request read less than it marked.
    miss_reason: MissReason | None
    # The hit's blocks. Each has a reference until `begin` or `let_go`.
    pinned: list[Block] = field(default_factory=list)
    # The blocks of the hit's recurrent state. Each has a reference, too.
    state: list[Block] = field(default_factory=list)
    # The refreshes of the entries that were found. `write` makes them permanent.
    refreshes: list[Refresh] = field(default_factory=list)
    # The number of tokens that were reused from memory. It includes the hit's.
    reused: int = 0
    # The number of the prompt's tokens that another sequence was computing when this request could
    # have run.
    raced: int = 0
    # Why each breakpoint was not read, by its segment.
    missed: dict[int, MissReason] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """The result of a request: its counters, and which names of its prefix are held."""

    usage: InputUsage
    breakpoints: list[BreakpointReport]
    receipt: Receipt
    held: Sequence[ChainHeld]
    miss_reason: MissReason | None
    read_tier: Tier | None = None


class PrefixCache:
    has_exact_ends = False
    """Whether an entry may end inside a block."""

    def __init__(
        self,
        pool: BlockPool,
        entries: Entries,
        hasher: ChainHasher,
        host: HostTier | None = None,
        store: StoreTier | None = None,
        peers: Sequence[StoreTier] = (),
        state_blocks: int = 0,
    ) -> None:
        """`peers` is the content that other engines have in a shared store.

        `state_blocks` is the number of blocks of one recurrent state. It is 0 for a model without
        linear layers. A model with linear layers reads whole entries and reuses nothing else.
        """
        self.state_blocks = state_blocks
        self.has_states = state_blocks > 0
        self.pool = pool
        self.host = host
        self.store = store
        self.stores = [tier for tier in (store, *peers) if tier is not None]
        # The pools of all tiers, the highest tier first.
        self.pools = [pool]
        if host is not None:
            self.pools.append(host.pool)
        self.pools.extend(tier.pool for tier in self.stores)
        self.entries = entries
        # The names of the latest requests' scopes, by the `owner` of their blocks.
        self.scopes: dict[Digest, str] = {}
        self.hasher = hasher

    @property
    def names_at_entries(self) -> bool:
        """Whether a prefix is held only at the end of an entry."""
        return self.has_states

    def digests(
        self, scope: str, tokens: Sequence[TokenId], kind: ChainKind | None = None
    ) -> PromptDigests:
        return PromptDigests(self.hasher, scope, tokens, kind)

    def resident(
        self, digests: PromptDigests, most: int | None = None, *, is_referenced: bool = False
    ) -> int:
        """How many of a prompt's first `most` full blocks are on the device.

        With `is_referenced` only blocks that have a reference are counted. A chain is evicted from
        its tail, so bisection finds its end in O(log n). If a block in the middle is gone, the
        result may be too small or too large.
        """

        def is_gone(digest: Digest) -> bool:
            block = self.pool.peek(digest)
            return block is None or (is_referenced and not block.ref_count)

        if self.state_blocks:
            return 0
        return bisect_left(digests.full, True, hi=most, key=is_gone)

    def touch(self, digests: PromptDigests) -> None:
        """Count the blocks that a prompt begins with as used now: a request for them has come."""
        blocks = (self.pool.peek(digest) for digest in digests.full[: self.resident(digests)])
        self.pool.touch([block for block in blocks if block is not None])

    def new_table(self, query: CacheQuery, *, may_fork: bool = False) -> BlockTable:
        """An empty table. `may_fork`: others will go on from the prompt's last token."""
        root = query.digests.root
        state = None
        last = len(query.tokens) - 1
        self.scopes.pop(root, None)
        self.scopes[root] = query.scope
        if len(self.scopes) > MAX_SCOPES:
            del self.scopes[next(iter(self.scopes))]
        if self.state_blocks:
            marks = eligible(query.segments, query.breakpoints, query.min_cache_tokens)
            plan = {mark.tokens: mark.tokens for mark in marks if mark.tokens <= last}
            if last and (may_fork or any(mark.tokens > last for mark in marks)):
                plan.setdefault(last, last + 1)
            state = RecurrentState(self.pool, root, self.state_blocks, plan)
        return BlockTable(self.pool, self.hasher, root, state, query.digests.kind)

    def look_up(self, query: CacheQuery) -> Lookup:
        """Find and pin the longest entry that the breakpoints may read.

        Refresh the entries on the way.
        """
        now = query.arrived_at
        if self.pool.worths is not None:
            moment = self.pool.worths.moment
            moment.now = max(moment.now, now)
        self.entries.leases.set_share(query.scope, query.lease_share)
        marks = eligible(query.segments, query.breakpoints, query.min_cache_tokens)
        hit = longest_hit(
            query.segments,
            marks,
            lambda tokens: self._find_readable(query, tokens, now),
            query.lookback_to,
        )
        entries = [self.entries.find(query.digests, mark.tokens, now) for mark in marks]
        if hit not in entries:
            entries.append(hit)
        lookup = Lookup(marks, hit, 0, None)
        self.explain(query, lookup)
        lookup.refreshes = [
            self.entries.refresh(entry, now, hold=asks_for(marks, entry.tokens))
            for entry in entries
            if entry is not None
        ]
        if hit is not None:
            # The last token is always computed, because its logits give the first output token.
            position = state_position(hit) if self.state_blocks else hit.tokens
            lookup.read = min(position, len(query.tokens) - 1)
            lookup.pinned = list(hit.blocks[: blocks_for(lookup.read, self.pool.block_size)])
            if self.state_blocks:
                lookup.state = list(hit.blocks[-self.state_blocks :])
            _acquire([*lookup.pinned, *lookup.state])
        return lookup

    def explain(self, query: CacheQuery, lookup: Lookup, read: int = 0) -> None:
        """Note why the breakpoints beyond the hit were not read. Without a hit: beyond `read`."""
        if lookup.hit is not None:
            read = lookup.hit.tokens
        misses = Misses(
            entries=self.entries,
            digests=query.digests,
            segments=query.segments,
            breakpoints=query.breakpoints,
            now=query.arrived_at,
            has_states=self.has_states,
            lookback_to=query.lookback_to,
        )
        lookup.missed = misses.by_segment(lookup.marks, read)
        lookup.miss_reason = misses.of_request(lookup.marks, read, lookup.missed)

    def let_go(self, lookup: Lookup) -> None:
        """Release the blocks of a look-up."""
        _release([*lookup.pinned, *lookup.state])
        lookup.pinned = []
        lookup.state = []

    def give_up(self, lookup: Lookup) -> None:
        """Release the blocks of a look-up that will be repeated. Its refreshes stay."""
        self.let_go(lookup)
        self._confirm(lookup)

    def take_back(self, lookup: Lookup) -> None:
        """Take back the look-up's refreshes, because the response never began."""
        for refresh in lookup.refreshes:
            self.entries.take_back(refresh)
        lookup.refreshes = []

    def begin(
        self,
        query: CacheQuery,
        lookup: Lookup,
        table: BlockTable,
        sources: dict[int, Source] | None = None,
        num_spare: int = 0,
    ) -> list[BlockCopy]:
        """Fill an empty table with the reused blocks, and allocate the prompt's other blocks.

        Full blocks behind the entry are reused if they are in memory (automatic reuse), even behind
        a hole. With `sources` only these blocks are reused. `num_spare` blocks must stay free.
        Raises NoFreeBlocks if there are too few. In that case only the order of reuse has changed.
        """
        if sources is None:
            sources = self.sources(query.digests, lookup)
        # The pinned blocks and their references are passed to the table.
        kept = {
            i for i, block in enumerate(lookup.pinned) if i in sources and sources[i].block is block
        }
        unused = [block for i, block in enumerate(lookup.pinned) if i not in kept]
        acquired = [source.block for i, source in sources.items() if i not in kept]
        _acquire(acquired)
        _release(unused)
        try:
            copies = table.fill(
                sources, query.digests.full, len(query.tokens), lookup.state, num_spare
            )
        except NoFreeBlocks:
            _acquire(unused)
            _release(acquired)
            raise
        lookup.pinned = []
        lookup.state = []
        lookup.reused = sum(source.num_tokens for source in sources.values()) + query.cut
        return copies

    def miss(self, query: CacheQuery, lookup: Lookup | None, table: BlockTable) -> None:
        """The store lost the first block that this table waits for: it is computed instead.

        An entry is read whole or not at all. If the hit needed this block, a shorter entry that the
        table has whole takes its place. `lookup` is None once the response has begun.
        """
        start, num_tokens = table.miss()
        if lookup is None:
            return
        lookup.reused -= num_tokens
        if lookup.read <= start:
            return
        now = query.arrived_at
        shorter = (segment for segment in query.segments if (segment.end or 0) <= start)
        whole = {segment.end for segment in shorter}
        hit = longest_hit(
            query.segments,
            lookup.marks,
            lambda end: self._find_readable(query, end, now) if end in whole else None,
            query.lookback_to,
        )
        lookup.hit = hit
        lookup.read = hit.tokens if hit is not None else 0
        self.explain(query, lookup)
        if hit is not None:
            hold = asks_for(lookup.marks, hit.tokens)
            lookup.refreshes.append(self.entries.refresh(hit, now, hold=hold))

    def resume(
        self,
        query: CacheQuery,
        tokens: Sequence[TokenId],
        table: BlockTable,
        sources: dict[int, Source] | None = None,
        num_spare: int = 0,
    ) -> list[BlockCopy]:
        """Fill the empty table of a preempted sequence again. Raises NoFreeBlocks like `begin`."""
        digests = self.digests(query.scope, tokens, table.kind)
        if sources is None:
            sources = self.sources(digests)
        acquired = [source.block for source in sources.values()]
        _acquire(acquired)
        try:
            return table.fill(sources, digests.full, len(tokens), num_spare=num_spare)
        except NoFreeBlocks:
            _release(acquired)
            raise

    def write(
        self, query: CacheQuery, lookup: Lookup, table: BlockTable, now: float
    ) -> CacheResult:
        """Write the breakpoints' entries and tie the names to the blocks.

        The counters are final.
        """
        self._confirm(lookup)
        if lookup.hit is not None:
            lookup.hit.reads += 1
            self.entries.bring_back(lookup.hit, self._blocks_of(lookup.hit, table))
        missed = self._missed(query, lookup, now)
        last = lookup.marks[-1].segment if lookup.marks else None
        is_race = last is not None and missed.get(last) == "in_progress_race"
        reason = "in_progress_race" if is_race else lookup.miss_reason
        reports = {mark.segment: self._write_mark(query, mark, table, now) for mark in lookup.marks}
        receipt, held = self._anchor_names(query, table, now)
        if table.state is not None:
            table.state.let_go()
        # Usage counts positions: the cut is added to each number of slots.
        cut = query.cut
        read_positions = lookup.read + cut if lookup.read else 0
        mark_positions = [replace(mark, tokens=mark.tokens + cut) for mark in lookup.marks]
        return CacheResult(
            usage=bill(mark_positions, len(query.tokens) + cut, read_positions, lookup.reused),
            breakpoints=[
                msgspec.structs.replace(
                    reports.get(point.segment) or self._not_written(query, point),
                    missed=missed.get(point.segment),
                )
                for point in sorted(query.breakpoints, key=lambda point: point.segment)
            ],
            receipt=receipt,
            held=[] if held is None else [held],
            miss_reason=reason,
            read_tier=table.origin(lookup.read) if lookup.read else None,
        )

    def sources(self, digests: PromptDigests, lookup: Lookup | None = None) -> dict[int, Source]:
        """The blocks in memory that a prompt can reuse, by logical index, ascending.

        These are the pinned blocks and all full blocks. The last token is left out, since it is
        always computed. A full block in memory takes the place of a pinned block that is only
        partly filled.
        """
        size = self.pool.block_size
        pinned_tokens = lookup.read if lookup is not None and lookup.pinned else 0
        num_pinned, tail = divmod(pinned_tokens, size)
        sources: dict[int, Source] = {}
        num_full = (digests.num_tokens - 1) // size
        if tail:
            num_indices = max(num_full, num_pinned + 1)
        else:
            num_indices = max(num_full, num_pinned)
        for index in range(num_indices):
            block: Block | None = None
            if lookup is not None and index < num_pinned:
                block = lookup.pinned[index]
                if block.is_away:
                    block = self._find_full(digests, index) or block
            elif (index + 1) * size < digests.num_tokens:
                block = self._find_full(digests, index)
            if block is not None:
                sources[index] = Source(block, size)
            elif lookup is not None and tail and index == num_pinned:
                sources[index] = Source(lookup.pinned[index], tail)
        return sources

    # Inside.

    def _confirm(self, lookup: Lookup) -> None:
        for refresh in lookup.refreshes:
            self.entries.confirm(refresh)
        lookup.refreshes = []

    def _missed(self, query: CacheQuery, lookup: Lookup, now: float) -> dict[int, MissReason]:
        """The reasons of the breakpoints that were not read, as they are known at the write."""
        missed = dict(lookup.missed)
        for mark in lookup.marks:
            if self._was_overtaken(query, lookup, mark, now):
                missed[mark.segment] = "in_progress_race"
        return missed

    def _was_overtaken(self, query: CacheQuery, lookup: Lookup, mark: Mark, now: float) -> bool:
        """Whether another request wrote or computed this mark's prefix after the look-up."""
        tokens = mark.tokens
        if lookup.hit is not None and lookup.hit.tokens >= tokens:
            return False
        if lookup.raced and lookup.raced >= tokens - tokens % self.pool.block_size:
            return True
        return self._find_readable(query, tokens, now) is not None

    def _find_readable(self, query: CacheQuery, tokens: int, now: float) -> Entry | None:
        """The entry at this offset, if this prompt can continue from it."""
        entry = self.entries.find(query.digests, tokens, now)
        if entry is None or not self.state_blocks:
            return entry
        return entry if state_position(entry) < len(query.tokens) else None

    def _find_full(self, digests: PromptDigests, index: int) -> Block | None:
        """The block with this content, in the highest tier that has it."""
        if self.state_blocks:
            return None
        digest = digests.full[index]
        packed = digests.block_tokens(index)
        for pool in self.pools:
            block = pool.find(digest, packed)
            if block is not None:
                return block
        return None

    def _blocks_of(self, entry: Entry, table: BlockTable) -> list[Block]:
        """The blocks of the table that have an entry's content.

        With a recurrent state the table may not have kept the state of the entry. Then these are
        the entry's own blocks.
        """
        blocks = table.blocks[: blocks_for(entry.tokens, self.pool.block_size)]
        if table.state is None:
            return blocks
        state = table.state.kept.get(state_position(entry))
        return entry.blocks if state is None else [*blocks, *state]

    def _blocks_at(
        self, query: CacheQuery, mark: Mark, table: BlockTable, now: float
    ) -> list[Block] | None:
        """The blocks for an entry at a mark.

        None if the recurrent state at the mark is not in memory, because the prompt continued from
        a later state.
        """
        blocks = table.blocks[: blocks_for(mark.tokens, self.pool.block_size)]
        if table.state is None:
            return blocks
        entry = self.entries.find(query.digests, mark.tokens, now)
        if entry is not None:
            return self._blocks_of(entry, table)
        state = table.state.of_entry(mark.tokens)
        return None if state is None else [*blocks, *state]

    def _write_mark(
        self, query: CacheQuery, mark: Mark, table: BlockTable, now: float
    ) -> BreakpointReport:
        blocks = self._blocks_at(query, mark, table, now)
        if blocks is None:
            return BreakpointReport(
                segment=mark.segment, state="none", tokens=mark.tokens, reason="no_boundary"
            )
        entry = self.entries.write(
            query.scope, query.digests, mark, blocks, arrived_at=query.arrived_at, now=now
        )
        if entry is None:
            return BreakpointReport(
                segment=mark.segment,
                state="none",
                tokens=mark.tokens + query.cut,
                reason="ttl_expired",
            )
        for name in query.names:
            if name.tokens == mark.tokens:
                # Equal tokens can be marked under several names. The ledger has the turn's last.
                entry.name = name.digest
        return BreakpointReport(
            segment=mark.segment,
            state=entry.state,
            tokens=mark.tokens + query.cut,
            ttl=entry.ttl,
            expires_in_seconds=entry.expires_at - now if entry.is_leased else None,
            reason=entry.why_unleased,
        )

    def _not_written(self, query: CacheQuery, point: Breakpoint) -> BreakpointReport:
        end = query.segments[point.segment].end
        if end is None:
            return BreakpointReport(segment=point.segment, state="none", reason="no_boundary")
        return BreakpointReport(
            segment=point.segment,
            state="none",
            tokens=end,
            reason="below_minimum",
            min_cache_tokens=query.min_cache_tokens,
        )

    def _anchor_names(
        self, query: CacheQuery, table: BlockTable, now: float
    ) -> tuple[Receipt, ChainHeld | None]:
        """Anchor each name at the last full block of its prefix.

        If names stand only at entries, a name is anchored at the last block of its entry: nothing
        else of a prefix can be read.
        """
        size = self.pool.block_size
        is_news = False
        num_held = 0
        num_leased = 0
        anchored: list[HeldName] = []
        for name in query.names:
            if name.tokens > table.num_tokens:
                break
            if self.names_at_entries:
                is_exact = table.state is not None or self.has_exact_ends
                end = name.tokens if is_exact else name.tokens // size * size
                known = self.entries.find(query.digests, end, now)
                if known is None:
                    continue
                self.pool.anchor(name.digest, known.blocks[-1], end)
                is_news = True
                # The receipt counts a prompt's first names, up to a gap. The event has all names.
                if name is query.names[num_held]:
                    num_held += 1
                if known.is_leased and num_leased == len(anchored):
                    num_leased += 1
                anchored.append(HeldName(name.digest, end))
                continue
            num_held += 1
            full = name.tokens // size
            if full:
                block = self.pool.canonical(query.digests.full[full - 1], table.blocks[full - 1])
                end = full * size + query.cut
                is_news |= self.pool.anchor(name.digest, block, end)
                anchored.append(HeldName(name.digest, end))
                if block.is_promised:
                    num_leased = len(anchored)
        lease_seconds = self._longest_lease(query, now) if num_leased else None
        num_unanchored = 0 if self.names_at_entries else num_held - len(anchored)
        receipt = Receipt(
            name_tokens=[name.tokens for name in query.names],
            num_held=num_held,
            num_leased=min(num_leased + num_unanchored, num_held) if num_leased else 0,
            lease_seconds=lease_seconds,
        )
        if not anchored or not (is_news or num_leased):
            return receipt, None
        chain = ChainHeld(seq=0, names=anchored, num_leased=num_leased, lease_seconds=lease_seconds)
        return receipt, chain

    def _longest_lease(self, query: CacheQuery, now: float) -> float | None:
        """The seconds that are left of the lease on the longest leased prefix of the prompt."""
        ends = [segment.end for segment in query.segments if segment.end]
        for end in reversed(ends):
            entry = self.entries.get(query.digests.at(end))
            if entry is not None and entry.is_leased:
                return entry.expires_at - now
        return None


def _acquire(blocks: Iterable[Block]) -> None:
    for block in blocks:
        block.home.acquire(block)


def _release(blocks: Sequence[Block]) -> None:
    """Last first, so that a chain is reused from its tail."""
    for block in reversed(blocks):
        block.home.release(block)
