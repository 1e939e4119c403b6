"""What must hold of a cache at any time, and of a world by what its requests were told."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from engine.backends.reports import Count, cells_of, holdings_of, owners_of
from engine.cache.block import Block, BlockQueue, Entry
from engine.cache.device_leases import Leases
from engine.cache.digests import TOKEN_BYTES
from engine.cache.entries import Entries
from engine.cache.order import Order
from engine.cache.pool import BlockPool
from engine.cache.store_tier import StoreTier
from engine.cache.worth_queue import WorthQueue
from tests.engine.cache.disk import content_on_disk

if TYPE_CHECKING:
    from tests.engine.cache.world import World

T = TypeVar("T", bound=Hashable)


def check(world: "World") -> None:
    check_pool(world.pool)
    check_entries(world.entries)
    check_pool(world.host.pool)
    assert world.host.pool.num_leased == 0, "leases are on the device"
    if world.store is not None:
        check_store(world.store)
    _check_references(world)
    check_holdings(world)
    for life in world.lives:
        pinned_blocks = life.found.pinned if life.found else []
        if pinned_blocks:
            assert life.found is not None
            _check_content(world, pinned_blocks, life.kept[: life.found.read])
        _check_content(world, life.table.blocks, life.kept[: life.table.num_tokens])
        for index, count in life.table.beyond.items():
            start = index * world.block_size
            expected_tokens = life.kept[start : start + count]
            if index in life.table.incoming:
                _check_content(world, [life.table.incoming[index]], expected_tokens)
                continue
            _check_content(world, [life.table.blocks[index]], expected_tokens)
    for entry in world.entries.live():
        scope, tokens = world.meaning[entry.key]
        assert entry.scope == scope and entry.tokens == len(tokens)
        _check_content(world, entry.blocks, tokens)
    for prefix, known in world.expected.items():
        present = world.entries.get(world.key_of[prefix])
        if known.is_promised and known.expires_at > world.now:
            assert present is not None and present.is_leased, "a promise was broken"
        if present is not None and not present.is_broken:
            assert (present.ttl, present.expires_at) == (known.ttl, known.expires_at)
    for block in world.blocks():
        if block.digest is not None:
            _, tokens = world.meaning.get(block.digest, ("", ()))
            if tokens:
                _check_content(world, [block], tokens[-world.block_size :])


def check_holdings(world: "World") -> None:
    """Each block is told once, for whom it is: counted here from the blocks' side."""
    owners = dict[Block, Entry]()
    for _ in owners_of(world.cache, owners):
        pass
    parts = list(cells_of(world.cache, 3, owners))
    holdings = sum((part.holdings for part in parts), start=Count())
    expected_counts = Count()
    for block in world.pool.blocks:
        standing = [e for e in world.entries.live() if any(b is block for b in e.blocks)]
        standing.sort(key=lambda entry: (not entry.is_leased, entry.tokens))
        entry = standing[0] if standing else None
        if block.ref_count > block.lease_count:
            state = "active"
        elif block.lease_count:
            state = "leased"
        elif entry is not None:
            state = "lowered" if entry.is_leased else "best_effort"
        elif block.has_content:
            state = "cached"
        else:
            continue
        scope = entry.scope if entry else world.cache.scopes.get(block.owner)
        assert scope is not None and world.hasher.root(scope) == block.owner
        expected_counts[scope, entry, state] += 1
    assert _by_key(holdings) == _by_key(expected_counts), "the holdings are not the blocks"
    cells = [cell for part in parts for cell in part.cells]
    free, active, leased, best_effort, cached = (
        sum(getattr(cell, name) for cell in cells)
        for name in ("free", "active", "leased", "best_effort", "cached")
    )
    assert (free, active, leased) == _counts(world.pool)[:3]
    assert best_effort + cached == sum(_counts(world.pool)[3:])
    shares = holdings_of(holdings)
    assert free + sum(
        share.active + share.leased + share.lowered + share.best_effort + share.cached
        for share in shares
    ) == len(world.pool.blocks)
    assert sum(share.cached for share in shares if share.entry is not None) == 0


