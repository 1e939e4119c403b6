"""The worked example of engine/README.md: ten blocks of four tokens, time 1 to time 7."""

from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.ids import TokenId
from engine.cache.lookup import Segment
from engine.cache.pool import BlockPool, PoolCounts
from engine.cache.prefix_cache import CacheQuery, Found, PrefixCache
from engine.cache.table import BlockCopy, BlockTable
from engine.protocol import Breakpoint, InputUsage
from tests.engine.cache.checks import check_entries, check_pool

A = [*range(100, 110)]
B = [*A[:6], *range(206, 210)]
FLOOD = [*range(300, 330)]


class Example:
    def __init__(self) -> None:
        self.pool = BlockPool(10, 4)
        self.entries = Entries(self.pool, lease_share=0.5)
        self.cache = PrefixCache(self.pool, self.entries, ChainHasher(b"key" * 8, 4))

    def query(self, tokens: list[TokenId], *, is_marked: bool, now: float) -> CacheQuery:
        """Two segments: six tokens, which may be marked, and the rest."""
        return CacheQuery(
            scope="scope",
            tokens=tokens,
            digests=self.cache.digests("scope", tokens),
            segments=[Segment("text", 6), Segment("text", len(tokens))],
            breakpoints=[Breakpoint(0)] if is_marked else [],
            names=[],
            min_tokens=4,
            arrived_at=now,
        )

    def begin(self, query: CacheQuery) -> tuple[Found, BlockTable, list[BlockCopy]]:
        found, table = self.cache.look_up(query), self.cache.new_table(query)
        return found, table, self.cache.begin(query, found, table)

    def prefill(self, query: CacheQuery, found: Found, table: BlockTable) -> InputUsage:
        table.commit(query.tokens[table.num_tokens :])
        return self.cache.write(query, found, table, query.arrived_at).usage

    def counts(self) -> PoolCounts:
        check_pool(self.pool)
        check_entries(self.entries)
        return self.pool.counts()


def counts(free: int, active: int, leased: int, cached: int, shared: int = 0) -> PoolCounts:
    return PoolCounts(
        free=free, active=active, leased=leased, best_effort=0, cached=cached, shared=shared
    )


def test_the_worked_example_of_the_readme() -> None:
    example = Example()

    # Time 1: a prompt of ten tokens, marked after six.
    query = example.query(A, is_marked=True, now=0)
    found, table, copies = example.begin(query)
    usage = example.prefill(query, found, table)
    assert (list(table.block_ids), copies) == ([0, 1, 2], [])
    assert (usage.cache_write_5m_tokens, usage.computed_tokens) == (6, 10)
    assert example.counts() == counts(free=7, active=3, leased=0, cached=0, shared=2)

    # Time 2: it decodes two tokens into its own block and ends.
    for token in (900, 901):
        assert table.prepare(1) == []
        table.commit([token])
    assert list(table.block_ids) == [0, 1, 2]
    table.release()
    assert example.counts() == counts(free=7, active=0, leased=2, cached=1)

    # Time 3: a second prompt with the same first six tokens.
    query = example.query(B, is_marked=True, now=10)
    found, table, copies = example.begin(query)
    usage = example.prefill(query, found, table)
    assert (list(table.block_ids), copies) == ([0, 3, 4], [BlockCopy(1, 3)])  # type: ignore[arg-type]
    assert (usage.cache_read_tokens, usage.computed_tokens) == (6, 4)
    assert example.counts() == counts(free=5, active=3, leased=1, cached=1, shared=1)

    # Time 4: a fork. Whoever writes first copies the tail; the other may then write in place.
    fork = table.fork(10)
    assert list(fork.block_ids) == [0, 3, 4]
    assert fork.prepare(1) == [BlockCopy(4, 5)]  # type: ignore[arg-type]
    fork.commit([910])
    assert table.prepare(1) == []
    table.commit([911])
    assert (list(fork.block_ids), list(table.block_ids)) == ([0, 3, 5], [0, 3, 4])
    assert example.counts() == counts(free=4, active=4, leased=1, cached=1, shared=2)

    # Time 5: both end.
    fork.release()
    table.release()
    assert example.counts() == counts(free=6, active=0, leased=2, cached=2)

    # Time 6: a flood of thirty unmarked tokens takes everything but the lease.
    query = example.query(FLOOD, is_marked=False, now=20)
    found, table, copies = example.begin(query)
    example.prefill(query, found, table)
    assert list(table.block_ids) == [4, 5, 6, 7, 8, 9, 2, 3]
    assert example.counts() == counts(free=0, active=8, leased=2, cached=0)
    table.release()

    # Time 7: 300 s after the last read the lease ends, to the moment.
    example.entries.expire(309.9)
    assert example.counts() == counts(free=1, active=0, leased=2, cached=7)
    example.entries.expire(310)
    assert example.counts() == counts(free=1, active=0, leased=0, cached=9)
