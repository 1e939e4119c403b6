"""A small world around the prefix cache: a fake KV memory and three oracles.

The tests play the runner: they write token ids to the slots the tables name and make the copies.
What a block *really* holds is then known independently of what the pool believes. A fourth watches
the pool's allocations (`WatchedPool`).

- content oracle: what a table, a hold or a lease points at holds the tokens it should hold;
- lease oracle: an entry that was promised stays in memory, unchanged, until its promise ends;
- digest oracle: one digest never stands for two prefixes, or for two scopes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.cache.block import Block, Entry
from engine.cache.digests import ChainHasher, ChainKind
from engine.cache.entries import Entries
from engine.cache.host_tier import HostTier
from engine.cache.ids import NOBODY, BlockId, Digest
from engine.cache.lookup import Segment
from engine.cache.pool import BlockPool, NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, CacheResult, PrefixCache
from engine.cache.store_tier import StoreTier
from engine.cache.table import BlockCopy
from engine.cache.worth import Worths
from engine.protocol import TTLS, Breakpoint, Ttl
from tests.engine.cache.checks import check
from tests.engine.cache.disk import FakeDisk, bring_from_disk
from tests.engine.cache.lives import (
    Expected,
    Life,
    Prefix,
    kept_of,
    leased_blocks,
    note_new_leases,
    note_yielded,
)


class WatchedPool(BlockPool):
    """Raises AssertionError from `allocate` where a block was taken out of turn.

    Counted from the blocks alone: whose a block is was said when it was allocated, and it is
    somebody's while it is referenced or has content.
    """

    def __init__(self, num_blocks: int, block_size: int, worths: Worths | None = None) -> None:
        super().__init__(num_blocks, block_size, worths=worths)
        self.owners = {block.block_id: NOBODY for block in self.blocks}

    def allocate(self, index: int = 0, owner: Digest = NOBODY) -> Block:
        num_by_owner: Counter[Digest] = Counter()
        ranks: dict[BlockId, tuple[bool, float, int, int]] = {}
        num_empty = 0
        followed = {block.parent for block in self.blocks} - {None}
        for block in self.blocks:
            if block.ref_count or block.has_content:
                num_by_owner[self.owners[block.block_id]] += 1
            else:
                num_empty += 1
            if block.has_content and not block.ref_count:
                worth = self.worths.at(block) if self.worths is not None else 0.0
                is_inner = self.worths is not None and block.digest in followed
                ranks[block.block_id] = (is_inner, worth, block.last_use, -block.index)
        reclaimable = set(ranks)
        givers = {self.owners[block_id] for block_id in reclaimable}
        before = {block_id: self.owners[block_id] for block_id in reclaimable}
        block = super().allocate(index, owner)
        self.owners[block.block_id] = owner
        if num_empty:
            assert block.block_id not in reclaimable, "content was lost while blocks were empty"
            return block
        loser = before[block.block_id]
        same = (ranks[block_id] for block_id, giver in before.items() if giver == loser)
        assert ranks[block.block_id] == min(same), "not what makes way first"
        if loser == owner:
            assert all(num_by_owner[giver] <= num_by_owner[owner] + 1 for giver in givers), (
                "spared who holds more"
            )
        else:
            assert num_by_owner[loser] == max(num_by_owner[giver] for giver in givers), (
                "not of who holds most"
            )
            assert owner not in givers or num_by_owner[loser] > num_by_owner[owner] + 1, (
                "took from who holds less"
            )
            if len(givers) == len(num_by_owner | {owner: 1}):
                assert num_by_owner[loser] * len(num_by_owner) > len(self.blocks), (
                    "took of an equal part"
                )
        return block

    @contextmanager
    def only(self, block: Block) -> Iterator[None]:
        """Of what could be allocated, only this block can be meanwhile."""
        others = [other for other in self.blocks if other.ref_count == 0 and other is not block]
        for other in others:
            self.acquire(other)
        yield
        self.release_chain(others)


@dataclass
class World:
    num_blocks: int = 10
    block_size: int = 4
    lease_share: float = 0.5
    scope_lease_share: float = 0.5
    grace_seconds: float = 0.0
    host_blocks: int = 0
    store_blocks: int = 0
    max_copies: int = 100
    marks_hold: bool = True
    # The order of reuse is learned; else it is by recency alone.
    learns: bool = False
    lease_shares: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    lives: list[Life] = field(default_factory=list)
    expected: dict[Prefix, Expected] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hasher = ChainHasher(b"k" * 32, self.block_size)
        self.meaning: dict[Digest, Prefix] = {}
        self.key_of: dict[Prefix, Digest] = {}
        self.used_shares: dict[str, float] = {}
        self.disk = FakeDisk()
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """A new process: nothing is in memory."""
        worths = Worths() if self.learns else None
        self.pool = WatchedPool(self.num_blocks, self.block_size, worths)
        self.host = HostTier(self.pool, self.host_blocks, self.max_copies)
        if not self.host_blocks:
            self.pool.demote = None
        self.store = None
        if self.store_blocks:
            above = [self.pool, self.host.pool]
            self.store = StoreTier(
                self.store_blocks, self.block_size, self.hasher, bytes.hex, lower_than=above
            )
        self.entries = Entries(
            self.pool,
            lease_share=self.lease_share,
            scope_lease_share=self.scope_lease_share,
            grace_seconds=self.grace_seconds,
            host=self.host.pool,
            store=self.store,
        )
        self.cache = PrefixCache(self.pool, self.entries, self.hasher, self.host, self.store)
        self.memory = [[-1] * self.block_size for _ in range(self.num_blocks)]
        self.host_memory = [[-1] * self.block_size for _ in range(self.host_blocks)]

    # What a request does.

    def arrive(
        self,
        scope: str,
        segments: Sequence[Sequence[int]],
        marks: dict[int, Ttl],
        **more: Any,
    ) -> Life:
        """Make a query of it, look up and hold."""
        query = self.query(scope, segments, marks, **more)
        readable = self._readable(query)
        before = leased_blocks(self)
        must_read = max((n for n, known in readable.items() if known.is_promised), default=0)
        lookup = self.cache.look_up(query)
        hit = lookup.hit.tokens if lookup.hit else 0
        assert hit >= must_read, "a promised entry was not found"
        assert hit == 0 or hit in readable, "a hit that nobody wrote, or that is over"
        for tokens, known in readable.items():
            if tokens == hit or tokens in {mark.tokens for mark in lookup.marks}:
                extended = query.arrived_at + TTLS[known.ttl].seconds
                known.expires_at = max(known.expires_at, extended)
                known.used_at = max(known.used_at, query.arrived_at)
        if lookup.hit is not None and lookup.hit.is_leased:
            readable[hit].is_promised = True
        life = Life(query, self.cache.new_table(query), list(query.tokens), lookup)
        self.lives.append(life)
        note_yielded(self, scope, before)
        note_new_leases(self)
        return life

    def query(
        self,
        scope: str,
        segments: Sequence[Sequence[int]],
        marks: dict[int, Ttl],
        *,
        scaffold: Sequence[int] = (99,),
        min_cache_tokens: int = 1,
        age: float = 0.0,
        adapter: ChainKind | None = None,
        hold: bool | None = None,
    ) -> CacheQuery:
        """A prompt of token segments, breakpoints by segment index.

        `age`: seconds since it arrived at the gateway; turns need not get here in that order.
        """
        tokens: list[int] = []
        spans: list[Segment] = []
        for segment in segments:
            tokens.extend(segment)
            spans.append(Segment("text", len(tokens)))
        tokens.extend(scaffold)
        query = CacheQuery(
            scope=scope,
            tokens=tokens,
            digests=self.cache.digests(scope, tokens, adapter),
            segments=spans,
            breakpoints=[
                Breakpoint(index, ttl, hold=self.marks_hold if hold is None else hold)
                for index, ttl in marks.items()
            ],
            names=[],
            min_cache_tokens=min_cache_tokens,
            arrived_at=self.now - age,
            lease_share=self.lease_shares.get(scope),
        )
        self.used_shares[scope] = self.lease_shares.get(scope, self.scope_lease_share)
        for end in range(len(tokens) + 1):
            prefix = (scope, tuple(kept_of(tokens[:end], adapter)))
            digest = query.digests.at(end)
            assert self.meaning.setdefault(digest, prefix) == prefix, "one digest, two prefixes"
            self.key_of[prefix] = digest
        return query

    def begin(self, life: Life) -> bool:
        """Admit it; False when there is no room."""
        assert life.found is not None
        try:
            copies = self.cache.begin(life.query, life.found, life.table)
        except NoFreeBlocks:
            assert not life.table.blocks
            return False
        assert life.found.reused >= life.found.read, "a read that was not reused"
        missing = sum(stop - start for start, stop in life.table.gaps(len(life.tokens)))
        assert life.found.reused + missing == len(life.tokens), "counted what is computed"
        self._copy(copies)
        life.is_running = True
        return True

    def compute(self, life: Life, count: int) -> None:
        """Write the KV of the next `count` tokens that can be computed where the table says."""
        kept_tokens = life.kept
        for start, stop in list(life.table.gaps(life.table.reachable(len(life.tokens)))):
            stop = min(stop, start + count)
            for position in range(start, stop):
                block = life.table.blocks[position // self.block_size]
                assert block.ref_count == 1, "a write to a block that somebody else references"
                self.memory[block.block_id][position % self.block_size] = kept_tokens[position]
                if not life.is_started:
                    life.computed.add(position)
            life.table.commit(life.tokens[start:stop])
            count -= stop - start
            if not count:
                return

    def bring_back(self, life: Life, count: int = 100) -> None:
        """Copy what it waits for from the host or the store, that many blocks at most."""
        while life.table.incoming and count:
            if life.table.next_incoming.tier == "disk":
                bring_from_disk(self, life)
                count -= 1
                continue
            source, target = self.host.promote(life.table)
            self.memory[target] = list(self.host_memory[source])
            count -= 1

    def start(self, life: Life) -> CacheResult:
        """The prompt is computed: write its entries."""
        assert life.found is not None and life.pending == 0
        scope, tokens = life.query.scope, life.query.tokens
        before = leased_blocks(self)
        for mark in life.found.marks:
            prefix = (scope, tuple(life.kept[: mark.tokens]))
            known = self._present(prefix)
            if known is None or known.expires_at <= self.now:
                self.expected.pop(prefix, None)
                expires_at = life.query.arrived_at + TTLS[mark.ttl].seconds
                if expires_at > self.now:
                    self.expected[prefix] = Expected(
                        mark.ttl, expires_at, self.now, False, used_at=self.now
                    )
            else:
                ttl = known.ttl if known.ready_at <= life.query.arrived_at else mark.ttl
                extended = life.query.arrived_at + TTLS[ttl].seconds
                known.expires_at = max(known.expires_at, extended)
                known.used_at = self.now
        start = self.cache.write(life.query, life.found, life.table, self.now)
        usage = start.usage
        assert min(life.computed, default=len(tokens)) >= life.found.read, "read, yet computed"
        assert usage.prompt_tokens == len(tokens)
        assert usage.cache_read_tokens == life.found.read
        assert usage.computed_tokens == len(tokens) - life.found.reused
        hit = life.found.hit.tokens if life.found.hit is not None else 0
        for report in start.breakpoints:
            end = life.query.segments[report.segment].end or 0
            assert (report.missed is None) == (end <= hit), "a reason for what was not read alone"
        life.is_started = True
        note_yielded(self, scope, before)
        note_new_leases(self)
        return start

    def decode(self, life: Life, token: int) -> bool:
        """One more token of an answer; False when there is no room for its predecessor's KV."""
        if life.pending == 0:
            life.tokens.append(token)
        try:
            copies = life.table.prepare(1)
        except NoFreeBlocks:
            return False
        self._copy(copies)
        self.compute(life, 1)
        return True

    def fork(self, life: Life, drop: int = 0) -> Life:
        """A second sequence from the same tokens, less the last `drop`."""
        num_tokens = max(life.table.num_tokens - drop, 0)
        twin = Life(life.query, life.table.fork(num_tokens), life.tokens[:num_tokens], None)
        twin.is_running = twin.is_started = True
        self.lives.append(twin)
        return twin

    def preempt(self, life: Life) -> None:
        life.table.release()
        life.is_running = False

    def resume(self, life: Life) -> bool:
        try:
            copies = self.cache.resume(life.query, life.tokens, life.table)
        except NoFreeBlocks:
            assert not life.table.blocks
            return False
        self._copy(copies)
        life.is_running = True
        return True

    def end(self, life: Life) -> None:
        """It finished, or was cancelled: everything goes back."""
        if life.found is not None:
            self.cache.let_go(life.found)
        life.table.release(life.end)
        self.lives.remove(life)

    def run(
        self,
        scope: str,
        segments: Sequence[Sequence[int]],
        marks: dict[int, Ttl],
        answer: int = 0,
        **more: Any,
    ) -> Life:
        """A whole request; it keeps its blocks until `end`."""
        life = self.arrive(scope, segments, marks, **more)
        assert self.begin(life)
        self.bring_back(life)
        self.compute(life, life.pending)
        self.start(life)
        for token in range(answer):
            assert self.decode(life, 1000 + token)
        return life

    # What happens to it.

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.entries.leases.take_ended()
        self.entries.expire(self.now)
        for prefix, known in list(self.expected.items()):
            if known.expires_at <= self.now:
                del self.expected[prefix]

    def drop(self, scope: str, key: Digest | None = None) -> None:
        self.entries.drop(scope, key)
        for prefix in list(self.expected):
            if prefix[0] == scope and key in (None, self.key_of[prefix]):
                del self.expected[prefix]

    def drop_adapter(self, digest: str) -> None:
        doomed = {e.key for e in self.entries.live() if e.kind and e.kind.digest == digest}
        assert self.entries.drop_adapter(digest) == len(doomed)
        for prefix in list(self.expected):
            if self.key_of[prefix] in doomed:
                del self.expected[prefix]

    def lose(self, block: Block) -> None:
        """An unreferenced block is reused out of turn; whoever has it then leaves it empty."""
        with self.pool.only(block):
            assert self.pool.allocate() is block
            self._copy([])
            self.pool.release(block)

    def sacrifice(self) -> bool:
        """Ends exactly the promise that would have ended first."""
        promised = []
        for prefix, known in self.expected.items():
            entry = self.entries.get(self.key_of[prefix])
            if known.is_promised and entry is not None and entry.lease_tier == "device":
                promised.append(known)
        self.entries.leases.take_ended()
        has_sacrificed = self.entries.leases.sacrifice()
        assert has_sacrificed == bool(promised)
        for ended in self.entries.leases.take_ended():
            assert ended.reason == "sacrificed"
            known = self.expected[self.meaning[ended.entry.key]]
            assert known.expires_at == min(p.expires_at for p in promised)
            known.is_promised = False
        return has_sacrificed

    # What must hold at any time.

    def check(self) -> None:
        check(self)

    def blocks(self) -> list[Block]:
        """Of all tiers."""
        stored = self.store.pool.blocks if self.store is not None else []
        return [*self.pool.blocks, *self.host.pool.blocks, *stored]

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        for source, destination in self.host.take_demotions():
            self.host_memory[destination] = list(self.memory[source])
        for source, destination in copies:
            self.memory[destination] = list(self.memory[source])

    def _readable(self, query: CacheQuery) -> dict[int, Expected]:
        """What may be read at each segment's end, up to the last eligible breakpoint."""
        ends = [segment.end or 0 for segment in query.segments]
        marked = [ends[point.segment] for point in query.breakpoints]
        last = max((end for end in marked if end >= query.min_cache_tokens), default=0)
        readable = {}
        kept_tokens = kept_of(query.tokens, query.digests.kind)
        for end in ends:
            known = self._present((query.scope, tuple(kept_tokens[:end])))
            if end <= last and known and known.ready_at <= query.arrived_at < known.expires_at:
                readable[end] = known
        return readable

    def _present(self, prefix: Prefix) -> Expected | None:
        """What is known of an entry; a best-effort one may have gone with its blocks."""
        known = self.expected.get(prefix)
        if known is None:
            return None
        entry = self.entries.get(self.key_of[prefix])
        if not known.is_promised and (entry is None or entry.is_broken):
            del self.expected[prefix]
            return None
        return known

    def entry_at(self, scope: str, *segments: Sequence[int]) -> Entry | None:
        """The entry that a prompt beginning with these segments would read."""
        query = self.query(scope, segments, {len(segments) - 1: "5m"})
        return self.entries.find(query.digests, len(query.tokens) - 1, self.now)