def _counts(pool: BlockPool) -> tuple[int, ...]:
    counts = pool.counts()
    return counts.free, counts.active, counts.leased, counts.best_effort, counts.cached


def _by_key(count: Count) -> dict[tuple[str | None, bytes | None, str], int]:
    return {(scope, e.key if e else None, state): n for (scope, e, state), n in count.items()}


def _check_content(world: "World", blocks: Sequence[Block], tokens: Sequence[int]) -> None:
    content_tokens: list[int] = []
    for position, block in enumerate(blocks):
        if block.tier == "disk":
            content = content_on_disk(world, block)
            start = position * world.block_size
            content_tokens += content or tokens[start : start + world.block_size]
            continue
        memory = world.host_memory if block.is_away else world.memory
        content_tokens += memory[block.block_id]
    assert content_tokens[: len(tokens)] == list(tokens), "other content than promised"


def _check_references(world: "World") -> None:
    ref_counts: Counter[Block] = Counter()
    for life in world.lives:
        ref_counts.update(life.table.blocks)
        ref_counts.update(life.table.incoming.values())
        if life.found is not None:
            ref_counts.update(life.found.pinned)
    for entry in world.entries.live():
        if entry.is_leased and entry.lease_tier == "device":
            ref_counts.update(entry.blocks)
    if world.store is not None:
        for job in world.store._jobs.values():
            ref_counts.update(job.blocks)
        ref_counts.update(block for block, _ in world.store._pending.values())
        for entry in world.store.copies.entries():
            ref_counts.update(entry.stored or ())
    for block in world.blocks():
        assert block.ref_count == ref_counts[block], "references do not add up"


def check_pool(pool: BlockPool) -> None:
    """All that needs no outside knowledge."""
    shares = list(pool._shares.values())
    queues = [pool._empty, *(share.unreferenced for share in shares)]
    inside: dict[BlockQueue | None, list[Block]] = {}
    for block in pool.blocks:
        inside.setdefault(block.queue, []).append(block)
    for queue in queues:
        queued = inside.get(queue, [])
        assert len(queue) == len(queued)
        if isinstance(queue, WorthQueue):
            check_leaves(pool, queue, queued)
        else:
            check_order(queue.order, queued)
    num_queued = sum(map(len, queues))
    assert num_queued == pool.num_reclaimable == len(pool.blocks) - len(inside.get(None, []))
    for block in pool.blocks:
        assert 0 <= block.lease_count <= block.ref_count
        assert (block.ref_count == 0) == (block.queue is not None)
        assert len(block.tokens) <= pool.block_size * TOKEN_BYTES
        if (share := block.share) is None:
            assert block.queue is pool._empty
            assert not block.has_content and not block.names
        elif block.queue is not None:
            assert block.has_content
            assert block.queue is share.unreferenced
        else:
            assert share.owner == block.owner
        if block.digest is not None:
            assert pool._index.get(block.digest) is block
            assert len(block.tokens) == pool.block_size * TOKEN_BYTES
    assert all(block.digest == digest for digest, block in pool._index.items())
    assert all(share.num_owned > 0 for share in shares)
    check_order(pool._largest, shares)
    num_by_owner = Counter(block.share.owner for block in pool.blocks if block.share is not None)
    assert num_by_owner == {share.owner: share.num_owned for share in shares}
    assert pool.num_leased == sum(b.lease_count > 0 for b in pool.blocks)
    assert pool.num_shared == sum(b.ref_count > 1 for b in pool.blocks)
    counts = pool.counts()
    assert counts.leased == sum(0 < b.lease_count == b.ref_count for b in pool.blocks)
    unreferenced = [b for b in pool.blocks if not b.ref_count and b.has_content]
    assert counts.best_effort == sum(bool(b.dependents) for b in unreferenced)
    assert counts.cached + counts.best_effort == len(unreferenced)


