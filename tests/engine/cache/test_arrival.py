"""What was readable when a turn arrived is read when it gets to the engine some seconds later."""

from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.lookup import Segment
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, CacheResult, Found, PrefixCache
from engine.protocol import Breakpoint, Ttl
from tests.engine.cache.checks import check_entries, check_pool

SIZE = 4


class Late:
    """A cache whose requests arrive before they are submitted."""

    def __init__(self, num_blocks: int = 32, grace: float = 60.0, lease_share: float = 0.5) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.entries = Entries(self.pool, lease_share=lease_share, grace_seconds=grace)
        self.cache = PrefixCache(self.pool, self.entries, ChainHasher(b"k", SIZE))

    def query(self, tokens: list[int], arrived_at: float, ttl: Ttl = "5m") -> CacheQuery:
        whole = [*tokens, 9999]
        return CacheQuery(
            scope="s",
            tokens=whole,
            digests=self.cache.digests("s", whole),
            segments=[Segment("text", len(tokens), 0)],
            breakpoints=[Breakpoint(0, ttl)],
            names=[],
            min_tokens=1,
            arrived_at=arrived_at,
        )

    def look_up(self, query: CacheQuery, now: float) -> Found:
        self.entries.expire(now)
        return self.cache.look_up(query)

    def run(
        self, tokens: list[int], *, arrived_at: float, now: float, ttl: Ttl = "5m"
    ) -> CacheResult:
        query = self.query(tokens, arrived_at, ttl)
        found = self.look_up(query, now)
        table = self.cache.new_table(query)
        self.cache.begin(query, found, table)
        table.commit(query.tokens[table.num_tokens :])
        written = self.cache.write(query, found, table, now)
        table.release()
        check_pool(self.pool)
        check_entries(self.entries)
        return written


PROMPT = list(range(10))


def test_after_the_grace_nothing_is_kept() -> None:
    late = Late(grace=60)
    late.run(PROMPT, arrived_at=0, now=0)
    late.entries.expire(359.9)
    assert late.pool.counts().best_effort == 3
    late.entries.expire(360)
    assert late.pool.counts().best_effort == 0
    written = late.run(PROMPT, arrived_at=295, now=361)
    assert written.usage.cache_read_tokens == 0


def test_an_expired_entry_is_told_to_nobody_as_there() -> None:
    late = Late()
    late.run(PROMPT, arrived_at=0, now=0)
    late.entries.expire(300)
    assert [ended.reason for ended in late.entries.leases.take_ended()] == ["expired"]
    assert len(late.entries) == 0 and late.entries.live() == []
    assert late.pool.counts().leased == 0 and late.entries.next_expiry() is None
    assert late.entries.drop("s") == 0


def test_a_flood_of_plain_content_leaves_it_readable_for_its_late_reader() -> None:
    late = Late(num_blocks=16)
    late.run(PROMPT, arrived_at=0, now=0)
    late.entries.expire(301)
    for number in range(20):
        query = late.query([1000 + 100 * number + i for i in range(30)], 301)
        unmarked = CacheQuery(
            scope="other",
            tokens=query.tokens,
            digests=late.cache.digests("other", query.tokens),
            segments=query.segments,
            breakpoints=[],
            names=[],
            min_tokens=1,
            arrived_at=301,
        )
        found = late.look_up(unmarked, 301)
        table = late.cache.new_table(unmarked)
        late.cache.begin(unmarked, found, table)
        table.commit(unmarked.tokens[table.num_tokens :])
        table.release()
    assert late.run(PROMPT, arrived_at=299, now=302).usage.cache_read_tokens == 10


def test_a_late_reader_that_never_answers_leaves_it_lapsed() -> None:
    late = Late()
    late.run(PROMPT, arrived_at=0, now=0)
    query = late.query(PROMPT, 295)
    found = late.look_up(query, 305)
    assert found.read == 10
    late.cache.let_go(found)
    late.cache.take_back(found)
    late.entries.expire(306)
    assert len(late.entries) == 0
    check_entries(late.entries)
    assert late.run(PROMPT, arrived_at=306, now=306).usage.cache_read_tokens == 0