def check_entries(entries: Entries) -> None:
    """Entries, leases, dependents and the store's holds agree."""
    check_leases(entries.leases)
    leased = {entry for scope in entries.leases._scopes.values() for entry in scope.entries}
    for key, entry in entries._by_key.items():
        assert entry.key == key
        assert entry.expires_at == max([entry.kept_until, *entry.refreshed_until])
        is_below = entry.is_leased and entry.lease_tier == "disk"
        assert (entry in leased) == entry.is_leased_on_device
        assert not (entry.is_leased and entry.is_broken), "a leased block was reused"
        assert entry.is_asked_for or not entry.is_leased, "leased, and nobody asked for it"
        assert not is_below or entry.stored is not None, "leased, and nothing holds it"
        for index, block in enumerate(entry.blocks):
            assert entry.is_broken or block.index == index
            if not entry.is_leased and not entry.is_broken:
                assert entry in block.dependents
            is_own = entry.stored is not None and entry.stored[index] is block
            assert not is_below or is_own or entry in block.dependents
            assert entry not in leased or entry not in block.dependents
    assert all(entries.get(entry.key) is entry for entry in leased)
    assert entries._num_lapsed == sum(entry.is_lapsed for entry in entries._by_key.values())
    if entries._store is not None:
        stored_entries = set(entries._store.copies.entries())
        assert stored_entries <= set(entries._by_key.values()), "the store holds an ended entry"


def check_leases(leases: Leases) -> None:
    """Leases, references and budgets agree."""
    references: Counter[int] = Counter()
    for name, scope in leases._scopes.items():
        leased_ids: set[int] = set()
        for entry in scope.entries:
            assert entry.is_leased and entry.scope == name
            ids = [block.block_id for block in entry.blocks]
            leased_ids.update(ids)
            references.update(ids)
        check_order(scope.to_lower, scope.entries)
        check_order(scope.to_end, scope.entries)
        assert scope.num_blocks == len(leased_ids)
    for block in leases._pool.blocks:
        assert block.lease_count == references[block.block_id]
    assert leases._pool.num_leased <= leases.max_blocks


def check_leaves(pool: BlockPool, queue: WorthQueue, queued: Sequence[Block]) -> None:
    """Each block is in its place, and a leaf where nothing findable stands behind it."""
    parents = Counter(block.parent for block in pool.blocks if block.parent is not None)
    assert parents == pool._num_following
    assert [block.place for block in queue._leaves] == list(range(len(queue._leaves)))
    assert [block.place for block in queue._inner] == list(range(len(queue._inner)))
    assert {*queue._leaves, *queue._inner} == set(queued)
    assert all(block.digest not in parents for block in queue._leaves)
    assert all(block.digest in parents for block in queue._inner)


def check_order(order: Order[T], items: Iterable[T]) -> None:
    """The first of these is found."""
    keys = [key for item in items if (key := order._key_of(item)) is not None]
    first = order.first()
    assert (first is None) == (not keys)
    assert first is None or order._key_of(first) == min(keys), "the first is not found"


def check_store(store: StoreTier) -> None:
    check_pool(store.pool)
    counts: Counter[Block] = Counter()
    for name, scope in store.copies._scopes.items():
        stored: set[Block] = set()
        for entry in scope.entries:
            assert entry.scope == name and entry.stored
            stored.update(entry.stored)
            for block in entry.stored:
                assert entry in store.copies.of(block) and not store.is_lost(block)
                counts[block] += 1
        assert scope.num_blocks == len(stored), "a scope's blocks are miscounted"
        check_order(scope.for_others, scope.entries)
    assert store.pool.num_leased <= store.copies.max_blocks
    assert len(store._blocks) == len(store._keys) and store._proven <= store._keys.keys()
    for block in store.pool.blocks:
        assert block.lease_count == counts[block]
        assert block.digest is None or not store.is_lost(block), "content without a file"
    for block, key in store._keys.items():
        assert store.block_of(key.name) is block and key.packed == block.tokens
